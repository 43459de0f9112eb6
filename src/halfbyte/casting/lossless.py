"""When a cast can be lossless: the global scales under which every half has a block scale and codes that equal it.

A half with exponent k holds values q·2^k. It is equal to q'·(S·g) if S·g = u·2^k and every q/u is an E2M1 value. Which
u serve a half depends on the magnitudes that occur in it: 1 serves all, 2 those without 0.5 and 1.5, 3 those of only
1.5, 3 and 6, and so on. docs/cast.md proves that a global scale of the form 2^m or 3·2^m is always enough: if any
float32 is lossless, one of those is. Under either form the m that serve a half are an interval around k, found here
once for each of the 128 sets of magnitudes; a tensor is lossless if the intervals of all its halves meet.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.casting.rows import MAGNITUDES
from halfbyte.casting.survey import Survey
from halfbyte.casting.window import HIGHEST, LOWEST, NO_BLOCKS
from halfbyte.formats import E4M3

I64 = npt.NDArray[np.int64]

NEVER = 1000
"""Sentinel for an empty interval: it starts this far above k and ends this far below."""


@dataclass(frozen=True)
class Lossless:
    """A global scale odd·2^m under which every value is kept."""

    odd: int
    m: int


@functools.cache
def intervals(odd: int) -> tuple[I64, I64]:
    """For each set of magnitudes (bit i: magnitude i + 1 occurs): the least and the largest m - k that serve it.

    The global scale is odd·2^m. Tried one by one: u = S·odd·2^(m-k) for all scales S and all m - k.
    """
    shifts = np.arange(-24, 25)
    u = E4M3.magnitudes[1:, None].astype(np.float64) * np.ldexp(float(odd), shifts)[None, :]
    grid = set(MAGNITUDES.tolist())
    serves = np.zeros((7, *u.shape), bool)
    for index, value in enumerate(MAGNITUDES[1:]):
        serves[index] = np.isin(value / u, list(grid))  # exact: a quotient that rounds is none of these
    low, high = np.full(128, NEVER), np.full(128, -NEVER)
    for magnitudes in range(1, 128):
        chosen = [index for index in range(7) if magnitudes >> index & 1]
        possible = shifts[serves[chosen].all(axis=0).any(axis=0)]
        if possible.size:
            if possible.size != possible[-1] - possible[0] + 1:
                raise AssertionError(f"the m that serve magnitudes {magnitudes:07b} are no interval")
            low[magnitudes], high[magnitudes] = possible[0], possible[-1]
    low[0], high[0] = -NEVER, NEVER  # a zero half is equal under any scale
    return low, high


def find_lossless(survey: Survey) -> Lossless | None:
    """The lossless global scale that keeps the most halves as they are; None if there is none at all."""
    if survey.faint:
        return None  # no two halves that some scale keeps lie so far apart
    for odd in (1, 3):
        low, high = intervals(odd)
        least, most = -NEVER, NEVER
        for k, halves in survey.halves.items():
            sets = np.unique(np.packbits(halves.counts[:, 1:] > 0, axis=1, bitorder="little"))
            least = max(least, k + int(low[sets].max()))
            most = min(most, k + int(high[sets].min()))
        if least <= most:
            return Lossless(odd, _most_kept(survey, least, most) if odd == 1 else least)
    return None


def _most_kept(survey: Survey, least: int, most: int) -> int:
    """The m within bounds whose window holds the most halves; of equals the closed form's k_max - 8, then the least."""
    sizes = {k: int(halves.number.sum()) for k, halves in survey.halves.items()}
    closed_form = (survey.exponents or NO_BLOCKS).m

    def kept(m: int) -> int:
        return sum(size for k, size in sizes.items() if LOWEST <= k - m <= HIGHEST)

    return max(range(least, most + 1), key=lambda m: (kept(m), m == closed_form, -m))
