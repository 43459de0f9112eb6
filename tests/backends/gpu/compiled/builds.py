"""Every kernel with constants that stand for its uses, and how to compile one for a card that is not there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from halfbyte.backends.gpu.constants import (
    AMAX_EACH,
    AMAX_GIVEN,
    AMAX_OF_PARTS,
    DECODE_BY_POWER,
    DECODE_BY_TABLE,
    GROUP_OF_BLOCK,
    ROWS,
    TILES,
    WEIGHTED,
)
from halfbyte.backends.gpu.triton import decode as decode_kernels
from halfbyte.backends.gpu.triton import four_six as four_six_kernels
from halfbyte.backends.gpu.triton import hessian as hessian_kernels
from halfbyte.backends.gpu.triton import plain as plain_kernels
from halfbyte.backends.gpu.triton import scales as scales_kernels
from halfbyte.backends.gpu.triton import search as search_kernels
from halfbyte.backends.numbering import DECODES, DTYPE_NUMBERS, ELEMENTS, ERRORS, METRICS, PRE_SCALES
from halfbyte.contracts import expressions

CAPABILITIES = (90, 100)
"""Hopper and Blackwell."""

OTHERS = (120,)
"""Blackwell for desktops, whose kernels are those of 100: built by check_builds.py, not in every run of the tests."""

POINTERS = {
    "x_ptr": "*i32", "codes_ptr": "*i32", "out_ptr": "*i32", "out_codes_ptr": "*i32", "amax_ptr": "*i32",
    "outside_ptr": "*i32", "split_ptr": "*i32", "scales_ptr": "*u8", "bytes_ptr": "*u8", "out_scales_ptr": "*i16",
    "table_ptr": "*fp32",
}  # fmt: skip
"""Pointers that are not to float32."""

BF16, FP16, FP32 = (DTYPE_NUMBERS[name] for name in ("bf16", "fp16", "fp32"))

ROUNDING = {"TIE": 0, "SIGN": 0, "NAN_CODE": 0, "ZERO_INPUT": False}
BLOCKS = {
    "B": 128, "N": 16, "DTYPE": 0, "MAP": 0, "GROUP": 0, "SWIZZLED": False, "SHORT": True, "PRE": 0, "ELEMENT": 0,
    "STATISTICS": FP32, "LARGEST": 6.0, "SMALLEST": 0.0, "FOR_ZERO": -1.0, "FOR_ZERO_BYTE": -1, "WRAPS": False,
    "ASM": 1, **ROUNDING,
}  # fmt: skip
FOUR_SIX = {
    **BLOCKS, "PRE": PRE_SCALES.index(expressions.divided_then_factor), "KIND": 0, "METRIC": 0, "ORDER": 0,
    "TOP": 2688.0,
}  # fmt: skip
SEARCH = {**BLOCKS, "B": 32, "FIRST": 1}
HESSIAN = {name: value for name, value in SEARCH.items() if name not in ("MAP", "SHORT")}
MX = {
    "B": 128, "N": 32, "DTYPE": 0, "MAP": 0, "SWIZZLED": False, "WIDE": False, "NEAREST": False, "ROUNDED": False,
    "SHORT": True,
    "ASM": 1, **ROUNDING,
}  # fmt: skip
DECODE = {
    "B": 128, "N": 16, "PIECES": 1, "DTYPE": 0, "MAP": 0, "GROUP": 0, "DECODE": 0, "TOP": 2688.0, "WIDE": False,
    "NEGATIVE_ZERO": True, "ASM": 1,
}  # fmt: skip
PREPARE = {
    "TOP": 2688.0, "KIND": 0, "STATISTICS": FP32, "CONSTANT": 0.0, "STORED": 0, "MULTIPLIER": 0, "DTYPE": 0,
    "LANES": 128, "SOURCE": AMAX_EACH, "REPAIRS": False,
}  # fmt: skip


@dataclass(frozen=True)
class Build:
    """A kernel with its constants."""

    kernel: Any
    constants: dict[str, Any]
    warps: int = 4
    types: dict[str, str] = field(default_factory=dict)


DIVIDING = {
    **BLOCKS, "SHORT": False, "PRE": PRE_SCALES.index(expressions.over_product),
    "ELEMENT": ELEMENTS.index(expressions.over_scale_product),
}  # fmt: skip
WRAPPING = {
    **BLOCKS, "SHORT": False, "PRE": PRE_SCALES.index(expressions.divided_then_factor_or_zero),
    "ELEMENT": ELEMENTS.index(expressions.times_reciprocal_or_zero), "WRAPS": True,
}  # fmt: skip
AMAX = {"DTYPE": 0, "CHUNK": 1024, "DEPTH": 4}

BUILDS: dict[str, Build] = {
    "amax": Build(scales_kernels.amax_partials, {**AMAX, "ROWS": False}, 8),
    "amax of strided rows": Build(scales_kernels.amax_partials, {**AMAX, "ROWS": True}, 8),
    "amax of listed tensors": Build(scales_kernels.amax_listed, AMAX, 8, {"table_ptr": "*i64"}),
    "tensor-level numbers": Build(scales_kernels.prepare, PREPARE),
    "tensor-level numbers of parts": Build(
        scales_kernels.prepare, {**PREPARE, "SOURCE": AMAX_OF_PARTS, "REPAIRS": True}
    ),
    "tensor-level numbers of one amax": Build(scales_kernels.prepare, {**PREPARE, "SOURCE": AMAX_GIVEN}),
    "nvfp4": Build(plain_kernels.quantize_nvfp4, BLOCKS),
    "nvfp4 float16": Build(plain_kernels.quantize_nvfp4, {**BLOCKS, "DTYPE": FP16}),
    "nvfp4 float32": Build(plain_kernels.quantize_nvfp4, {**BLOCKS, "DTYPE": FP32}),
    "nvfp4 tiles": Build(plain_kernels.quantize_nvfp4, {**BLOCKS, "MAP": TILES}),
    "nvfp4 rows": Build(plain_kernels.quantize_nvfp4, {**BLOCKS, "MAP": ROWS, "GROUP": GROUP_OF_BLOCK, "SHORT": False}),
    "nvfp4 swizzled": Build(plain_kernels.quantize_nvfp4, {**BLOCKS, "MAP": ROWS, "SWIZZLED": True}),
    "nvfp4 dividing": Build(plain_kernels.quantize_nvfp4, DIVIDING),
    "nvfp4 byte for zero": Build(plain_kernels.quantize_nvfp4, {**DIVIDING, "FOR_ZERO_BYTE": 0x20}),
    "nvfp4 wrapping": Build(plain_kernels.quantize_nvfp4, WRAPPING),
    "mxfp4": Build(plain_kernels.quantize_mx, MX),
    "mxfp4 float32": Build(plain_kernels.quantize_mx, {**MX, "DTYPE": FP32}),
    "mxfp4 element by element": Build(plain_kernels.quantize_mx, {**MX, "SHORT": False}),
    "mxfp4 nearest": Build(plain_kernels.quantize_mx, {**MX, "NEAREST": True, "SHORT": False}),
    "mxfp8": Build(plain_kernels.quantize_mx, {**MX, "WIDE": True, "SIGN": 1, "NAN_CODE": 127}),
    "4over6": Build(four_six_kernels.quantize_four_six, FOUR_SIX),
    "4over6 mse": Build(
        four_six_kernels.quantize_four_six, {**FOUR_SIX, "METRIC": METRICS.index("mse"), "TOP": 1536.0}
    ),
    "4over6 fast": Build(
        four_six_kernels.quantize_four_six, {**FOUR_SIX, "KIND": ERRORS.index(expressions.error_scaled)}
    ),
    "4over6 tiles": Build(four_six_kernels.quantize_four_six, {**FOUR_SIX, "MAP": TILES}),
    "optimal": Build(search_kernels.quantize_optimal, {**SEARCH, "OBJECTIVE": 0}, 1),
    "optimal weighted": Build(search_kernels.quantize_optimal, {**SEARCH, "OBJECTIVE": WEIGHTED, "MAP": ROWS}, 1),
    "hessian": Build(hessian_kernels.quantize_hessian, HESSIAN, 1),
    "dequantize": Build(decode_kernels.dequantize, DECODE),
    "dequantize float32": Build(
        decode_kernels.dequantize,
        {**DECODE, "N": 8, "PIECES": 2, "DTYPE": FP32, "DECODE": DECODES.index(expressions.decode_by_multiplier)},
    ),
    "dequantize mxfp4": Build(decode_kernels.dequantize, {**DECODE, "N": 8, "PIECES": 4, "DECODE": DECODE_BY_POWER}),
    "dequantize by a table": Build(decode_kernels.dequantize, {**DECODE, "PIECES": 2, "DECODE": DECODE_BY_TABLE}),
    "dequantize mxfp8": Build(
        decode_kernels.dequantize, {**DECODE, "PIECES": 2, "DECODE": DECODE_BY_POWER, "WIDE": True}
    ),
    "cast": Build(decode_kernels.cast_mxfp4_to_nvfp4, {"B": 128, "HINTS": True}),
}


def compile_for(build: Build, capability: int, fuse: bool = False) -> Any:
    """Compile a kernel for a compute capability (times ten), as the backend would: no fused operations."""
    constants = dict(build.constants)
    unknown = set(constants) - set(build.kernel.arg_names)
    if unknown:
        raise TypeError(f"the kernel has no {', '.join(sorted(unknown))}")
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
