"""The kernels that serve one peer, the MX searches and the transform, with constants that stand for their uses."""

from __future__ import annotations

from halfbyte.backends.gpu.constants import EAGER_SWEEP, FUSED_SWEEP, HESSIAN, ROWS, STATIC_FOUR_SIX, WEIGHTED
from halfbyte.backends.gpu.triton import descent as descent_kernels
from halfbyte.backends.gpu.triton import hadamard as hadamard_kernels
from halfbyte.backends.gpu.triton import mx_search as mx_search_kernels
from halfbyte.backends.gpu.triton import qwantize as qwantize_kernels
from halfbyte.backends.gpu.triton import survey as survey_kernels
from halfbyte.backends.gpu.triton import sweep as sweep_kernels
from halfbyte.backends.gpu.triton import tiles as tiles_kernels
from halfbyte.backends.numbering import ELEMENTS, METRICS, PRE_SCALES, TIES
from halfbyte.contracts import expressions
from tests.backends.gpu.compiled.builds import BLOCKS, FP16, FP32, PREPARE, ROUNDING, Build

STATIC = {
    name: value for name, value in BLOCKS.items() if name not in ("SHORT", "ASM")
} | {
    "METHOD": EAGER_SWEEP, "PRE": PRE_SCALES.index(expressions.static_scale),
    "ELEMENT": ELEMENTS.index(expressions.over_scale_product), "SMALLEST": 0.001953125, "NAN_CODE": 7,
}  # fmt: skip
TILES = {
    name: value for name, value in BLOCKS.items() if name not in ("N", "MAP", "GROUP", "SHORT", "ASM")
} | {
    "B": 32, "PRE": PRE_SCALES.index(expressions.divided_then_factor_or_zero),
    "ELEMENT": ELEMENTS.index(expressions.times_reciprocal_or_zero), "WRAPS": True, "KIND": 0,
    "METRIC": METRICS.index("mse"), "TOP": 1536.0,
}  # fmt: skip
MX = {
    "B": 32, "N": 16, "DTYPE": 0, "SWIZZLED": False, "OBJECTIVE": 0, "WIDE": False, "NEAREST": False, "ROUNDED": False,
    **ROUNDING,
}  # fmt: skip
MX_OPTIMAL = {
    "B": 128, "N": 16, "DTYPE": 0, "MAP": 0, "SWIZZLED": False, "ROUNDED": False, "ASM": 1, **ROUNDING,
}  # fmt: skip
QWANTIZE = {
    "B": 32, "N": 16, "DTYPE": 0, "MAP": 0, "SWIZZLED": False, "POWERS": False, "MATRICES": False, "ASM": 1,
}  # fmt: skip
DESCENT = {"B": 32, "N": 16, "DTYPE": 0, "GROUP": 0, "SWIZZLED": False, "POWERS": False, "WIDE": False}
ROTATE = {"B": 128, "DTYPE": 0, "SIGNS": 0xD7E8, "ROWS_FIRST": False}
HALVES = {"x_ptr": "*i16"}
CANDIDATES = {name: value for name, value in PREPARE.items() if name not in ("LANES", "SOURCE")} | {
    "COUNT": 2, "GIVEN": False, "SAMPLES": 0,
}  # fmt: skip
SURVEY = {
    "B": 32, "TILE": 1024, "N": 16, "DTYPE": 0, "MAP": 0, "SHORT": True, "OBJECTIVE": 0, "COUNT": 2,
    "COMPETES": True, "SOME": True, "DECIDES": True, "STORED": 0, "FIRST": 1, "ELEMENT": 0, "WRAPS": False, **ROUNDING,
    "SAMPLE": False, "BY_ROW": False, "PROBED": False, "TWO": 1, "LESS": 15, "OF": 16,
}  # fmt: skip
ALL_BLOCKS = {**SURVEY, "TILE": 32, "SHORT": False, "COUNT": 3, "SOME": False}
SAMPLE = {**ALL_BLOCKS, "DECIDES": False, "SAMPLE": True}
PROBED = {**SURVEY, "COUNT": 3, "TWO": 2, "PROBED": True}
SURVEYED = {
    "block_ptr": "*i16", "queue_ptr": "*i16", "totals_ptr": "*i64", "sampled_ptr": "*i64", "done_ptr": "*i32",
    "headroom_ptr": "*i64", "least_ptr": "*i32", "lowest_ptr": "*i32",
}  # fmt: skip

BUILDS: dict[str, Build] = {
    "transform": Build(hadamard_kernels.rotate, ROTATE, 4, HALVES),
    "transform float16 transposed": Build(
        hadamard_kernels.rotate, {**ROTATE, "DTYPE": FP16, "ROWS_FIRST": True}, 4, HALVES
    ),
    "transform float32": Build(hadamard_kernels.rotate, {**ROTATE, "DTYPE": FP32}),
    "sweep": Build(sweep_kernels.quantize_static, STATIC),
    "sweep fused": Build(sweep_kernels.quantize_static, {**STATIC, "METHOD": FUSED_SWEEP, "DTYPE": FP32}),
    "static 4over6": Build(sweep_kernels.quantize_static, {**STATIC, "METHOD": STATIC_FOUR_SIX}),
    "4over6 over tiles": Build(tiles_kernels.quantize_tiles, TILES, 1),
    "qwantize nvfp4": Build(qwantize_kernels.improve_as_qwantize, QWANTIZE, 1),
    "qwantize nvfp4 hessian": Build(qwantize_kernels.improve_as_qwantize, {**QWANTIZE, "MATRICES": True}, 1),
    "qwantize mxfp4": Build(qwantize_kernels.improve_as_qwantize, {**QWANTIZE, "MAP": ROWS, "POWERS": True}, 1),
    "mxfp4 optimal": Build(mx_search_kernels.quantize_mx_optimal, MX_OPTIMAL),
    "mxfp4 optimal float32": Build(mx_search_kernels.quantize_mx_optimal, {**MX_OPTIMAL, "DTYPE": FP32, "N": 32}),
    "mxfp4 nearest": Build(mx_search_kernels.improve_mx, {**MX, "NEAREST": True}, 1),
    "mxfp4 weighted nearest": Build(mx_search_kernels.improve_mx, {**MX, "OBJECTIVE": WEIGHTED, "NEAREST": True}, 1),
    "mxfp8 optimal": Build(mx_search_kernels.improve_mx, {**MX, "WIDE": True, "SIGN": 1, "NAN_CODE": 127}, 1),
    "mxfp4 hessian": Build(mx_search_kernels.improve_mx, {**MX, "OBJECTIVE": HESSIAN, "TIE": TIES.index("down")}, 1),
    "amaxes of blocks": Build(
        survey_kernels.amax_blocks, {"B": 256, "DEPTH": 2, "N": 16, "DTYPE": 0, "MAP": 0}, 8, SURVEYED
    ),
    "candidates": Build(survey_kernels.prepare_candidates, CANDIDATES, 4, SURVEYED),
    "survey": Build(survey_kernels.survey, SURVEY, 1, SURVEYED),
    "survey of all blocks": Build(survey_kernels.survey, ALL_BLOCKS, 1, SURVEYED),
    "survey of a sample": Build(survey_kernels.survey, SAMPLE, 1, SURVEYED),
    "survey after a sample": Build(
        survey_kernels.survey, {**SURVEY, "COUNT": 3, "TWO": 2, "PROBED": True}, 1, SURVEYED
    ),
    "survey float32 in rows": Build(survey_kernels.survey, {**SURVEY, "DTYPE": FP32, "MAP": ROWS}, 1, SURVEYED),
    "survey weighted": Build(survey_kernels.survey, {**ALL_BLOCKS, "OBJECTIVE": WEIGHTED, "MAP": ROWS}, 1, SURVEYED),
    "descent": Build(descent_kernels.descend, DESCENT, 1),
    "descent mxfp4": Build(descent_kernels.descend, {**DESCENT, "POWERS": True}, 1),
}

LONG: dict[str, Build] = {
    "mxfp8 hessian of 32": Build(
        mx_search_kernels.improve_mx,
        {**MX, "N": 32, "OBJECTIVE": HESSIAN, "WIDE": True, "SIGN": 1, "NAN_CODE": 127},
        1,
    ),
}
"""Blocks of 32 through a Hessian: 528 entries, unrolled."""
