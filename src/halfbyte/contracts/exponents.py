"""The exponent rules of the MX contracts: from a block amax v to the E8M0 byte and the float32 scale for the elements.

At the ends of the range the two can differ: a peer may divide by a scale that the byte cannot represent, and decode the
byte as another scale. The first line of each docstring is the rule. `statistics` is the dtype of v. `element` is the
element format; its largest exponent, emax, is 2 for E2M1 and 8 for E4M3.
"""

from __future__ import annotations

import numpy as np

from halfbyte.codec.bits import (
    F32,
    I32,
    U8,
    drop_mantissa_after_quarter,
    exponent_field,
    from_bits,
    log2_float32,
    mantissa_field,
    power_of_two,
    round_to,
)
from halfbyte.formats.elements import E8M0
from halfbyte.formats.spec import ElementFormat

Scale = tuple[U8, F32]


def _with_nan(byte: I32, v: F32) -> U8:
    return np.where(np.isnan(v), 255, np.clip(byte, 0, 255)).astype(np.uint8)


def ocp_floor(v: F32, statistics: str, element: ElementFormat) -> Scale:
    """floor(log2 v) − emax, exact, within 0…254; NaN 255

    OCP Microscaling v1.0, section 6.3. Inf counts as the largest exponent. Zero, and amaxes below the range, give byte
    0.
    """
    exponent = np.frexp(v.astype(np.float64))[1] - 1
    byte = np.clip(exponent - element.max_exponent + 127, 0, 254)
    byte = np.where(v == 0, 0, np.where(np.isinf(v), 254, byte)).astype(np.int32)
    stored = _with_nan(byte, v)
    return stored, E8M0.values[stored]


def _ceil_log2_of_share(v: F32, largest: float) -> F32:
    """ceil(log2(v/largest)) with float32's log2."""
    return np.ceil(log2_float32(v / np.float32(largest)))


def ceil_log2_clamped(v: F32, statistics: str, element: ElementFormat) -> Scale:
    """ceil(log2(v/max)), within ±127; NaN 255"""
    exponent = np.clip(_ceil_log2_of_share(v, element.max), -127, 127)
    stored = _with_nan(np.nan_to_num(exponent, nan=0).astype(np.int32) + 127, v)
    return stored, E8M0.values[stored]


def ceil_log2_or_none(v: F32, statistics: str, element: ElementFormat) -> Scale:
    """ceil(max(log2(v/max), −127)); Inf and NaN blocks: byte 0, and elements use a NaN scale"""
    finite = np.isfinite(v)
    exponent = np.maximum(_ceil_log2_of_share(np.where(finite, v, 0).astype(np.float32), element.max), -127)
    byte = np.where(finite, exponent + 127, 0).astype(np.uint8)
    return byte, np.where(finite, E8M0.values[byte], np.float32(np.nan)).astype(np.float32)


def ceil_bits(v: F32, largest: np.float32) -> Scale:
    """smallest power of two ≥ v/Q by the float's bits; byte 0 means 0"""
    share = v / largest
    byte = np.clip(exponent_field(share) + (mantissa_field(share) != 0), 0, 255).astype(np.uint8)
    return byte, from_bits(byte.astype(np.int32) << 23)


def ceil_bits_of_six(v: F32, statistics: str, element: ElementFormat) -> Scale:
    """smallest power of two ≥ v/6 by the float's bits; byte 0 means 0"""
    return ceil_bits(v, np.float32(6))


def ceil_bits_of_four(v: F32, statistics: str, element: ElementFormat) -> Scale:
    """smallest power of two ≥ v/4 by the float's bits; byte 0 means 0"""
    return ceil_bits(v, np.float32(4))


def round_up_quarter(v: F32, statistics: str, element: ElementFormat) -> Scale:
    """even rule: a quarter of the mantissa's range added to v's bits, floor(log2) − 2, in the statistics' dtype

    A scale that underflows in that dtype becomes 1 (byte 127). If the addition carries v to Inf, the scale is Inf and
    the byte 127.
    """
    power = drop_mantissa_after_quarter(v, statistics)
    exponent = np.floor(log2_float32(power)) - 2 + 127
    byte = np.clip(np.nan_to_num(exponent, nan=255, posinf=255, neginf=0), 0, 255).astype(np.int32)
    scale = round_to(power_of_two(byte - 127), statistics)
    scale = np.where(np.isinf(power), np.float32(np.inf), scale)
    scale = np.where(scale == 0, np.float32(1), scale).astype(np.float32)
    stored = np.where(np.isinf(scale), 127, 127 + np.floor(log2_float32(scale)))
    stored = np.where(np.isnan(v), 255, stored)
    scale = np.where(np.isnan(v), np.float32(np.nan), scale).astype(np.float32)
    return stored.astype(np.uint8), scale


def _biased(field: I32, v: F32, element: ElementFormat) -> Scale:
    """The byte for an exponent field, and the scale that elements are divided by, which is at least 2**-126."""
    byte = np.where(np.isnan(v), 255, np.clip(field - element.max_exponent, 0, 255)).astype(np.uint8)
    return byte, np.maximum(from_bits(byte.astype(np.int32) << 23), np.float32(2.0**-126))


def floor_field(v: F32, statistics: str, element: ElementFormat) -> Scale:
    """floor: exponent field − emax; divides by at least 2^-126"""
    return _biased(exponent_field(v), v, element)


def even_field(v: F32, statistics: str, element: ElementFormat) -> Scale:
    """even: half a unit in the element's last place added to v's bits, then floor; divides by at least 2^-126"""
    bumped = from_bits(v.view(np.int32) + (1 << (23 - element.mantissa_bits - 1)))
    return _biased(exponent_field(bumped), v, element)


def ceil_field(v: F32, statistics: str, element: ElementFormat) -> Scale:
    """ceil: exponent field, + 1 if any mantissa bit, − emax; divides by at least 2^-126"""
    return _biased(exponent_field(v) + (mantissa_field(v) != 0), v, element)


def rceil_log2(v: F32, statistics: str, element: ElementFormat) -> Scale:
    """rceil: ceil(log2(v/max)), within ±127; with byte 0, elements use a scale of 1"""
    stored, scale = ceil_log2_clamped(v, statistics, element)
    return stored, np.where(stored == 0, np.float32(1), scale).astype(np.float32)


def floor_log2_floored(v: F32, statistics: str, element: ElementFormat) -> Scale:
    """floor((log2(max(v, 1e-30)) − 2) + 127), within 1…254; NaN block byte 0"""
    exponent = np.floor((log2_float32(np.maximum(v, np.float32(1e-30))) - np.float32(2)) + np.float32(127))
    stored = np.nan_to_num(np.clip(exponent, 1, 254), nan=0).astype(np.uint8)
    return stored, np.where(np.isnan(v), np.float32(np.nan), E8M0.values[stored]).astype(np.float32)


def floor_log2_wrapping(v: F32, statistics: str, element: ElementFormat) -> Scale:
    """floor(log2 v) − 2 + 127 cast to a byte without a check, 0 for a zero block"""
    with_one = np.where(v == 0, np.float32(1), v).astype(np.float32)
    exponent = np.floor(log2_float32(with_one)) - 2 + 127
    byte = np.where(v == 0, 0, np.nan_to_num(exponent, nan=0, posinf=0)).astype(np.int64)
    stored = (byte & 0xFF).astype(np.uint8)
    return stored, np.ldexp(np.float32(1), stored.astype(np.int32) - 127).astype(np.float32)


# --- element: (x, scale) ---


def over(x: F32, scale: F32) -> F32:
    """x/S"""
    return x / scale


def times_reciprocal(x: F32, scale: F32) -> F32:
    """x·(1/S)"""
    return x * (np.float32(1) / scale)


def times_reciprocal_zeroed(x: F32, scale: F32) -> F32:
    """x·(1/S), x·0 if S = 0"""
    return x * np.where(scale == 0, np.float32(0), np.float32(1) / scale).astype(np.float32)


def over_or_zero(x: F32, scale: F32) -> F32:
    """x/S, 0 if S = 0"""
    return np.where(scale == 0, np.float32(0), x / scale).astype(np.float32)


# --- decode: (q, byte) ---


def decode_e8m0(q: F32, byte: U8) -> F32:
    """q·2^(byte−127), byte 255 NaN"""
    return q * E8M0.values[byte]


def decode_power(q: F32, byte: U8) -> F32:
    """q·2^(byte−127), byte 255 too"""
    return np.ldexp(q, byte.astype(np.int32) - 127).astype(np.float32)
