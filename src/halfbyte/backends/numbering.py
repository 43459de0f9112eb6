"""The numbers of dtypes, formulas and choices in kernels. They are the same in Python, C++, Triton and CUDA.

The number is the index in a list. Triton's constants are made from these lists (gpu/triton/numbers.py); tests compare
the lists with what C++ and CUDA write out, and check that every formula has its branch in Triton. To add a formula,
append it to its list and to the kernels that should serve it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from halfbyte.contracts import exponents, expressions, reductions
from halfbyte.contracts.peers.flashinfer import ceil_bits_of_factor

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
"""Slot 1: the tensor-level number from the tensor's amax."""

STORED: list[object] = [
    expressions.store_amax,
    expressions.store_factor,
    expressions.store_reciprocal,
    expressions.store_reciprocal_or_zero,
]
"""Slot 6: what is written with the blocks."""

MULTIPLIERS: list[object] = [expressions.amax_over_top, expressions.as_stored, expressions.reciprocal_of_stored]
"""What code × scale is multiplied by, from the stored number."""

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
"""Slot 2: the block scale before it is rounded."""

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
"""Slot 4: y from an element and its block scale."""

MX_SCALES: list[object] = [
    exponents.ocp_floor,
    exponents.ceil_log2_clamped,
    exponents.ceil_log2_or_none,
    exponents.ceil_bits_of_six,
    exponents.ceil_bits_of_four,
    exponents.round_up_quarter,
    exponents.floor_field,
    exponents.even_field,
    exponents.ceil_field,
    exponents.rceil_log2,
    exponents.floor_log2_floored,
    exponents.floor_log2_wrapping,
]
"""Exponent rules that tables can describe: powers of two, with at most one step within a bucket of float32 amaxes."""

ERRORS: list[object] = [expressions.error_by_amax, expressions.error_by_reciprocal, expressions.error_scaled]
"""4over6: the error of one element."""

METRICS = ["mae", "mse", "abs_max"]
"""4over6: what is made of the errors of a block."""

SUMS: list[object] = [reductions.sequential, reductions.eight_lanes]
"""4over6: the order in which the errors of a block are added."""

DECODES: list[object] = [
    expressions.decode_by_amax,
    expressions.decode_by_multiplier,
    expressions.decode_by_divisor,
    expressions.decode_by_reciprocal,
    expressions.decode_single_level,
]
"""Slot 6: values from codes."""

SIGNS = ["y < 0", "sign bit", "y <= 0"]
"""Slot 5: when the sign bit of a code is set."""

TIES = ["even", "down"]
"""Slot 5: where a y half-way between two values goes."""


def exponent_rule(scale: object) -> object | None:
    """The function itself if tables can describe it, FlashInfer's if its factor is usable; else None."""
    if type(scale) is not functools.partial:
        return scale if number_of(MX_SCALES, scale) is not None else None
    factor = scale.keywords.get("factor")
    known = scale.func is ceil_bits_of_factor and not scale.args and set(scale.keywords) == {"factor"}
    usable = isinstance(factor, np.float32) and np.isfinite(factor) and factor > 0
    return ceil_bits_of_factor if known and usable else None


def number_of(listed: Sequence[object], entry: object) -> int | None:
    """The number of this very entry (not of one that compares equal); None if the list does not have it."""
    return next((number for number, known in enumerate(listed) if known is entry), None)
