"""The Triton kernels by name: their arguments, and how they become images. Triton is imported only to compile.

All arguments are eight bytes long: addresses, and integers as int64. So one image serves every shape, and the buffer of
arguments is an array of words. An image depends on the constants of a kernel, on the sources, and on Triton's version.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.backends import numbering
from halfbyte.backends.gpu.constants import LISTED
from halfbyte.backends.gpu.driver.commands import Image
from halfbyte.backends.gpu.driver.disk import cached, is_cached
from halfbyte.errors import BackendError

if TYPE_CHECKING:
    import torch

GPU = Path(__file__).parents[1]

TYPES = {"w": "*i32", "b": "*u8", "h": "*i16", "l": "*i64", "f": "*fp32", "p": "*i32", "s": "*i16",
         "g": "*fp32", "t": "*i64", "n": "i64"}  # fmt: skip
"""w words, b bytes, h halves, l longs, f floats; p words, s halves, g floats and t longs at any address; n numbers."""

ALIGNED = "whlf"
"""Pointers whose addresses are multiples of sixteen: the compiler may then load sixteen bytes at once."""

ARGUMENTS = {
    "scales.amax_partials": "wp nnnnn",
    "scales.amax_listed": "tp n",
    "scales.prepare": "pfgg nnnn",
    "survey.amax_blocks": "wpph nnnn",
    "survey.prepare_candidates": "ppl fgg ttpp nn",
    "survey.survey": "wf hs fgg ttpp fgg nnnnnnnnnn",
    "plain.quantize_nvfp4": "wwbf nnnn",
    "plain.quantize_mx": "wwbbfw nnn",
    "four_six.quantize_four_six": "wwbf nnnn",
    "tiles.quantize_tiles": "wwbf nnn",
    "sweep.quantize_static": "wwbf nnnn",
    "search.quantize_optimal": "wwbff nnnn",
    "hessian.quantize_hessian": "wwbfff nnnnn",
    "descent.descend": "wwbff nnnn",
    "mx_search.improve_mx": "wwbff nnnn",
    "mx_search.quantize_mx_optimal": "wwbbfw nnn",
    "qwantize.improve_as_qwantize": "wwbf nnnn",
    "hadamard.rotate": "pw nnnn",
    "decode.dequantize": "wbgfw nnnn",
    "decode.cast_mxfp4_to_nvfp4": "wbwhp nn",
}
"""The arguments of each kernel, in order, by the letters of TYPES."""

Constant = int | float | bool


@dataclass(frozen=True)
class TritonKernel:
    """A kernel of triton/, with the constants that it is compiled with."""

    name: str
    """Module and function: a key of ARGUMENTS."""
    constants: tuple[tuple[str, Constant], ...]
    warps: int
    fused: bool = False
    """Whether the compiler may contract products and sums."""

    @property
    def letters(self) -> str:
        """The arguments. Listed tensors come as a table of longs; the transform reads halves of 16-bit dtypes."""
        found, constants = ARGUMENTS[self.name].replace(" ", ""), dict(self.constants)
        if constants.get("MAP") == LISTED:
            return "l" + found[1:]
        if self.name == "hadamard.rotate" and constants["DTYPE"] != numbering.DTYPE_NUMBERS["fp32"]:
            return "s" + found[1:]
        return found

    def image(self, architecture: str) -> Image:
        return cached(self._parts(architecture), functools.partial(_compile, self, architecture))

    def is_cached(self, architecture: str) -> bool:
        return is_cached(self._parts(architecture))

    def _parts(self, architecture: str) -> list[object]:
        """All that the image depends on."""
        return ["triton", triton_version(), sources(), architecture, self.name, self.letters, self.constants,
                self.warps, self.fused]  # fmt: skip

    def interpret(self, grid: tuple[int, int], arguments: list[torch.Tensor | int]) -> None:
        options = {"num_warps": self.warps, "enable_fp_fusion": self.fused}
        self.function()[grid](*arguments, **dict(self.constants), **options)

    def function(self) -> Any:
        """The kernel itself."""
        module, name = self.name.split(".")
        return getattr(importlib.import_module(f"halfbyte.backends.gpu.triton.{module}"), name)


def triton_kernel(name: str, constants: Mapping[str, Constant], warps: int, fused: bool = False) -> TritonKernel:
    return TritonKernel(name, tuple(sorted(constants.items())), warps, fused)


@functools.cache
def triton_version() -> str:
    import importlib.metadata  # slow to import

    return importlib.metadata.version("triton")


@functools.cache
def sources() -> str:
    """A hash of everything that the kernels are made of."""
    parts = [*sorted((GPU / "triton").glob("*.py")), GPU / "constants.py", Path(numbering.__file__), Path(__file__)]
    digest = hashlib.sha256()
    for path in parts:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _compile(kernel: TritonKernel, architecture: str) -> Image:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, constants, letters = kernel.function(), dict(kernel.constants), iter(kernel.letters)
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        letter = next(letters)
        signature[name] = TYPES[letter]
        if letter in ALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": kernel.warps, "enable_fp_fusion": kernel.fused}
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    compiled = triton.compile(source, target=target, options=options)
    facts = compiled.metadata
    if getattr(facts, "global_scratch_size", 0) or getattr(facts, "profile_scratch_size", 0):
        raise BackendError(f"{kernel.name} was compiled with scratch memory, which halfbyte's launcher does not bring")
    words = parameters(compiled.asm["ptx"])
    if words < len(kernel.letters):
        raise BackendError(f"{kernel.name} has {words} parameters, but {len(kernel.letters)} arguments")
    return Image(compiled.asm["cubin"], facts.name, 32 * facts.num_warps, facts.shared, words)


def parameters(ptx: str) -> int:
    """How many parameters a kernel has; each must have eight bytes."""
    entry = ptx[ptx.index(".entry") :]
    found = re.findall(r"\.param\s+\.(\w+)", entry[: entry.index(")")])
    if any(kind not in ("u64", "s64", "b64") for kind in found):
        raise BackendError(f"a kernel has parameters that are not of eight bytes: {', '.join(found)}")
    return len(found)
