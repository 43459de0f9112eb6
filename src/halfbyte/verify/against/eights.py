"""FP8 weights element by element: each value is within half a step of E4M3 from the source."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from halfbyte.codec.bits import F32
from halfbyte.formats import E4M3
from halfbyte.verify.against.measure import Measured
from halfbyte.verify.against.places import damage_problems
from halfbyte.verify.nearest import Bools
from halfbyte.verify.problems import Problem, number
from halfbyte.verify.values import Matrix

HALF_STEP = 2.0 ** -(E4M3.mantissa_bits + 1)
"""Half a step, relative to the power of two below a number."""

SMALLEST_EXPONENT = round(math.log2(E4M3.smallest_normal))
"""Below this power of two, steps grow no smaller."""

SLACK = 1.07
"""The source or the quotient may have been rounded to bfloat16 before."""

FEW = 0.001
"""Share of values up to which others are damage; beyond it, the writer rounded in another way."""


def fp8_problems(mine: Matrix, theirs: Matrix, measured: Measured) -> Iterator[Problem]:
    """Values that no rounding to the nearest E4M3 explains, by the first of them; or rows that are much worse."""
    if mine.multipliers is None:
        return
    place: tuple[int, int] | None = None
    count = 0
    for start, stop in mine.chunks():
        wrong = _far(mine.read(start, stop), theirs.read(start, stop), mine.multipliers(start, stop))
        if wrong.any() and place is None:
            row, column = np.argwhere(wrong)[0]
            place = start + int(row), int(column)
        count += int(wrong.sum())
    if place is None or count > FEW * mine.size + 1:
        yield from damage_problems(measured, mine, theirs)
        return
    row, column = place
    got, wanted = mine.row(row)[column], theirs.row(row)[column]
    more = f" (and {number(count - 1, 'more value')})" if count > 1 else ""
    text = (
        f"{mine.kind}: row {row}, column {column} is {got:.6g}, the source is {wanted:.6g}: more than half a step off"
    )
    yield Problem("error", "values", mine.name, text + more)


@np.errstate(all="ignore")
def _far(got: F32, wanted: F32, multipliers: F32) -> Bools:
    """Which values are more than half a step from the source; beyond the largest value, there are no steps."""
    stored, quotient = got / multipliers, np.clip(wanted / multipliers, -E4M3.max, E4M3.max)
    exponents = np.frexp(np.maximum(np.abs(stored), np.abs(quotient)))[1] - 1
    bound = np.ldexp(np.float32(HALF_STEP * SLACK), np.maximum(exponents, SMALLEST_EXPONENT))
    return np.asarray(np.abs(stored - quotient) > bound)
