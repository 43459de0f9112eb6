"""A weight that was only converted to another float: each value is the source's, rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from halfbyte.codec.bits import F32
from halfbyte.verify.nearest import Bools
from halfbyte.verify.problems import Problem, number
from halfbyte.verify.reading import Raw, read_rows
from halfbyte.verify.values import Matrix

SLACK = 2.0**-20
"""The source itself may have been computed with another order of products in float32."""

STEPS = {"BF16": 2.0**-7, "F16": 2.0**-10}
"""One step of a dtype that rounds, relative to the value."""

FEW = 0.001
"""Share of values up to which others are damage; beyond it, the writer rounded in another way."""


def rounding_problems(path: Path, mine: Matrix, theirs: Matrix) -> Iterator[Problem]:
    """Values that are not the source's after rounding to the dtype of the weight, by the first of them."""
    if mine.plain is None:
        return
    place: tuple[int, int] | None = None
    off, far = 0, False
    for start, stop in mine.chunks():
        stored, wanted = read_rows(path, mine.plain, slice(start, stop)), theirs.read(start, stop)
        wrong = _outside(stored, wanted, SLACK)
        if not wrong.any():
            continue
        if place is None:
            row, column = np.argwhere(wrong)[0]
            place = start + int(row), int(column)
        off += int(wrong.sum())
        far |= bool(_outside(stored, wanted, STEPS.get(mine.plain.dtype, 0.0)).any())
    if place is None or (not far and off > FEW * mine.size + 1):
        return
    row, column = place
    got_one, wanted_one = mine.row(row)[column], theirs.row(row)[column]
    text = f"row {row}, column {column} is {got_one:.6g}, the source is {wanted_one:.6g}"
    more = f" (and {number(off - 1, 'more value')})" if off > 1 else ""
    yield Problem("error", "values", mine.name, f"{mine.kind}: {text}{more}; each should be the source's, rounded once")


@np.errstate(over="ignore", invalid="ignore")
def _outside(stored: Raw, wanted: F32, slack: float) -> Bools:
    """Which values are not the source's after rounding, if the source may be off by the slack."""
    factors = np.float32(1 - slack), np.float32(1 + slack)
    ends = [np.asarray((wanted * factor).astype(stored.dtype), np.float32) for factor in factors]
    got, low, high = np.asarray(stored, np.float32), np.minimum(*ends), np.maximum(*ends)
    return ~((got >= low) & (got <= high)) & ~(np.isnan(got) & np.isnan(wanted))
