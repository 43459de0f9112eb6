"""How good any global scale can be: a lower bound on the squared error over all of them, by branch and bound.

For an interval [a, b] of global scales, code q' under block scale S decodes to something within [q'Sa, q'Sb]. The
distance of a value to that interval bounds its error from below, whatever the global scale in [a, b] is; the least over
codes, summed over a half, the least over scales, summed over halves, bounds the error of the tensor. An interval whose
bound exceeds the best error known is done; the others are cut into pieces.

Only [(V − √E)/2688, V/784] is searched, V being the largest value and E the best error known. Below, clipping V costs
more than E; above, half the global scale is at least as good (docs/cast.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halfbyte.casting.rows import F64, MAGNITUDES, values_of
from halfbyte.casting.scales import GlobalScale, hold
from halfbyte.casting.survey import Halves, Survey
from halfbyte.casting.tables import ABSURD, FIRST_NORMAL, largest_value, least_error, total_error
from halfbyte.contracts import Contract
from halfbyte.errors import UnsupportedError
from halfbyte.formats import E2M1, E4M3

FIRST_CUT, NEXT_CUT = 2048, 8
"""How many pieces the range is cut into at first, and each interval that is left afterwards."""

LEVELS = 10
WIDEST = 4096
"""More intervals than this in a level are given up: their bound stands."""

FRONT = 64
"""Halves of each exponent that are looked at first, the most frequent ones, from the largest exponent on."""

CLOSE = 1 - 1e-4
"""A bound this near to the best error known counts as meeting it."""

ROUNDING = 2.0**-22
"""Decoding rounds twice in float32; intervals are wider by this share."""

WORK = 1 << 22
"""Distinct halves that may be looked at in full, all intervals together."""

NORMAL = 2.0**-116
"""Under a smaller global scale a product of element and block scale may be subnormal and round by more."""


@dataclass(frozen=True)
class Bounded:
    """The best global scale known, its error, and what no global scale can be better than."""

    scale: GlobalScale
    error: float
    bound: float


def prove(survey: Survey, scale: GlobalScale, error: float, contract: Contract) -> Bounded:
    """Search all global scales for a better one than the one given; bound what is left."""
    largest = largest_value(survey)
    low, high = (largest - error**0.5) / (E2M1.max * E4M3.max), largest / 784
    if not (np.isfinite(largest) and low > 0):
        return Bounded(scale, error, 0.0)
    edges = np.geomspace(low, high, FIRST_CUT + 1)
    intervals = np.stack([edges[:-1], edges[1:]], axis=1)
    bounds = Bounds(survey)
    work = max(WORK, 16 * bounds.size)
    given_up = error
    for level in range(LEVELS):
        front = bounds.from_front(intervals, error)
        intervals, front = intervals[front < error * CLOSE], front[front < error * CLOSE]
        order = np.argsort(front, kind="stable")
        left: list[tuple[float, float, float]] = []
        for position in order:
            if work <= 0:
                given_up = min(given_up, float(front[position]))
                continue
            found, looked_at = bounds.from_all(intervals[position], error)
            work -= looked_at
            if found < error * CLOSE:
                left.append((found, *intervals[position].tolist()))
        if not left:
            break
        middle = min(left)
        scale, error = _better((middle[1] * middle[2]) ** 0.5, survey, contract, scale, error)
        left = [entry for entry in left if entry[0] < error * CLOSE]
        if level == LEVELS - 1 or len(left) * NEXT_CUT > WIDEST:
            given_up = min([given_up, *(bound for bound, _, _ in left)])
            break
        intervals = np.array([_cut(a, b) for _, a, b in left]).reshape(-1, 2)
    return Bounded(scale, error, min(given_up, error * CLOSE) if low >= NORMAL else 0.0)


def _better(
    multiplier: float, survey: Survey, contract: Contract, scale: GlobalScale, error: float
) -> tuple[GlobalScale, float]:
    """The better of the best known and one more."""
    try:
        tried = hold(multiplier, contract)
    except UnsupportedError:
        return scale, error
    found = total_error(survey, tried)
    return (tried, found) if found < error * (1 - 1e-12) else (scale, error)


def _cut(a: float, b: float) -> F64:
    edges = np.geomspace(a, b, NEXT_CUT + 1)
    return np.stack([edges[:-1], edges[1:]], axis=1)


class Bounds:
    """Lower bounds on the error of everything surveyed, over an interval of global scales."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._exponents = sorted(survey.halves, reverse=True)
        self._front = {}
        for k, halves in survey.halves.items():
            first = np.argsort(-halves.number, kind="stable")[:FRONT]
            front = Halves(halves.ranks[first], halves.number[first])
            self._front[k] = front.counts.astype(np.float64), front.number

    @property
    def size(self) -> int:
        """How many distinct halves there are."""
        return sum(len(halves.ranks) for halves in self._survey.halves.values())

    def from_front(self, intervals: F64, error: float) -> F64:
        """A bound for each interval from a few halves of each exponent; stops adding where it is enough."""
        bounds = np.zeros(len(intervals))
        for k in self._exponents:
            open_ = np.flatnonzero(bounds < error * CLOSE)
            if not open_.size:
                break
            counts, number = self._front[k]
            for start in range(0, open_.size, 128):
                some = open_[start : start + 128]
                least = np.matmul(counts, interval_errors(k, intervals[some])).min(axis=2)
                bounds[some] += least @ number
        return bounds

    def from_all(self, interval: F64, error: float) -> tuple[float, int]:
        """The bound of one interval from all halves, and how many distinct ones were looked at."""
        bound, looked_at = self._from_faint(float(interval[0])), 0
        for k in self._exponents:
            halves = self._survey.halves[k]
            bound += least_error(halves, interval_errors(k, interval[None])[0])
            looked_at += len(halves.ranks)
            if bound >= error * CLOSE:
                break
        return bound, looked_at

    def _from_faint(self, low: float) -> float:
        """Faint halves are lost if the least value above zero is twice their largest; if not, they may cost nothing."""
        least = low * (1 - ROUNDING) * E2M1.smallest * E4M3.smallest
        return sum(self._survey.lost(k) for k in self._survey.faint if 2 * E2M1.max * np.ldexp(1.0, k) <= least)


def interval_errors(k: int, intervals: F64) -> F64:
    """(intervals, 8, scales): the least squared error of each magnitude under each scale, over an interval of g."""
    low, high = intervals[:, 0] * (1 - ROUNDING), intervals[:, 1] * (1 + ROUNDING)
    scales = E4M3.magnitudes.astype(np.float64)
    ratio = np.ldexp(1.0, k) / np.array([high.max(), low.min()])
    first = 1 if ratio[1] > E4M3.max else int(np.searchsorted(scales, ratio[0] / 16))
    last = max(int(np.searchsorted(scales, 12 / 7 * ratio[1])), FIRST_NORMAL)
    offered = scales[first : last + 1][:, None] * MAGNITUDES[None, :]
    values = values_of(k).astype(np.float64)
    least = np.full((len(intervals), 8, len(offered)), np.inf)
    for code in range(8):
        below = offered[None, :, code] * low[:, None]
        above = offered[None, :, code] * high[:, None]
        distance = np.maximum(below[:, None, :] - values[None, :, None], values[None, :, None] - above[:, None, :])
        np.minimum(least, np.maximum(distance, 0.0), out=least)
    with np.errstate(over="ignore"):
        return np.asarray(np.minimum(least**2, ABSURD))  # a magnitude that overflows and does not occur costs nothing
