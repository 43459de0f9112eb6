"""The float32 expressions of the NVFP4 contracts. The first line of each docstring is the formula, in rounding order.

Notation: A is the tensor amax, v the block amax, S the decoded block scale, q the value of an element's code. c is
Q·448 or Q·256, where Q (6 or 4) is the value that a block amax is scaled to. enc and g are the tensor factor when it
encodes; s2 and p are the tensor factor when it decodes. sixth is 1/6 rounded to float32, FMAX the largest float32. In
`static_scale`, a is v, G is A, and N is c/6. Parentheses show the order; every operation rounds once.
"""

from __future__ import annotations

import numpy as np

from halfbyte.codec.bits import F32, FLOAT32_MAX, round_to, smallest_normal
from halfbyte.contracts.spec import TensorScale

ONE = np.float32(1)
SIX = np.float32(6)
SIXTH = ONE / SIX

# --- 1. factor: (A, c, statistics' dtype) ---


def clamped_ratio(amax: F32, top: np.float32, statistics: str) -> F32:
    """min(c/A, FMAX), 0 → 1"""
    ratio = np.minimum(top / amax, FLOAT32_MAX)
    return np.where(ratio == 0, ONE, ratio).astype(np.float32)


def ratio(amax: F32, top: np.float32, statistics: str) -> F32:
    """c/A"""
    return top / amax


def reciprocal_product(amax: F32, top: np.float32, statistics: str) -> F32:
    """(1/A)·c"""
    return (ONE / amax) * top


def reciprocal_product_or_max(amax: F32, top: np.float32, statistics: str) -> F32:
    """(1/A)·c, A = 0 → FMAX"""
    return np.where(amax == 0, FLOAT32_MAX, (ONE / amax) * top).astype(np.float32)


def reciprocal_product_in_statistics(amax: F32, top: np.float32, statistics: str) -> F32:
    """(1/max(A, tiny))·c in the statistics' dtype, NaN and Inf → 1"""
    floored = np.maximum(round_to(amax, statistics), smallest_normal(statistics))
    factor = round_to(round_to(np.divide(ONE, floored), statistics) * top, statistics)
    return np.where(np.isfinite(factor), factor, ONE).astype(np.float32)


def quotient(amax: F32, top: np.float32, statistics: str) -> F32:
    """A/c"""
    return amax / top


def no_factor(amax: F32, top: np.float32, statistics: str) -> F32:
    """none"""
    return np.ones_like(amax)


# --- 2. pre_scale: (v, tensor scale) ---


def folded_sixth(v: F32, t: TensorScale) -> F32:
    """v·(enc·sixth)"""
    return v * (t.factor * SIXTH)


def sixth_then_factor(v: F32, t: TensorScale) -> F32:
    """g·(v·sixth)"""
    return t.factor * (v * SIXTH)


def divided_then_factor(v: F32, t: TensorScale) -> F32:
    """(v/6)·enc"""
    return (v / SIX) * t.factor


def divided_then_factor_or_zero(v: F32, t: TensorScale) -> F32:
    """(v/Q)·enc, 0 if A = 0"""
    return np.where(t.amax == 0, np.float32(0), (v / t.largest) * t.factor).astype(np.float32)


def over_product(v: F32, t: TensorScale) -> F32:
    """v/(6·s2)"""
    return v / (SIX * t.factor)


def factor_times_divided(v: F32, t: TensorScale) -> F32:
    """g·(v/6 in the statistics' dtype)"""
    return t.factor * round_to(v / SIX, t.statistics)


def divided_twice(v: F32, t: TensorScale) -> F32:
    """(v/6)/p"""
    return (v / SIX) / t.factor


def divided(v: F32, t: TensorScale) -> F32:
    """v/6"""
    return v / SIX


def divided_floored(v: F32, t: TensorScale) -> F32:
    """max(v/6, 1e-12)"""
    return np.asarray(np.maximum(v / SIX, np.float32(1e-12)))


def static_scale(v: F32, t: TensorScale) -> F32:
    """((a/6, 0 → 1)·N)/(G/6)"""
    sixth_of_amax = v / SIX
    sixth_of_amax = np.where(sixth_of_amax == 0, ONE, sixth_of_amax).astype(np.float32)
    scale: F32 = (sixth_of_amax * (t.top / SIX)) / (t.amax / SIX)
    return scale


# --- 4. element: (x, S, tensor scale) ---


def times_clamped_reciprocal(x: F32, scale: F32, t: TensorScale) -> F32:
    """x·min(1/(S·(1/enc)), FMAX)"""
    return x * np.minimum(ONE / (scale * (ONE / t.factor)), FLOAT32_MAX)


def times_reciprocal_or_zero(x: F32, scale: F32, t: TensorScale) -> F32:
    """x·(1/((1/enc)·S)), 0 if S = 0"""
    y = x * (ONE / ((ONE / t.factor) * scale))
    return np.where(scale == 0, np.float32(0), y).astype(np.float32)


def over_scale_product(x: F32, scale: F32, t: TensorScale) -> F32:
    """x/(S·s2)"""
    return x / (scale * t.factor)


def over_scale_quotient(x: F32, scale: F32, t: TensorScale) -> F32:
    """x/(S/g)"""
    return x / (scale / t.factor)


def times_reciprocal_over_scale(x: F32, scale: F32, t: TensorScale) -> F32:
    """x·((1/p)/S)"""
    return x * ((ONE / t.factor) / scale)


def times_reciprocal_of_scale(x: F32, scale: F32, t: TensorScale) -> F32:
    """x·(1/S)"""
    return x * (ONE / scale)


def over_scale(x: F32, scale: F32, t: TensorScale) -> F32:
    """x/S"""
    return x / scale


def times_reciprocal_zeroed(x: F32, scale: F32, t: TensorScale) -> F32:
    """x·(1/(S·(1/g))), ·0 if S·(1/g) = 0"""
    combined = scale * (ONE / t.factor)
    return x * np.where(combined == 0, np.float32(0), ONE / combined).astype(np.float32)


def times_reciprocal_shrunk(x: F32, scale: F32, t: TensorScale) -> F32:
    """x·(1/(S·(1/g))), 1e8 for S·(1/g) = 0"""
    combined = scale * (ONE / t.factor)
    return x * (ONE / np.where(combined == 0, np.float32(1e8), combined).astype(np.float32))


# --- 6. stored, multiplier and decode ---


def store_amax(t: TensorScale) -> F32:
    """A"""
    return t.amax


def store_factor(t: TensorScale) -> F32:
    """the factor"""
    return t.factor


def store_reciprocal(t: TensorScale) -> F32:
    """1/enc"""
    return ONE / t.factor


def store_reciprocal_or_zero(t: TensorScale) -> F32:
    """1/enc, 0 where A = 0"""
    return np.where(t.amax == 0, np.float32(0), ONE / t.factor).astype(np.float32)


def amax_over_top(stored: F32, top: np.float32) -> F32:
    """A/c"""
    return stored / top


def as_stored(stored: F32, top: np.float32) -> F32:
    """the stored multiplier"""
    return stored


def reciprocal_of_stored(stored: F32, top: np.float32) -> F32:
    """1/g"""
    return ONE / stored


def decode_by_amax(q: F32, scale: F32, stored: F32, top: np.float32) -> F32:
    """((q·S)·A)/c"""
    return ((q * scale) * stored) / top


def decode_by_multiplier(q: F32, scale: F32, stored: F32, top: np.float32) -> F32:
    """q·(S·s2)"""
    return q * (scale * stored)


def decode_by_divisor(q: F32, scale: F32, stored: F32, top: np.float32) -> F32:
    """q·(S/g)"""
    return q * (scale / stored)


def decode_by_reciprocal(q: F32, scale: F32, stored: F32, top: np.float32) -> F32:
    """q·(S·(1/g))"""
    return q * (scale * (ONE / stored))


def decode_single_level(q: F32, scale: F32, stored: F32, top: np.float32) -> F32:
    """q·S"""
    return q * scale


# --- 4over6: error d of (q, S, x, tensor scale) ---


def error_by_amax(q: F32, scale: F32, x: F32, t: TensorScale) -> F32:
    """((q·S)·A)/c − x"""
    return ((q * scale) * t.amax) / t.top - x


def error_by_reciprocal(q: F32, scale: F32, x: F32, t: TensorScale) -> F32:
    """(q·S)·(1/enc) − x"""
    return (q * scale) * (ONE / t.factor) - x


def error_scaled(q: F32, scale: F32, x: F32, t: TensorScale) -> F32:
    """q·S − x·enc"""
    return q * scale - x * t.factor
