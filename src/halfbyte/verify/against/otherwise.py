"""Damage to weights whose writer did not round to nearest: by feedback of errors (GPTQ), or at random.

Feedback moves codes by any number of steps, and may leave a whole row far from the source. Scales may clip weights of
inputs that do not count. But what it adds to a row does not depend on the row: intact rows hold the source once, and
blocks are near the source as far as their scale reaches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from halfbyte.codec.bits import F32
from halfbyte.formats import E2M1
from halfbyte.verify.against.measure import Measured
from halfbyte.verify.nearest import VALUES, Encoded, look_up
from halfbyte.verify.values import Matrix

BAD_ROW, WORSE = 0.5, 4.0
"""Error of a row that may be wrong, and how much worse it must be than the median row; or a block than nine in ten."""

HELD = (0.5, 1.5)
"""How many times an intact row holds its source."""

STEPS = 3.0
"""Root mean square of the steps by which a block must be off: intact blocks of GPTQ in real models reach 2.6."""


def distant_rows(measured: Measured) -> list[int]:
    """Rows that are much worse than the median row."""
    errors = np.nan_to_num(measured.row_errors, nan=np.inf)
    limit = max(BAD_ROW, WORSE * float(np.median(errors)))
    return [int(row) for row in np.flatnonzero(errors > limit)]


def holds_its_source(row: int, mine: Matrix, theirs: Matrix) -> bool:
    """Whether a row is its source once, plus something else."""
    values, wanted = (part.row(row).astype(np.float64) for part in (mine, theirs))
    power = float(wanted @ wanted)
    return power > 0 and HELD[0] < float(values @ wanted) / power < HELD[1]


def distant_blocks(mine: Matrix, theirs: Matrix) -> Iterator[tuple[int, int, float, Encoded]]:
    """(row, block, steps, the rows from that row on) of blocks much farther from the source than the rest of their rows
    and of the weight."""
    if mine.encoded is None:
        return
    for start, stop in mine.chunks():
        stored = mine.encoded(start, stop)
        values, reached = _in_steps(stored, theirs.read(start, stop))
        steps = np.sqrt(np.nan_to_num(np.square(values - reached).mean(axis=2)))
        usual = np.maximum(np.percentile(steps, 90), np.median(steps, axis=1, keepdims=True))
        for row, block in np.argwhere(steps > np.maximum(STEPS, WORSE * usual)):
            yield start + int(row), int(block), float(steps[row, block]), stored


def is_off_by_a_factor(mine: Matrix, theirs: Matrix, least: float) -> bool:
    """Whether the middle block misses a factor, at least that far from 1. A sum over all blocks is moved by few numbers
    that scales clip; those are left out."""
    if mine.encoded is None:
        return False
    first, second = [], []
    for start, stop in mine.chunks():
        values, wanted = _in_steps(mine.encoded(start, stop), theirs.read(start, stop))
        with np.errstate(all="ignore"):
            inside = np.abs(wanted) < E2M1.max
            product = np.sum(values * wanted, axis=2, where=inside)
            first.append(product / np.sum(values * values, axis=2, where=inside))
            second.append(np.sum(wanted * wanted, axis=2, where=inside) / product)
    off = [float(np.nanmedian(np.concatenate([part.ravel() for part in parts]))) - 1 for parts in (first, second)]
    return min(abs(part) for part in off) > least and off[0] * off[1] > 0


def _in_steps(stored: Encoded, source: F32) -> tuple[F32, F32]:
    """Codes and the source in units of the scale, [rows, blocks, block]; the source no larger than codes can be."""
    with np.errstate(all="ignore"):
        shape = (*stored.scales.shape, stored.block)
        wanted = source.reshape(shape) / stored.multiplier()
        return look_up(VALUES, stored.codes).reshape(shape), np.clip(wanted, -E2M1.max, E2M1.max)
