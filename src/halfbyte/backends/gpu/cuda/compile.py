"""Compiles CUDA C++ and launches it: NVRTC and the driver, through ctypes. Loads no framework.

NVRTC comes with PyTorch's CUDA wheels (or `pip install nvidia-cuda-nvrtc`). Sums and products are never contracted:
`--fmad=false`, so that operations are fused only where the source says so.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from halfbyte.errors import BackendError

SOURCES = Path(__file__).parent
OPTIONS = ("--std=c++17", "--fmad=false")
DYNAMIC_SHARED_MEMORY = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
MOST_SHARED_MEMORY = 97
"""CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"""

PROGRAMMATIC_STREAM_SERIALIZATION = 6

Argument = ctypes.Structure | ctypes.c_void_p

_LOCK = threading.Lock()
_MODULES: dict[tuple[int, str, tuple[str, ...]], tuple[Function, ...]] = {}


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, with a value that is one number."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class Configuration(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("threads", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


@dataclass(frozen=True)
class Function:
    """A kernel on one device."""

    handle: ctypes.c_void_p
    name: str

    def launch(
        self,
        grid: tuple[int, int],
        threads: int,
        shared: int,
        stream: int,
        *arguments: Argument,
        overlaps: bool = False,
    ) -> None:
        """Put a launch on a stream; nothing waits. `overlaps`: it may start while the one before is still running."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        attribute = Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        configuration = Configuration(
            (*grid, 1), (threads, 1, 1), shared, stream, ctypes.pointer(attribute), int(overlaps)
        )
        status = driver().cuLaunchKernelEx(ctypes.byref(configuration), self.handle, pointers, None)
        _check_driver(status, f"launching {self.name}")


def functions_for(
    device: int, architecture: str, source: str, names: tuple[str, ...], definitions: tuple[str, ...], shared: int
) -> tuple[Function, ...]:
    """Kernels of a file, compiled when they are first asked for; the device's context must be current.

    shared: the most dynamic shared memory that any of them is launched with.
    """
    key = (device, source, definitions)
    with _LOCK:
        if key not in _MODULES:
            image = compile_source(source, architecture, definitions)
            module = ctypes.c_void_p()
            _check_driver(driver().cuModuleLoadData(ctypes.byref(module), image), f"loading {source}")
            _MODULES[key] = tuple(_function(module, name, shared) for name in names)
        return _MODULES[key]


def _function(module: ctypes.c_void_p, name: str, shared: int) -> Function:
    handle = ctypes.c_void_p()
    _check_driver(driver().cuModuleGetFunction(ctypes.byref(handle), module, name.encode()), f"finding {name}")
    status = driver().cuFuncSetAttribute(handle, DYNAMIC_SHARED_MEMORY, shared)
    _check_driver(status, f"giving {name} {shared} bytes of shared memory")
    return Function(handle, name)


def make_current(index: int) -> None:
    """Give this thread the device's context, if it has none yet: the driver's calls need one, unlike the runtime's."""
    context, device = ctypes.c_void_p(), ctypes.c_int()
    _check_driver(driver().cuCtxGetCurrent(ctypes.byref(context)), "asking for the context")
    if context.value is None:
        _check_driver(driver().cuDeviceGet(ctypes.byref(device), index), f"finding device {index}")
        _check_driver(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"opening device {index}")
        _check_driver(driver().cuCtxSetCurrent(context), f"using device {index}")


def shared_memory_of(index: int) -> int:
    """Bytes of shared memory that a block of threads can get on a device."""
    device, found = ctypes.c_int(), ctypes.c_int()
    _check_driver(driver().cuDeviceGet(ctypes.byref(device), index), f"finding device {index}")
    status = driver().cuDeviceGetAttribute(ctypes.byref(found), MOST_SHARED_MEMORY, device)
    _check_driver(status, f"asking device {index} for its shared memory")
    return found.value


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


@functools.cache
def driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendError(f"the NVIDIA driver was not found: {error}") from error


def _check_driver(status: int, what: str) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    driver().cuGetErrorString(status, ctypes.byref(text))
    raise BackendError(f"{what}: {(text.value or b'unknown error').decode()} ({status})")
