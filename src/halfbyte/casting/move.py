"""Moving bytes: the part of the cast that is a scan, a table look-up and a copy.

`scan`, `copy_codes` and `power_scales` are the definition. A compiled version takes their place, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.codec.bits import U8

LOWEST, HIGHEST = -9, 8
"""E4M3 holds 2**n for n from -9 (its smallest subnormal) to 8 (448 is the largest value)."""

WINDOW = HIGHEST - LOWEST
"""17: how far the exponents of two blocks may lie apart under one global scale."""

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
    blocks, flat = codes.reshape(scales.size, -1), scales.reshape(-1)
    zero = np.flatnonzero((blocks[:, 0] & np.uint8(0x77)) == 0)  # most blocks are decided by their first two codes
    zero = zero[((blocks[zero].view(np.uint64) & SIGNLESS) == 0).all(axis=1)]
    if not zero.size:
        return Scan(zero, int(flat.min()), int(flat.max()))
    left = np.bincount(flat, minlength=256) - np.bincount(flat[zero], minlength=256)
    used = np.flatnonzero(left)
    return Scan(zero, int(used[0]), int(used[-1])) if used.size else Scan(zero, None, None)


def copy_codes(codes: U8, out: U8 | None = None) -> U8:
    """The codes, in memory of their own or in what is given."""
    if out is None:
        return codes.copy()
    np.copyto(out, codes)
    return out


def power_scales(scales: U8, m: int, repeat: int, halves: int) -> U8:
    """E8M0 bytes (rows, blocks) to E4M3 bytes (rows, halves): 2**(k - m), snapped, `repeat` times each."""
    lowest = 127 + m + LOWEST  # the E8M0 byte that becomes 2**-9
    if 0 <= lowest <= 255 - WINDOW:
        step = np.clip(scales, np.uint8(lowest), np.uint8(lowest + WINDOW)) - np.uint8(lowest)
    else:
        step = np.clip(scales.astype(np.int16) - np.int16(lowest), 0, WINDOW).astype(np.uint8)
    byte = power_bytes(step)
    if repeat == 2:
        byte = (byte.astype(np.uint16) * np.uint16(257)).view(np.uint8)  # each byte twice
    return byte if byte.shape[1] == halves else np.ascontiguousarray(byte[:, :halves])


def power_bytes(step: U8) -> U8:
    """E4M3 byte of 2**(LOWEST + step): a subnormal's bit moves up, then the exponent field counts, in eights."""
    byte: U8 = step * np.uint8(8) - np.uint8(16)
    subnormal = step < 3
    if subnormal.any():  # only where the exponents use the whole window
        byte[subnormal] = np.left_shift(np.uint8(1), step[subnormal])
    return byte
