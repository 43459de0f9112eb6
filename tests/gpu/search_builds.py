"""The kernels that serve one peer, the MX searches and the transform, with constants that stand for their uses."""

from __future__ import annotations

from halfbyte.backends import (
    triton_kernels_descent,
    triton_kernels_hadamard,
    triton_kernels_mx_search,
    triton_kernels_qwantize,
    triton_kernels_sweep,
    triton_kernels_tiles,
)
from tests.gpu.builds import BLOCKS, ROUNDING, Build

STATIC = {**BLOCKS, "SHORT": False, "METHOD": 1, "PRE": 8, "ELEMENT": 6, "SMALLEST": 0.001953125, "NAN_CODE": 7}
TILES = {
    name: value for name, value in BLOCKS.items() if name not in ("N", "MAP", "GROUP", "SHORT", "ASM")
} | {"B": 32, "PRE": 2, "ELEMENT": 1, "WRAPS": True, "KIND": 0, "METRIC": 1, "TOP": 1536.0}  # fmt: skip
MX = {
    "B": 32, "N": 16, "DTYPE": 0, "SWIZZLED": False, "OBJECTIVE": 0, "WIDE": False, "NEAREST": False, "ROUNDED": False,
    **ROUNDING,
}  # fmt: skip
QWANTIZE = {
    "B": 32, "N": 16, "DTYPE": 0, "MAP": 0, "SWIZZLED": False, "POWERS": False, "HESSIAN": False, "ASM": 1,
}  # fmt: skip
DESCENT = {"B": 32, "N": 16, "DTYPE": 0, "GROUP": 0, "SWIZZLED": False, "POWERS": False, "WIDE": False}
ROTATE = {"B": 128, "DTYPE": 0, "SIGNS": 0xD7E8, "ROWS_FIRST": False}
ELEMENTS = {"x_ptr": "*i16"}

BUILDS: dict[str, Build] = {
    "transform": Build(triton_kernels_hadamard.rotate, ROTATE, 4, ELEMENTS),
    "transform float16 transposed": Build(
        triton_kernels_hadamard.rotate, {**ROTATE, "DTYPE": 1, "ROWS_FIRST": True}, 4, ELEMENTS
    ),
    "transform float32": Build(triton_kernels_hadamard.rotate, {**ROTATE, "DTYPE": 2}),
    "sweep": Build(triton_kernels_sweep.quantize_static, STATIC),
    "sweep fused": Build(triton_kernels_sweep.quantize_static, {**STATIC, "METHOD": 2, "DTYPE": 2}),
    "static 4over6": Build(triton_kernels_sweep.quantize_static, {**STATIC, "METHOD": 0}),
    "4over6 over tiles": Build(triton_kernels_tiles.quantize_tiles, TILES, 1),
    "qwantize nvfp4": Build(triton_kernels_qwantize.improve_as_qwantize, QWANTIZE, 1),
    "qwantize nvfp4 hessian": Build(triton_kernels_qwantize.improve_as_qwantize, {**QWANTIZE, "HESSIAN": True}, 1),
    "qwantize mxfp4": Build(triton_kernels_qwantize.improve_as_qwantize, {**QWANTIZE, "MAP": 1, "POWERS": True}, 1),
    "mxfp4 optimal": Build(triton_kernels_mx_search.improve_mx, MX, 1),
    "mxfp4 weighted nearest": Build(triton_kernels_mx_search.improve_mx, {**MX, "OBJECTIVE": 1, "NEAREST": True}, 1),
    "mxfp8 optimal": Build(triton_kernels_mx_search.improve_mx, {**MX, "WIDE": True, "SIGN": 1, "NAN_CODE": 127}, 1),
    "mxfp4 hessian": Build(triton_kernels_mx_search.improve_mx, {**MX, "OBJECTIVE": 2, "TIE": 1}, 1),
    "descent": Build(triton_kernels_descent.descend, DESCENT, 1),
    "descent mxfp4": Build(triton_kernels_descent.descend, {**DESCENT, "POWERS": True}, 1),
}

LONG: dict[str, Build] = {
    "mxfp8 hessian of 32": Build(
        triton_kernels_mx_search.improve_mx,
        {**MX, "N": 32, "OBJECTIVE": 2, "WIDE": True, "SIGN": 1, "NAN_CODE": 127},
        1,
    ),
}
"""Blocks of 32 through a Hessian: 528 entries, unrolled."""
