"""The window: which blocks keep their codes under a global scale 2^m, and the bytes of their scales.

E4M3 holds the powers of two from 2^-9 to 2^8. A block with exponent k keeps its codes under 2^m if k - m lies in
[-9, 8]: its scale becomes the byte of 2^(k - m), and its codes are copied.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.backends.blocks import cast_blocks
from halfbyte.codec.bits import U8

LOWEST, HIGHEST = -9, 8
"""E4M3 holds 2**n for n from -9 (its smallest subnormal) to 8 (448 is the largest value)."""

WINDOW = HIGHEST - LOWEST
"""17: how far the exponents of two blocks may lie apart under one global scale."""

BIAS = 127
"""An E8M0 byte b stands for 2**(b - 127)."""

SIGNLESS = np.uint64(0x7777777777777777)

CHUNK = 1 << 14
"""Blocks that are looked at before more are."""


@dataclass(frozen=True)
class Exponents:
    """Smallest and largest exponent of the blocks that are not all zero."""

    low: int
    high: int

    @property
    def fit(self) -> bool:
        """Whether one window holds all blocks: all of them can keep their codes."""
        return self.high - self.low <= WINDOW

    @property
    def m(self) -> int:
        """k_max - 8: the largest block meets the largest power of two that E4M3 holds."""
        return self.high - HIGHEST

    def fit_under(self, m: int) -> bool:
        """Whether the window of 2^m holds all blocks."""
        return self.low - m >= LOWEST and self.high - m <= HIGHEST


NO_BLOCKS = Exponents(HIGHEST, HIGHEST)
"""Stands for a tensor whose blocks are all zero: its global scale is 1."""


def join(found: Iterable[Exponents | None]) -> Exponents | None:
    """The exponents of several sets of rows together. None stands for rows whose blocks are all zero."""
    used = [exponents for exponents in found if exponents is not None]
    return Exponents(min(e.low for e in used), max(e.high for e in used)) if used else None


def zero_blocks(codes: U8) -> npt.NDArray[np.bool_]:
    """Which blocks hold nothing but ±0: codes (blocks, bytes)."""
    # Most blocks are decided by their first two codes.
    zero: npt.NDArray[np.bool_] = (codes[:, 0] & np.uint8(0x77)) == 0
    some = np.flatnonzero(zero)
    zero[some] = ((codes[some].view(np.uint64) & SIGNLESS) == 0).all(axis=1)
    return zero


def used_exponents(codes: U8, scales: U8) -> Exponents | None:
    """The exponents of the blocks that are not all zero; None if all are.

    codes (blocks, bytes), scales (blocks,). A single block that is not zero shows that a byte is used, so nearly always
    a few blocks with the smallest and the largest byte settle it.
    """
    lowest, highest = int(scales.min()), int(scales.max())
    if _is_used(codes, scales, lowest) and _is_used(codes, scales, highest):
        return Exponents(lowest - BIAS, highest - BIAS)
    used = scales[~zero_blocks(codes)]
    return Exponents(int(used.min()) - BIAS, int(used.max()) - BIAS) if used.size else None


def _is_used(codes: U8, scales: U8, byte: int) -> bool:
    for start in range(0, scales.size, CHUNK):
        where = np.flatnonzero(scales[start : start + CHUNK] == byte) + start
        if where.size and not zero_blocks(codes[where]).all():
            return True
    return False


def keep_blocks(
    codes: U8,
    scales: U8,
    m: int,
    out: tuple[U8, U8] | None = None,
    backend: str = "auto",
    threads: int | None = None,
) -> tuple[U8, U8, int]:
    """Whole blocks of 32 with their codes as they are and their scales 2**(k - m), snapped; and how many are zero.

    codes (rows, bytes), scales (rows, blocks). out: contiguous codes and scales to write into.
    """
    rows, blocks = scales.shape
    if out is None:
        out = np.empty(codes.shape, np.uint8), np.empty((rows, 2 * blocks), np.uint8)
    room = out[0].reshape(-1, 16), out[1].reshape(-1, 2)
    zeros = cast_blocks(codes.reshape(-1, 16), scales.reshape(-1), power_table(m), room, backend, threads)
    return *out, zeros


def power_scales(scales: U8, m: int, repeat: int, halves: int) -> U8:
    """E8M0 bytes (rows, blocks) to E4M3 bytes (rows, halves): 2**(k - m), snapped, `repeat` times each."""
    return np.ascontiguousarray(np.repeat(power_table(m)[scales], repeat, axis=1)[:, :halves])


@functools.lru_cache(512)
def power_table(m: int) -> U8:
    """For each E8M0 byte: the E4M3 byte of 2**(k - m), snapped to [2^-9, 2^8]."""
    n = np.clip(np.arange(256) - BIAS - m, LOWEST, HIGHEST)
    table = power_bytes((n - LOWEST).astype(np.uint8))
    table.flags.writeable = False
    return table


def power_bytes(step: U8) -> U8:
    """E4M3 byte of 2**(LOWEST + step): a subnormal's bit moves up, then the exponent field counts, in eights."""
    subnormal = np.left_shift(np.uint8(1), np.minimum(step, 2))
    return np.where(step < 3, subnormal, step * np.uint8(8) - np.uint8(16)).astype(np.uint8)
