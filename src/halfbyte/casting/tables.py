"""The best scale and codes of a half under a given global scale, exactly.

A half is known by its exponent k and by how often each of the eight magnitudes occurs. Under a global scale and a block
scale S every magnitude goes to the nearest value that decodes; the squared error of the half is the sum of the eight
squared distances times the counts. So one small table per k gives the error of every half under every S.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.casting.rows import F64, values_of
from halfbyte.casting.scales import GlobalScale
from halfbyte.casting.survey import Halves, Survey
from halfbyte.codec.bits import U8
from halfbyte.formats import E4M3

ABSURD = 1e300
"""Stands for an infinite error, so that 0 occurrences times it are 0."""

FIRST_NORMAL = 15
"""Bytes up to here may have no half among the E4M3 values; from 16 on all do."""

CHUNK = 1 << 11
"""Halves at a time: the work stays in the cache, and the matrix products in one thread."""


@dataclass(frozen=True)
class Table:
    """For one exponent under one global scale: what each magnitude costs and becomes under the scales worth a try."""

    first: int
    """The E4M3 byte of the first column."""
    errors: F64
    """(8, scales): squared distance to the nearest value that decodes."""
    codes: U8
    """(scales, 8): the magnitude's new index; the smaller of equals."""


def make_table(k: int, scale: GlobalScale, decoded: F64) -> Table:
    """The table of exponent k; `decoded` is `scale.decoded()`, shared by all exponents."""
    values = values_of(k).astype(np.float64)
    first, last = _worth_a_try(k, float(scale.multiplier))
    offered = decoded[first - 1 : last]
    if np.isfinite(values[-1]) and np.isfinite(offered[-1, -1]):
        distance = np.abs(offered[:, None, :] - values[None, :, None])
    else:
        distance = _distance_to_inf(offered, values)
    with np.errstate(over="ignore"):
        errors = np.minimum(distance.min(axis=2) ** 2, ABSURD)
    codes = distance.argmin(axis=2)
    return Table(first, np.ascontiguousarray(errors.T), codes.astype(np.uint8))


def _distance_to_inf(offered: F64, values: F64) -> F64:
    """(scales, 8, 8): how far each value is from what decodes. Inf is equal to Inf, and infinitely far from NaN."""
    with np.errstate(invalid="ignore"):
        distance = np.abs(offered[:, None, :] - values[None, :, None])
    same = offered[:, None, :] == values[None, :, None]
    return np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance))


def _worth_a_try(k: int, multiplier: float) -> tuple[int, int]:
    """The range of E4M3 bytes among which the best scale of any half with exponent k lies (docs/cast.md).

    With r = S·g/2^k: r ≥ 12/7 is never better than its half, where E4M3 has it. r < 1/16 clips more than keeping the
    codes under the scale nearest to r = 1 costs, where that one is within a sixteenth of it. It need not be under
    E4M3's normal numbers, but r = 1/16 is no scale there.
    """
    ratio = np.ldexp(1.0, k) / multiplier
    magnitudes = E4M3.magnitudes.astype(np.float64)
    first = int(np.searchsorted(magnitudes, ratio / 16)) if ratio <= E4M3.max else 1
    last = int(np.searchsorted(magnitudes[:-1], 12 / 7 * ratio))  # the largest where all are below
    return first, max(last, FIRST_NORMAL)


def half_errors(counts: F64, table: Table) -> F64:
    """(halves, scales): the error of each half under each scale, added in the order of the magnitudes."""
    total: F64 = counts[:, :1] * table.errors[0]
    for magnitude in range(1, 8):
        total += counts[:, magnitude : magnitude + 1] * table.errors[magnitude]
    return total


def best_scales(counts: U8, table: Table) -> npt.NDArray[np.intp]:
    """Column of the table with the best scale of each half; the smaller scale of equals."""
    parts = (counts[start : start + CHUNK].astype(np.float64) for start in range(0, len(counts), CHUNK))
    return np.concatenate([half_errors(part, table).argmin(axis=1) for part in parts])


def least_error(halves: Halves, errors: F64) -> float:
    """The sum of the errors of all halves, each under its best scale; errors (8, scales) as in a table.

    By a matrix product: its last bit is the library's, so it decides between global scales, never between codes.
    """
    total = 0.0
    for part in halves.chunks(CHUNK):
        least = (errors.T @ part.counts.astype(np.float64).T).min(axis=0)
        total += float(least @ part.number)
    return total


def total_error(survey: Survey, scale: GlobalScale, kept: tuple[int, int] | None = None) -> float:
    """The least squared error of all halves under a global scale. Exponents within `kept` are known to cost nothing.

    Halves of faint exponents become zero.
    """
    decoded = scale.decoded()
    total = sum(survey.lost(k) for k in survey.faint)
    for k, halves in survey.halves.items():
        if kept is not None and kept[0] <= k <= kept[1]:
            continue
        total += least_error(halves, make_table(k, scale, decoded).errors)
    return total


def largest_value(survey: Survey) -> float:
    """The largest value; Inf if float32 cannot hold it."""
    tops = {k: int(np.flatnonzero(halves.counts.max(axis=0))[-1]) for k, halves in survey.halves.items()}
    return max(float(values_of(k)[top]) for k, top in tops.items())
