"""Moving bytes: the part of the cast that is a look at some scales, a table look-up and a copy.

`power_scales`, `zero_blocks` and a plain copy are the definition; `keep_blocks` runs the kernel that does all three in
one pass, where there is one, with the same bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.repack import cast_blocks, has_kernels
from halfbyte.codec.bits import U8

LOWEST, HIGHEST = -9, 8
"""E4M3 holds 2**n for n from -9 (its smallest subnormal) to 8 (448 is the largest value)."""

WINDOW = HIGHEST - LOWEST
"""17: how far the exponents of two blocks may lie apart under one global scale."""

SIGNLESS = np.uint64(0x7777777777777777)


CHUNK = 1 << 14
"""Blocks that are looked at before more are."""


def zero_blocks(codes: U8) -> npt.NDArray[np.bool_]:
    """Which blocks hold nothing but ±0: codes (blocks, bytes)."""
    zero: npt.NDArray[np.bool_] = (
        codes[:, 0] & np.uint8(0x77)
    ) == 0  # most blocks are decided by their first two codes
    some = np.flatnonzero(zero)
    zero[some] = ((codes[some].view(np.uint64) & SIGNLESS) == 0).all(axis=1)
    return zero


def used_range(codes: U8, scales: U8) -> tuple[int, int] | None:
    """Smallest and largest scale byte of the blocks that are not all zero; None if all are.

    codes (blocks, bytes), scales (blocks,). A single block that is not zero shows that a byte is used, so nearly always
    a few blocks with the smallest and the largest byte settle it.
    """
    lowest, highest = int(scales.min()), int(scales.max())
    if _is_used(codes, scales, lowest) and _is_used(codes, scales, highest):
        return lowest, highest
    used = scales[~zero_blocks(codes)]
    return (int(used.min()), int(used.max())) if used.size else None


def _is_used(codes: U8, scales: U8, byte: int) -> bool:
    for start in range(0, scales.size, CHUNK):
        where = np.flatnonzero(scales[start : start + CHUNK] == byte) + start
        if where.size and not zero_blocks(codes[where]).all():
            return True
    return False


def keep_blocks(
    codes: U8, scales: U8, m: int, out: tuple[U8, U8] | None = None, threads: int | None = None
) -> tuple[U8, U8, int]:
    """Whole blocks of 32 with their codes as they are and their scales 2**(k - m), snapped; and how many are zero.

    codes (rows, bytes), scales (rows, blocks). out: codes and scales to write into.
    """
    rows, blocks = scales.shape
    if out is None:
        out = np.empty_like(codes), np.empty((rows, 2 * blocks), np.uint8)
    if has_kernels() and all(part.flags.c_contiguous for part in out):
        table = power_scales(np.arange(256, dtype=np.uint8)[None], m, 1, 256)[0]
        parts = out[0].reshape(-1, 16), out[1].reshape(-1, 2)
        zeros = cast_blocks(codes.reshape(-1, 16), scales.reshape(-1), table, parts, threads)[2]
        return *out, zeros
    np.copyto(out[0], codes)
    np.copyto(out[1], power_scales(scales, m, 2, 2 * blocks))
    return *out, int(zero_blocks(np.ascontiguousarray(codes).reshape(-1, 16)).sum())


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
