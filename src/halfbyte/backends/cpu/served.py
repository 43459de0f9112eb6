"""What the C++ kernels have numbers and tables for: formulas, constants and roundings of contracts."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.contracts import exponents, expressions
from halfbyte.contracts.spec import Rounding


@dataclass(frozen=True)
class Formulas:
    """The formulas of one kind of tensor scale. A kernel takes any combination of formulas of the same kind."""

    factors: tuple[object, ...]
    pre_scales: tuple[object, ...]
    elements: tuple[object, ...]
    stored: tuple[tuple[object, object], ...]
    """(stored, multiplier)."""


ENCODING = Formulas(
    factors=(
        expressions.clamped_ratio,
        expressions.ratio,
        expressions.reciprocal_product,
        expressions.reciprocal_product_or_max,
        expressions.reciprocal_product_in_statistics,
    ),
    pre_scales=(
        expressions.folded_sixth,
        expressions.sixth_then_factor,
        expressions.divided_then_factor,
        expressions.divided_then_factor_or_zero,
        expressions.factor_times_divided,
    ),
    elements=(
        expressions.times_clamped_reciprocal,
        expressions.times_reciprocal_or_zero,
        expressions.times_reciprocal_zeroed,
        expressions.times_reciprocal_shrunk,
        expressions.over_scale_quotient,
    ),
    stored=(
        (expressions.store_amax, expressions.amax_over_top),
        (expressions.store_factor, expressions.reciprocal_of_stored),
        (expressions.store_reciprocal, expressions.as_stored),
        (expressions.store_reciprocal_or_zero, expressions.as_stored),
    ),
)
"""The tensor-level number is c/A and encodes elements."""

DECODING = Formulas(
    factors=(expressions.quotient,),
    pre_scales=(expressions.over_product, expressions.divided_twice, expressions.static_scale),
    elements=(expressions.over_scale_product, expressions.times_reciprocal_over_scale),
    stored=((expressions.store_factor, expressions.as_stored),),
)
"""The tensor-level number is A/c and decodes elements."""

SINGLE_LEVEL = Formulas(
    factors=(expressions.no_factor,),
    pre_scales=(expressions.divided, expressions.divided_floored),
    elements=(expressions.over_scale, expressions.times_reciprocal_of_scale),
    stored=((None, expressions.as_stored),),
)
"""There is no tensor-level number."""

NAN_AT_ZERO: tuple[object, ...] = (
    expressions.over_scale,
    expressions.over_scale_product,
    expressions.over_scale_quotient,
    expressions.times_reciprocal_of_scale,
    expressions.times_reciprocal_over_scale,
)
"""Element formulas that give NaN where both x and the scale are 0."""

ELEMENT_MAXES, E4M3_MAXES = (4, 6), (256, 448)
SMALLEST_SCALES = (0.0, 2.0**-9, 2.0**-6)
FOR_ZERO, FOR_ZERO_BYTE = (None, 1.0), (None, 0x20)

POWERS_OF_TWO: tuple[object, ...] = (
    exponents.ocp_floor,
    exponents.floor_field,
    exponents.even_field,
    exponents.ceil_field,
    exponents.rceil_log2,
)
"""Exponent rules whose scale is a power of two for every byte, never 0. The E4M3 kernel multiplies by 1/scale."""
MX_ELEMENTS: tuple[object, ...] = (
    exponents.over,
    exponents.times_reciprocal,
    exponents.times_reciprocal_zeroed,
    exponents.over_or_zero,
)
SATURATING = Rounding(sign="sign bit")
"""The rounding of the E4M3 kernel: nearest even, with the sign of x itself. NaN gets the element format's NaN code."""
