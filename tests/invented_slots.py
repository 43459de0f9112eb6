"""Slots for tests/invented.py: the formulas that contracts have, and formulas and methods that no contract has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

import halfbyte as hb
from halfbyte.codec.bits import F32, U8, exponent_field, mantissa_field, round_to
from halfbyte.contracts import exponents, expressions
from halfbyte.contracts.spec import TensorScale
from halfbyte.formats import E8M0
from halfbyte.formats.spec import ElementFormat
from halfbyte.methods import Method

ONE = np.float32(1)
SIX = np.float32(6)

# --- formulas that contracts have ---

FACTORS = (
    expressions.clamped_ratio, expressions.ratio, expressions.reciprocal_product, expressions.quotient,
    expressions.reciprocal_product_or_max, expressions.reciprocal_product_in_statistics, expressions.no_factor,
)  # fmt: skip
PRE_SCALES = (
    expressions.folded_sixth, expressions.sixth_then_factor, expressions.divided_then_factor, expressions.divided,
    expressions.divided_then_factor_or_zero, expressions.over_product, expressions.factor_times_divided,
    expressions.divided_twice, expressions.divided_floored, expressions.static_scale,
)  # fmt: skip
DIVIDING = (expressions.over_scale_product, expressions.over_scale_quotient, expressions.over_scale)
MULTIPLYING = (
    expressions.times_clamped_reciprocal, expressions.times_reciprocal_or_zero, expressions.times_reciprocal_over_scale,
    expressions.times_reciprocal_of_scale, expressions.times_reciprocal_zeroed, expressions.times_reciprocal_shrunk,
)  # fmt: skip
STORED = (
    expressions.store_amax, expressions.store_factor, expressions.store_reciprocal, None,
    expressions.store_reciprocal_or_zero,
)  # fmt: skip
MULTIPLIERS = (expressions.amax_over_top, expressions.as_stored, expressions.reciprocal_of_stored)
DECODES = (
    expressions.decode_by_amax, expressions.decode_by_multiplier, expressions.decode_by_divisor,
    expressions.decode_by_reciprocal, expressions.decode_single_level,
)  # fmt: skip
ERRORS = (expressions.error_by_amax, expressions.error_by_reciprocal, expressions.error_scaled)
SIGNS = ("y < 0", "sign bit", "y <= 0")
MX_SCALES = (
    exponents.ocp_floor, exponents.ceil_log2_clamped, exponents.ceil_log2_or_none, exponents.ceil_bits_of_six,
    exponents.ceil_bits_of_four, exponents.round_up_quarter, exponents.floor_field, exponents.even_field,
    exponents.ceil_field, exponents.rceil_log2, exponents.floor_log2_floored, exponents.floor_log2_wrapping,
)  # fmt: skip
MX_ELEMENTS = (
    exponents.over, exponents.times_reciprocal, exponents.times_reciprocal_zeroed, exponents.over_or_zero,
)  # fmt: skip

# --- new slots of an NVFP4 rule ---


def halved_ratio(amax: F32, top: np.float32, statistics: str) -> F32:
    """(c/A)/2"""
    return (top / amax) * np.float32(0.5)


def factor_first(v: F32, t: TensorScale) -> F32:
    """(v·enc)/6"""
    return (v * t.factor) / SIX


def divided_by_five(v: F32, t: TensorScale) -> F32:
    """(v/5)·enc"""
    return (v / np.float32(5)) * t.factor


def over_scale_then_factor(x: F32, scale: F32, t: TensorScale) -> F32:
    """(x/S)/s2"""
    return (x / scale) / t.factor


def over_scale_nudged(x: F32, scale: F32, t: TensorScale) -> F32:
    """x/(S·s2·0.9375)"""
    return x / ((scale * t.factor) * np.float32(0.9375))


def factor_then_over_scale(x: F32, scale: F32, t: TensorScale) -> F32:
    """(x·enc)/S"""
    return (x * t.factor) / scale


def times_factor_over_scale(x: F32, scale: F32, t: TensorScale) -> F32:
    """x·(enc/S)"""
    return x * (t.factor / scale)


def store_doubled(t: TensorScale) -> F32:
    """2·enc"""
    return t.factor * np.float32(2)


def half_of_stored(stored: F32, top: np.float32) -> F32:
    """s/2"""
    return stored * np.float32(0.5)


def decode_from_the_left(q: F32, scale: F32, stored: F32, top: np.float32) -> F32:
    """(q·S)·s2"""
    return (q * scale) * stored


def error_of_decoded(q: F32, scale: F32, x: F32, t: TensorScale) -> F32:
    """(q·S)/enc − x"""
    return (q * scale) / t.factor - x


def from_the_end(errors: F32) -> F32:
    """one by one, the last first"""
    total = np.zeros_like(errors[..., 0])
    for index in reversed(range(errors.shape[-1])):
        total = total + errors[..., index]
    return total


def columns_then_rows(errors: F32) -> F32:
    """each column of a tile from the end, then the columns from the end"""
    return from_the_end(from_the_end(errors.swapaxes(-1, -2)))


def shrunk_amax(x: F32, v: F32, t: TensorScale, method: Method) -> F32:
    """0.875·v"""
    return v * np.float32(0.875)


def next_byte(blocks: F32, naive: U8, method: Method) -> U8:
    """the byte above the naive one, if the naive one is below 120"""
    return np.where((naive > 0) & (naive < 120), naive + 1, naive).astype(np.uint8)


# --- new slots of an MX rule ---


def ceil_of_third(v: F32, statistics: str, element: ElementFormat) -> tuple[U8, F32]:
    """smallest power of two ≥ v/3 by the float's bits; byte 0 means 0"""
    share = v / np.float32(3)
    byte = np.clip(exponent_field(share) + (mantissa_field(share) != 0), 0, 254).astype(np.uint8)
    return byte, np.where(byte == 0, np.float32(0), E8M0.values[byte]).astype(np.float32)


def fickle_exponent(v: F32, statistics: str, element: ElementFormat) -> tuple[U8, F32]:
    """exponent field − 2, + 1 where bit 9 of v is set: it changes many times within a binade"""
    field = exponent_field(v) - 2 + ((v.view(np.int32) >> 9) & 1)
    byte = np.where(np.isnan(v), 255, np.clip(field, 0, 254)).astype(np.uint8)
    return byte, E8M0.values[byte]


def scale_of_three(v: F32, statistics: str, element: ElementFormat) -> tuple[U8, F32]:
    """floor(log2 v) − emax; elements use 0.75 of that scale, which is not a power of two"""
    byte = np.where(np.isnan(v), 255, np.clip(exponent_field(v) - element.max_exponent, 1, 254)).astype(np.uint8)
    return byte, (E8M0.values[byte] * np.float32(0.75)).astype(np.float32)


def over_three_quarters(x: F32, scale: F32) -> F32:
    """x/(0.75·S)"""
    return x / (scale * np.float32(0.75))


def times_reciprocal_nudged(x: F32, scale: F32) -> F32:
    """x·(1.0625·(1/S))"""
    return x * (np.float32(1.0625) * (ONE / scale))


def always_three(x: F32, scale: F32) -> U8:
    """code 3 for positive x, 2 for all else"""
    return np.where(x > 0, 3, 2).astype(np.uint8) + np.zeros(np.broadcast_shapes(x.shape, scale.shape), np.uint8)


def decode_in_bfloat16(q: F32, byte: U8) -> F32:
    """q·2^(byte−127)·1.01 in bfloat16"""
    return round_to((q * E8M0.values[byte]) * np.float32(1.01), "bf16")


def decode_squared(q: F32, byte: U8) -> F32:
    """q·|q|·2^(byte−127)"""
    return (q * np.abs(q)) * E8M0.values[byte]


# --- new methods ---


@dataclass(frozen=True, eq=False)
class SquaredWeights(hb.Optimal):
    """Optimal with its weights squared."""

    @property
    def channel_weights(self) -> npt.NDArray[np.float32] | None:
        given = super().channel_weights
        return None if given is None else given * given


@dataclass(frozen=True, eq=False)
class PlainSubclass(hb.Optimal):
    """A subclass of Optimal without changes: it compares equal to Optimal but has another type."""


@dataclass(frozen=True, eq=False)
class Ridge(hb.Hessian):
    """Hessian with a ridge on the diagonal."""

    @property
    def matrices(self) -> npt.NDArray[np.float32]:
        given = super().matrices
        return (given + np.eye(given.shape[-1], dtype=np.float32)).astype(np.float32)


@dataclass(frozen=True)
class OtherFourSix(hb.FourSix):
    """A subclass of FourSix without changes."""


@dataclass(frozen=True)
class OtherSweep(hb.Sweep):
    """A subclass of Sweep without changes."""


@dataclass(frozen=True)
class OtherAmax(hb.Amax):
    """A subclass of Amax. Only a rule that lists it in `searches` defines it."""


@dataclass(frozen=True)
class Percentile(Method):
    """A new method. Only a rule that lists it in `searches` defines it."""

    share: float = 0.99
    name: ClassVar[str] = "percentile"
