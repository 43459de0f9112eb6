"""Algorithm 2: every nibble kept, block scales snapped to powers of two. The error has a closed form in m."""

from __future__ import annotations

import numpy as np

from halfbyte.casting.rows import F64, HALF, Rows
from halfbyte.casting.survey import Survey
from halfbyte.casting.window import HIGHEST, LOWEST, Exponents, keep_blocks, power_scales
from halfbyte.codec.bits import U8

PLACEMENTS = ("midpoint", "search")


def midpoint(exponents: Exponents | None) -> int:
    """The m that puts the middle of [k_min, k_max] on the middle of E4M3's powers of two, [-9, 8]."""
    return 0 if exponents is None else (exponents.low + exponents.high + 1) // 2


def snapping_error(survey: Survey, m: int) -> float:
    """Σ_j S_j (2^k_j − 2^(m + clamp(k_j − m)))²: what snapping to m costs."""
    k = np.array(list(survey.energy), np.int64)
    weight: F64 = np.array(list(survey.energy.values()), np.float64)
    snapped = m + np.clip(k - m, LOWEST, HIGHEST)
    return float((weight * (np.ldexp(1.0, k) - np.ldexp(1.0, snapped)) ** 2).sum())


def search(survey: Survey) -> int:
    """The m with the least snapping error; of equals the one nearest to the midpoint, then the smaller."""
    found, middle = survey.exponents, midpoint(survey.exponents)
    if found is None or found.fit:
        return middle  # no block is snapped there, and none is nearer
    # A step outwards from these snaps some blocks further, and none less.
    candidates = range(found.low - LOWEST, found.high - HIGHEST + 1)
    return min(candidates, key=lambda m: (snapping_error(survey, m), abs(m - middle), m))


def keep(
    rows: Rows, m: int, out: tuple[U8, U8] | None = None, backend: str = "auto", threads: int | None = None
) -> tuple[U8, U8]:
    """Codes as they are, scales 2**(k - m) snapped to what E4M3 holds; in new memory, or in what is given."""
    return keep_and_count(rows, m, out, backend, threads)[:2]


def keep_and_count(
    rows: Rows, m: int, out: tuple[U8, U8] | None = None, backend: str = "auto", threads: int | None = None
) -> tuple[U8, U8, int]:
    """The same, and how many blocks are zero."""
    if rows.regular:
        return keep_blocks(rows.codes, rows.scales, m, out, backend, threads)
    scales = power_scales(rows.scales, m, rows.block // HALF, rows.halves)
    if out is None:
        return rows.codes.copy(), scales, rows.zeros
    np.copyto(out[0], rows.codes)
    np.copyto(out[1], scales)
    return *out, rows.zeros
