"""The numbers of dtypes, formulas and choices in kernels. They are the same in Python, C++, Triton and CUDA.

The number is the index in a list. tests/backends/test_numbering.py compares the lists with the sources of the kernels.
To add a formula, append it to its list and to the kernels that should serve it.
"""

from __future__ import annotations

from halfbyte.contracts import expressions, reductions

DTYPE_NUMBERS = {"bf16": 0, "fp16": 1, "fp32": 2}

FACTORS: list[object] = [
    expressions.clamped_ratio,
    expressions.ratio,
    expressions.reciprocal_product,
    expressions.reciprocal_product_or_max,
    expressions.reciprocal_product_in_statistics,
    expressions.quotient,
    expressions.no_factor,
]
STORED: list[object] = [
    expressions.store_amax,
    expressions.store_factor,
    expressions.store_reciprocal,
    expressions.store_reciprocal_or_zero,
]
MULTIPLIERS: list[object] = [expressions.amax_over_top, expressions.as_stored, expressions.reciprocal_of_stored]
PRE_SCALES: list[object] = [
    expressions.folded_sixth,
    expressions.sixth_then_factor,
    expressions.divided_then_factor_or_zero,
    expressions.over_product,
    expressions.factor_times_divided,
    expressions.divided_twice,
    expressions.divided,
    expressions.divided_floored,
    expressions.static_scale,
    expressions.divided_then_factor,
]
ELEMENTS: list[object] = [
    expressions.times_clamped_reciprocal,
    expressions.times_reciprocal_or_zero,
    expressions.times_reciprocal_over_scale,
    expressions.times_reciprocal_of_scale,
    expressions.times_reciprocal_zeroed,
    expressions.times_reciprocal_shrunk,
    expressions.over_scale_product,
    expressions.over_scale_quotient,
    expressions.over_scale,
]
DECODES: list[object] = [
    expressions.decode_by_amax,
    expressions.decode_by_multiplier,
    expressions.decode_by_divisor,
    expressions.decode_by_reciprocal,
    expressions.decode_single_level,
]
ERRORS: list[object] = [expressions.error_by_amax, expressions.error_by_reciprocal, expressions.error_scaled]
METRICS = ["mae", "mse", "abs_max"]
SUMS: list[object] = [reductions.sequential, reductions.eight_lanes]
SIGNS = ["y < 0", "sign bit", "y <= 0"]
TIES = ["even", "down"]
