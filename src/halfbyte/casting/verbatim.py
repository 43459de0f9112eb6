"""Algorithm 2: every nibble kept, block scales snapped to powers of two. The error has a closed form in m."""

from __future__ import annotations

from typing import Literal

import numpy as np

from halfbyte.casting.rows import F64, HALF, MAGNITUDES, Group, Piece
from halfbyte.casting.window import HIGHEST, LOWEST, keep_blocks, power_scales
from halfbyte.codec.bits import U8
from halfbyte.errors import unknown_name

Placement = Literal["midpoint", "search"]
PLACEMENTS = ("midpoint", "search")


def midpoint(group: Group) -> int:
    """The m that puts the middle of [k_min, k_max] on the middle of E4M3's powers of two, [-9, 8]."""
    found = group.exponent_range
    return 0 if found is None else (found[0] + found[1] + 1) // 2


def energy_by_exponent(group: Group) -> dict[int, float]:
    """{k: sum of the squared E2M1 values of all blocks with that exponent}: S_j of the closed form, added up."""
    squares = MAGNITUDES**2
    return {k: float(counts.sum(axis=0, dtype=np.int64) @ squares) for k, counts in group.by_exponent.items()}


def snapping_error(energy: dict[int, float], m: int) -> float:
    """Σ_j S_j (2^k_j − 2^(m + clamp(k_j − m)))²: what snapping to m costs."""
    k = np.array(list(energy), np.int64)
    weight: F64 = np.array(list(energy.values()), np.float64)
    snapped = m + np.clip(k - m, LOWEST, HIGHEST)
    return float((weight * (np.ldexp(1.0, k) - np.ldexp(1.0, snapped)) ** 2).sum())


def search(group: Group) -> int:
    """The m with the least snapping error; of equals the one nearest to the midpoint, then the smaller."""
    found = group.exponent_range
    if found is None or group.fits:
        return midpoint(group)  # no block is snapped there, and none is nearer
    energy, middle = energy_by_exponent(group), midpoint(group)
    # Below k_min - 8 and above k_max + 9 every block is snapped, further the farther away m is.
    candidates = range(max(found[0] - HIGHEST, -140), min(found[1] - LOWEST, 127) + 1)
    return min(candidates, key=lambda m: (snapping_error(energy, m), abs(m - middle), m))


def place(group: Group, how: str) -> int:
    """m by the given rule."""
    if how not in PLACEMENTS:
        raise unknown_name("m", how, PLACEMENTS)
    return midpoint(group) if how == "midpoint" else search(group)


def keep(piece: Piece, m: int, out: tuple[U8, U8] | None = None, threads: int | None = None) -> tuple[U8, U8]:
    """Codes as they are, scales 2**(k - m) snapped to what E4M3 holds; in new memory, or in what is given."""
    return keep_and_count(piece, m, out, threads)[:2]


def keep_and_count(
    piece: Piece, m: int, out: tuple[U8, U8] | None = None, threads: int | None = None
) -> tuple[U8, U8, int]:
    """The same, and how many blocks are zero."""
    if piece.regular:
        return keep_blocks(piece.codes, piece.scales, m, out, threads)
    scales = power_scales(piece.scales, m, piece.block // HALF, piece.halves)
    if out is None:
        return piece.codes.copy(), scales, piece.zeros
    np.copyto(out[0], piece.codes)
    np.copyto(out[1], scales)
    return *out, piece.zeros
