"""Moving bytes: the part of the cast that is a scan, a table look-up and a copy.

These three functions are the definition. A compiled version replaces them in one place, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.codec.bits import U8
from halfbyte.formats import E4M3

LOWEST, HIGHEST = -9, 8
"""E4M3 holds 2**n for n from -9 (its smallest subnormal) to 8 (448 is the largest value)."""

WINDOW = HIGHEST - LOWEST
"""17: how far the exponents of two blocks may lie apart under one global scale."""

POWER_BYTES = np.searchsorted(E4M3.magnitudes, 2.0 ** np.arange(LOWEST, HIGHEST + 1)).astype(np.uint8)
"""E4M3 byte of 2**(LOWEST + index)."""

SIGNLESS = np.uint64(0x7777777777777777)


@dataclass(frozen=True)
class Scan:
    """What is to be known of some blocks before they are moved."""

    zero: npt.NDArray[np.intp]
    """Positions of the blocks whose codes are all 0 or 8."""
    lowest: int | None
    """Smallest scale byte of the other blocks; None if there are none."""
    highest: int | None


def scan(codes: U8, scales: U8) -> Scan:
    """Zero blocks, and the range of the others' scales: codes (rows, blocks, bytes), scales (rows, blocks)."""
    words = codes.reshape(scales.size, -1).view(np.uint64)
    zero = np.flatnonzero((words[:, 0] & SIGNLESS) == 0)  # most blocks are decided by their first sixteen codes
    zero = zero[((words[zero] & SIGNLESS) == 0).all(axis=1)]
    flat = scales.reshape(-1)
    if not zero.size:
        return Scan(zero, int(flat.min()), int(flat.max()))
    left = np.bincount(flat, minlength=256) - np.bincount(flat[zero], minlength=256)
    used = np.flatnonzero(left)
    return Scan(zero, int(used[0]), int(used[-1])) if used.size else Scan(zero, None, None)


def snapped_exponents(m: int) -> npt.NDArray[np.int64]:
    """For each E8M0 byte: k - m, snapped to the powers of two that E4M3 holds."""
    return np.clip(np.arange(256) - 127 - m, LOWEST, HIGHEST)


def power_scales(scales: U8, m: int, repeat: int, halves: int) -> U8:
    """E8M0 bytes (rows, blocks) to E4M3 bytes (rows, halves): 2**(k - m), snapped, `repeat` times each."""
    table = POWER_BYTES[snapped_exponents(m) - LOWEST]
    if repeat == 2:  # both bytes of a pair in one look-up
        pairs = np.take(table.astype(np.uint16) * np.uint16(257), scales)
        doubled = pairs.view(np.uint8).reshape(scales.shape[0], -1)
    else:
        doubled = np.repeat(np.take(table, scales), repeat, axis=1)
    return doubled if doubled.shape[1] == halves else np.ascontiguousarray(doubled[:, :halves])
