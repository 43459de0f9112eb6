"""The survey: all that the choice of a global scale has to know about the rows that will share it.

A half is known by its exponent k and by how often each of the eight magnitudes occurs among its 16 elements. There are
245,157 such multisets, so a histogram for each exponent says everything, however many rows there are. Rows may come in
any order and in chunks of any size: histograms add up, and the same rows give the same survey.

Exponents far below the largest one need less. `DEPTH` octaves below it a half becomes zero under every global scale
that is worth a try (docs/cast.md), so the sum of its squares is enough. That bounds the survey at 28 histograms, and
its memory at 90 MB.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.casting.rows import F64, HALF, MAGNITUDES, Rows, by_exponent
from halfbyte.casting.window import BIAS, Exponents
from halfbyte.codec.bits import U8

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]

DEPTH = 28
"""Exponents below the largest one, itself included, of which every half is told apart."""

MULTISETS = math.comb(HALF + 7, 7)
"""How many ways there are to draw 16 of eight magnitudes, order left aside."""


@dataclass(frozen=True)
class Halves:
    """The distinct halves of one exponent."""

    ranks: U32
    """(halves,): which multiset each is; the numbers of `rank`, ascending."""
    number: F64
    """(halves,): how many there are of each; in a sample, how many each stands for."""

    @property
    def counts(self) -> U8:
        """(halves, 8): how often each magnitude occurs. Made anew each time, to keep the survey small."""
        return multisets()[self.ranks]

    def chunks(self, size: int) -> Iterator[Halves]:
        """The halves a few at a time."""
        for start in range(0, len(self.ranks), size):
            yield Halves(self.ranks[start : start + size], self.number[start : start + size])


@dataclass(frozen=True)
class Survey:
    """What is known about rows that share a global scale. Halves that are zero are left out."""

    halves: dict[int, Halves]
    """By exponent, the `DEPTH` largest ones."""
    faint: dict[int, I64]
    """By exponent, those below: how often each magnitude occurs in all halves together."""

    @property
    def exponents(self) -> Exponents | None:
        """Smallest and largest exponent; None if every block is zero."""
        used = [*self.halves, *self.faint]
        return Exponents(min(used), max(used)) if used else None

    @functools.cached_property
    def energy(self) -> dict[int, float]:
        """{k: sum of the squared E2M1 values of all halves with that exponent}."""
        totals = {k: halves.number @ halves.counts.astype(np.float64) for k, halves in self.halves.items()}
        return {k: float(total @ MAGNITUDES**2) for k, total in sorted((totals | self.faint).items())}

    def lost(self, k: int) -> float:
        """The squared error of an exponent's halves if all of them become zero."""
        return self.energy[k] * math.ldexp(1.0, 2 * k)


class Surveyor:
    """Takes rows in, chunk by chunk, and makes a survey of them."""

    def __init__(self) -> None:
        self._histograms: dict[int, I64] = {}
        self._faint: dict[int, I64] = {}
        self._top = -BIAS
        """The largest exponent so far."""

    def add(self, rows: Rows) -> None:
        """Take in some rows."""
        for _, _, part in rows.slices():
            where = part.nonzero_half
            exponents, counts = part.half_exponents[where], part.counts[where]
            self._fade(int(exponents.max(initial=self._top)))
            for k, here in by_exponent(exponents):
                self._count(k, counts[here])

    def survey(self) -> Survey:
        """The survey of all rows. The histograms are given up on the way, so that memory is not taken twice."""
        found = {}
        for k in sorted(self._histograms):
            histogram = self._histograms.pop(k)
            present = np.flatnonzero(histogram)
            found[k] = Halves(present.astype(np.uint32), histogram[present].astype(np.float64))
        return Survey(found, dict(sorted(self._faint.items())))

    def _count(self, k: int, counts: U8) -> None:
        if k <= self._top - DEPTH:
            self._add_faint(k, counts.sum(axis=0, dtype=np.int64))
            return
        if k not in self._histograms:
            self._histograms[k] = np.zeros(MULTISETS, np.int64)
        present, number = np.unique(rank(counts), return_counts=True)
        self._histograms[k][present] += number

    def _fade(self, top: int) -> None:
        """Reduce the histograms that a new largest exponent leaves behind to their sums."""
        self._top = top
        for k in [k for k in self._histograms if k <= top - DEPTH]:
            histogram = self._histograms.pop(k)
            present = np.flatnonzero(histogram)
            self._add_faint(k, histogram[present] @ multisets()[present].astype(np.int64))

    def _add_faint(self, k: int, total: I64) -> None:
        self._faint[k] = self._faint.get(k, np.zeros(8, np.int64)) + total


def survey_of(parts: Iterable[Rows]) -> Survey:
    """The survey of rows that share a global scale."""
    surveyor = Surveyor()
    for rows in parts:
        surveyor.add(rows)
    return surveyor.survey()


def rank(counts: U8) -> I64:
    """(halves, 8) counts that add up to 16 as numbers from 0 to MULTISETS - 1, one for each multiset.

    Sixteen stars and seven bars: bar j stands behind the stars of the first j + 1 magnitudes, at c_0 + … + c_j + j. The
    number of a set of positions p_0 < … < p_6 is the sum of the binomials C(p_j, j + 1).
    """
    stars = np.cumsum(counts[:, :7], axis=1, dtype=np.uint8)
    total = np.zeros(len(counts), np.int64)
    for bar in range(7):
        total += BINOMIALS[bar][stars[:, bar]]
    return total


BINOMIALS: I64 = np.array([[math.comb(stars + bar, bar + 1) for stars in range(HALF + 1)] for bar in range(7)])


@functools.cache
def multisets() -> U8:
    """(MULTISETS, 8): the counts of every multiset, in the order of `rank`."""
    flat = itertools.chain.from_iterable(itertools.combinations(range(HALF + 7), 7))
    bars = np.fromiter(flat, np.int64, 7 * MULTISETS).reshape(-1, 7)
    edges = np.pad(bars, [(0, 0), (1, 1)], constant_values=(-1, HALF + 7))
    counts = (np.diff(edges, axis=1) - 1).astype(np.uint8)
    table = np.empty_like(counts)
    table[rank(counts)] = counts
    table.flags.writeable = False
    return table
