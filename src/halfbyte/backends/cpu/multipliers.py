"""For each scale byte, a multiplier m such that round(x·m) equals the contract's code. The exact search uses it.

The search kernel computes y = x·m and rounds to the nearest even code. Some contracts divide instead, or round ties
down. Their thresholds between codes differ slightly from those of m, but the codes are the same if no input is between
the two thresholds. Sixteen-bit inputs are sparse, so such an m nearly always exists near the quotient. This module
checks m at every threshold: codes are monotone in x, so they agree on every input if they agree on both sides of every
threshold.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.structs import Tables, as_array
from halfbyte.codec.bits import DTYPES, F32, widen
from halfbyte.codec.element import encode_magnitude
from halfbyte.formats import E2M1

STEPS = (0, -1, 1, -2, 2, -3, 3)
"""Offsets from the nearest quotient in units in the last place, in the order in which they are tried."""


@np.errstate(all="ignore")
def fit_multipliers(tables: Tables, near: F32, prescale: float, dtype: str) -> F32 | None:
    """m for each of 127 bytes, such that x·prescale·m rounds to the code of the tables for every x.

    None if some byte has no such m; this is always so for float32. near: the first guess of m.
    """
    if dtype == "fp32":
        return None
    words = as_array(tables.threshold, np.int32).reshape(256, 8)[:127, :7]
    last = (words & 0xFFFF).astype(np.uint16).view(np.int16).astype(np.int64)  # largest magnitude below each code
    below, above = _values(last, dtype) * np.float32(prescale), _values(last + 1, dtype) * np.float32(prescale)
    code = np.arange(7)
    unset = np.ones(127, bool)
    chosen = near.copy()
    for step in STEPS:
        tried = (near.view(np.int32) + np.int32(step)).view(np.float32)
        fits = (_codes(below, tried) <= code) & (_codes(above, tried) > code)
        # A threshold at the upper end of the dtype has no input above it; one before its start has no input below it.
        fits |= (last + 1 >= INF_BITS[dtype]) & (_codes(below, tried) <= code)
        every = (fits | (last < 0)).all(axis=1) & np.isfinite(tried) & (tried > 0)
        # From byte 16 on, the kernel uses one m per significand and shifts its exponent.
        every[NORMAL:] = np.resize(_in_every_octave(every[NORMAL:]), 127 - NORMAL)
        found = unset & every
        chosen[found] = tried[found]
        unset &= ~found
        if not unset[1:].any():
            return chosen
    return None


def _in_every_octave(fits: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """For each of the eight significands, whether it fits in every octave."""
    return np.array([fits[significand::8].all() for significand in range(8)])


NORMAL = 16
INF_BITS = {"bf16": 0x7F80, "fp16": 0x7C00}


def _values(bits: npt.NDArray[np.int64], dtype: str) -> F32:
    within = np.clip(bits, 0, INF_BITS[dtype]).astype(np.uint16)
    return widen(within.view(DTYPES[dtype]))


def _codes(x: F32, multiplier: F32) -> npt.NDArray[np.int64]:
    return encode_magnitude(x * multiplier[:, None], E2M1, "even").astype(np.int64)
