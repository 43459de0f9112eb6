"""For each scale byte, a multiplier m such that round(x·m) equals the contract's code. The exact search uses it.

The search kernel computes y = x·m and rounds to the nearest even code. Some contracts divide instead, or round ties
down. Their thresholds between codes differ slightly from those of m, but the codes are the same if no input is between
the two thresholds. Sixteen-bit inputs are sparse, so such an m nearly always exists near the quotient.
native/multipliers.cpp checks m at every threshold: codes are monotone in x, so they agree on every input if they agree
on both sides of every threshold.
"""

from __future__ import annotations

import ctypes

import numpy as np

from halfbyte.backends.cpu.library import native, pointer
from halfbyte.backends.cpu.structs import Tables
from halfbyte.backends.numbering import DTYPE_NUMBERS
from halfbyte.codec.bits import F32


def fit_multipliers(tables: Tables, near: F32, prescale: float, dtype: str) -> F32 | None:
    """m for each of 127 bytes, such that x·prescale·m rounds to the code of the tables for every x.

    None if some byte has no such m; this is always so for float32. near: the first guess of m.
    """
    if dtype == "fp32":
        return None
    library, _ = native()
    guesses, fitted = np.ascontiguousarray(near, np.float32), np.empty(127, np.float32)
    failed = library.hb_fit_multipliers(
        ctypes.byref(tables), pointer(guesses), ctypes.c_float(prescale), DTYPE_NUMBERS[dtype], pointer(fitted)
    )
    return None if failed else fitted
