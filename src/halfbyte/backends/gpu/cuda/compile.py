"""Compiles CUDA C++ by NVRTC, through ctypes. Loads no framework.

NVRTC comes with PyTorch's CUDA wheels (or `pip install nvidia-cuda-nvrtc`). Sums and products are never contracted:
`--fmad=false`, so that operations are fused only where the source says so.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.backends.gpu.driver.commands import Image
from halfbyte.backends.gpu.driver.disk import cached, is_cached
from halfbyte.errors import BackendError

if TYPE_CHECKING:
    import torch

SOURCES = Path(__file__).parent
OPTIONS = ("--std=c++17", "--fmad=false")


@dataclass(frozen=True)
class CudaKernel:
    """A kernel of a file in cuda/, with the definitions that it is compiled with and how it is launched."""

    source: str
    name: str
    definitions: tuple[str, ...]
    threads: int
    shared: int
    words: int
    """Its parameters, or the fields of its one struct, of eight bytes each."""

    def image(self, architecture: str) -> Image:
        def make() -> Image:
            code = compile_source(self.source, architecture, self.definitions)
            return Image(code, self.name, self.threads, self.shared, self.words)

        return cached(self._parts(architecture), make)

    def is_cached(self, architecture: str) -> bool:
        return is_cached(self._parts(architecture))

    def _parts(self, architecture: str) -> list[object]:
        """All that the image depends on."""
        return ["nvrtc", _compiler_name(), _sources(self.source), OPTIONS, architecture, self.name, self.definitions,
                self.threads, self.shared, self.words]  # fmt: skip

    def interpret(self, grid: tuple[int, int], arguments: list[torch.Tensor | int]) -> None:
        raise BackendError(f"{self.name} runs on a card alone")


@functools.cache
def _sources(source: str) -> str:
    """A hash of a file and of all headers."""
    digest = hashlib.sha256()
    for path in (SOURCES / source, *sorted(SOURCES.glob("*.cuh"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _compiler_name() -> str:
    """Which NVRTC would compile, as far as that is known without loading it: its file's path and size."""
    for path in _compiler_paths():
        if Path(path).exists():
            return f"{path} {Path(path).stat().st_size}"
    return next(_compiler_paths(), "")


@functools.lru_cache(maxsize=16)
def compile_source(source: str, architecture: str, definitions: tuple[str, ...]) -> bytes:
    """Machine code of a file in cuda/ for "sm_90" and the like; PTX for "compute_90"."""
    nvrtc = compiler()
    program = ctypes.c_void_p()
    headers = sorted(SOURCES.glob("*.cuh"))
    texts = (ctypes.c_char_p * len(headers))(*(header.read_bytes() for header in headers))
    names = (ctypes.c_char_p * len(headers))(*(header.name.encode() for header in headers))
    text = (SOURCES / source).read_bytes()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.encode(), len(headers), texts, names)
    if status != 0:
        raise BackendError(f"NVRTC cannot take {source}: error {status}")
    try:
        chosen = [f"--gpu-architecture={architecture}", *OPTIONS, *definitions]
        options = (ctypes.c_char_p * len(chosen))(*(option.encode() for option in chosen))
        if nvrtc.nvrtcCompileProgram(program, len(chosen), options) != 0:
            log = _result(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise BackendError(f"NVRTC cannot compile {source} for {architecture}: {log.decode(errors='replace')}")
        if architecture.startswith("sm_"):
            return _result(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return _result(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _result(size_of: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    if size_of(program, ctypes.byref(size)) != 0:
        return b""
    buffer = ctypes.create_string_buffer(size.value)
    return buffer.raw if get(program, buffer) == 0 else b""


# --- libraries ---


@functools.cache
def compiler() -> ctypes.CDLL:
    """NVRTC, from the package that PyTorch brings or from the system."""
    tried = []
    for path in _compiler_paths():
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            tried.append(f"{path} ({error})")
    raise BackendError(
        "NVRTC, the run-time compiler of CUDA, was not found; `pip install nvidia-cuda-nvrtc` brings it"
        + (f". Tried: {'; '.join(tried)}" if tried else "")
    )


def _compiler_paths() -> Iterator[str]:
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations or [] if package is not None else []:
        for found in sorted(Path(folder).glob("*/lib/libnvrtc.so.*"), reverse=True):
            if "alt" not in found.name:
                yield str(found)
    if sys.platform == "linux":
        for major in (13, 12):
            yield f"libnvrtc.so.{major}"
            yield f"/usr/local/cuda/lib64/libnvrtc.so.{major}"
