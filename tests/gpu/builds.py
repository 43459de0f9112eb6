"""Every kernel with constants that stand for its uses, and how to compile one for a card that is not there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from halfbyte.backends.gpu.triton import decode as decode_kernels
from halfbyte.backends.gpu.triton import four_six as four_six_kernels
from halfbyte.backends.gpu.triton import hessian as hessian_kernels
from halfbyte.backends.gpu.triton import plain as plain_kernels
from halfbyte.backends.gpu.triton import scales as scales_kernels
from halfbyte.backends.gpu.triton import search as search_kernels

CAPABILITIES = (90, 100, 120)

POINTERS = {
    "x_ptr": "*i32", "codes_ptr": "*i32", "out_ptr": "*i32", "out_codes_ptr": "*i32", "amax_ptr": "*i32",
    "outside_ptr": "*i32", "split_ptr": "*i32", "scales_ptr": "*u8", "bytes_ptr": "*u8", "out_scales_ptr": "*i16",
    "table_ptr": "*fp32",
}  # fmt: skip
"""Pointers that are not to float32."""

ROUNDING = {"TIE": 0, "SIGN": 0, "NAN_CODE": 0, "ZERO_INPUT": False}
BLOCKS = {
    "B": 128, "N": 16, "DTYPE": 0, "MAP": 0, "GROUP": 0, "SWIZZLED": False, "SHORT": True, "PRE": 0, "ELEMENT": 0,
    "STATISTICS": 2, "LARGEST": 6.0, "SMALLEST": 0.0, "FOR_ZERO": -1.0, "FOR_ZERO_BYTE": -1, "WRAPS": False,
    "ASM": 1, **ROUNDING,
}  # fmt: skip
FOUR_SIX = {**BLOCKS, "PRE": 9, "KIND": 0, "METRIC": 0, "ORDER": 0, "TOP": 2688.0}
SEARCH = {**BLOCKS, "B": 32, "FIRST": 1}
MX = {
    "B": 128, "N": 32, "DTYPE": 0, "MAP": 0, "SWIZZLED": False, "WIDE": False, "NEAREST": False, "ROUNDED": False,
    "ASM": 1, **ROUNDING,
}  # fmt: skip
DECODE = {
    "B": 128, "N": 16, "DTYPE": 0, "MAP": 0, "GROUP": 0, "DECODE": 0, "TOP": 2688.0, "WIDE": False,
    "NEGATIVE_ZERO": True, "ASM": 1,
}  # fmt: skip
PREPARE = {
    "TOP": 2688.0, "KIND": 0, "STATISTICS": 2, "CONSTANT": 0.0, "STORED": 0, "MULTIPLIER": 0, "DTYPE": 0,
    "LANES": 128,
}  # fmt: skip


@dataclass(frozen=True)
class Build:
    """A kernel with its constants."""

    kernel: Any
    constants: dict[str, Any]
    warps: int = 4
    types: dict[str, str] = field(default_factory=dict)


AMAX = {"DTYPE": 0, "CHUNK": 1024, "DEPTH": 4}

BUILDS: dict[str, Build] = {
    "amax": Build(scales_kernels.amax_spans, AMAX, 8),
    "amax of listed tensors": Build(scales_kernels.amax_listed, AMAX, 8, {"table_ptr": "*i64"}),
    "tensor-level numbers": Build(scales_kernels.prepare, PREPARE),
    "nvfp4": Build(plain_kernels.quantize_nvfp4, BLOCKS),
    "nvfp4 float16": Build(plain_kernels.quantize_nvfp4, {**BLOCKS, "DTYPE": 1}),
    "nvfp4 float32": Build(plain_kernels.quantize_nvfp4, {**BLOCKS, "DTYPE": 2}),
    "nvfp4 tiles": Build(plain_kernels.quantize_nvfp4, {**BLOCKS, "MAP": 2}),
    "nvfp4 rows": Build(plain_kernels.quantize_nvfp4, {**BLOCKS, "MAP": 1, "GROUP": 2, "SHORT": False}),
    "nvfp4 swizzled": Build(plain_kernels.quantize_nvfp4, {**BLOCKS, "MAP": 1, "SWIZZLED": True}),
    "nvfp4 dividing": Build(plain_kernels.quantize_nvfp4, {**BLOCKS, "SHORT": False, "PRE": 3, "ELEMENT": 6}),
    "nvfp4 wrapping": Build(
        plain_kernels.quantize_nvfp4, {**BLOCKS, "SHORT": False, "PRE": 2, "ELEMENT": 1, "WRAPS": True}
    ),
    "mxfp4": Build(plain_kernels.quantize_mx, MX),
    "mxfp4 float32": Build(plain_kernels.quantize_mx, {**MX, "DTYPE": 2}),
    "mxfp4 nearest": Build(plain_kernels.quantize_mx, {**MX, "NEAREST": True}),
    "mxfp8": Build(plain_kernels.quantize_mx, {**MX, "WIDE": True, "SIGN": 1, "NAN_CODE": 127}),
    "4over6": Build(four_six_kernels.quantize_four_six, FOUR_SIX),
    "4over6 mse": Build(four_six_kernels.quantize_four_six, {**FOUR_SIX, "METRIC": 1, "TOP": 1536.0}),
    "4over6 fast": Build(four_six_kernels.quantize_four_six, {**FOUR_SIX, "KIND": 2}),
    "4over6 tiles": Build(four_six_kernels.quantize_four_six, {**FOUR_SIX, "MAP": 2}),
    "optimal": Build(search_kernels.quantize_optimal, {**SEARCH, "OBJECTIVE": 0}, 1),
    "optimal weighted": Build(search_kernels.quantize_optimal, {**SEARCH, "OBJECTIVE": 1, "MAP": 1}, 1),
    "hessian": Build(hessian_kernels.quantize_hessian, {**SEARCH, "SHORT": False}, 1),
    "dequantize": Build(decode_kernels.dequantize, DECODE),
    "dequantize float32": Build(decode_kernels.dequantize, {**DECODE, "DTYPE": 2, "DECODE": 1}),
    "dequantize mxfp4": Build(decode_kernels.dequantize, {**DECODE, "N": 32, "DECODE": 5}),
    "dequantize mxfp8": Build(decode_kernels.dequantize, {**DECODE, "N": 32, "DECODE": 5, "WIDE": True}),
    "cast": Build(decode_kernels.cast_mxfp4_to_nvfp4, {"B": 128, "HINTS": True}),
}


def compile_for(build: Build, capability: int, fuse: bool = False) -> Any:
    """Compile a kernel for a compute capability (times ten), as the backend would: no fused operations."""
    constants = dict(build.constants)
    if capability >= 100 and constants.get("ASM"):
        constants["ASM"] = 2
    signature, aligned = {}, {}
    for index, name in enumerate(build.kernel.arg_names):
        if name in build.constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = build.types.get(name, POINTERS.get(name, "*fp32"))
            aligned[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i64"
    source = ASTSource(fn=build.kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": build.warps, "enable_fp_fusion": fuse}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
