"""By which rule a writer chose the scales of a tensor, and the few blocks that break it.

A scale that is off by one step often leaves every code the nearest one. It shows only against the other blocks: if all
but a few have the scale that one rule gives, the few are damaged. Where no rule fits, nothing can be said.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from halfbyte.codec.bits import F32
from halfbyte.formats import E2M1, E4M3
from halfbyte.verify.nearest import BlockSums, Bools, Encoded

ENOUGH = 24
"""Blocks with anything to tell that a tensor needs before its scales are judged."""

FEW, SHARE = 2, 2000
"""A rule may be broken by this many blocks, or by one in this many."""

LARGEST = (256.0, 448.0)
"""Scales at which writers stop: the largest number, or 256, which leaves room for four over six."""

SMALL = 2.0**-5
"""Scales below this one are not judged: writers treat the smallest ones in many ways."""

EXACT = 1e-5
"""How far beyond a step a number may lie that rounds to it, where a writer computes in float32."""

SIXTEEN_BITS = 2.0**-7.9
"""The same where a writer rounds the number twice to bfloat16, as compressed-tensors does."""

CLEAR = 256
"""How many blocks must lie so near the end of a step that 16 bits could move them over it, for each that lies beyond,
before that one counts as damage: a writer that computes in 16 bits moves one in ten to one in a hundred."""

CLIPPED = 6.6
"""Steps from which a writer may refuse to clip: 7, less what rounding a scale can make of it."""


def _steps() -> tuple[F32, F32]:
    """For each E4M3 byte without its sign, the numbers that round to it: from, to. No end where writers stop."""
    values = E4M3.magnitudes.astype(np.float64)
    middles = (values[1:] + values[:-1]) / 2
    low, high = np.concatenate([[0.0], middles, [np.nan]]), np.concatenate([middles, [np.inf, np.nan]])
    high[np.searchsorted(values, LARGEST)] = np.inf
    return low.astype(np.float32), high.astype(np.float32)


LOW, HIGH = _steps()


@dataclass(frozen=True)
class Judged:
    """Rows of blocks with what every rule asks of them."""

    sums: BlockSums
    stored: Encoded
    low: F32
    """The smallest number that rounds to each stored scale; `high`: the largest."""
    high: F32

    @classmethod
    def of(cls, sums: BlockSums, stored: Encoded) -> Judged:
        at = (stored.scale_bytes & np.uint8(0x7F)).astype(np.intp)
        return cls(sums, stored, LOW.take(at, mode="clip"), HIGH.take(at, mode="clip"))

    def rounds_to(self, wanted: F32, slack: float) -> Bools:
        """Whether a number rounds to the stored scale, nearly enough."""
        fits = wanted >= self.low * np.float32(1 - slack)
        fits &= wanted <= self.high * np.float32(1 + slack)
        return fits

    @functools.cached_property
    def zero(self) -> Bools:
        return np.asarray(self.sums.amax == 0)

    @functools.cached_property
    def to_six(self) -> F32:
        """The scale that maps the largest magnitude to 6."""
        return self.sums.amax / np.float32(E2M1.max * self.stored.tensor_scale)

    @functools.cached_property
    def to_four(self) -> F32:
        return self.sums.amax / np.float32(4 * self.stored.tensor_scale)


def _to_six(judged: Judged, slack: float) -> Bools:
    return judged.rounds_to(judged.to_six, slack) | judged.zero


def _to_four_or_six(judged: Judged, slack: float) -> Bools:
    return _to_six(judged, slack) | judged.rounds_to(judged.to_four, slack)


def _least_squares(judged: Judged, slack: float) -> Bools:
    """Some writers take no scale that would clip a number beyond 7 steps: a smaller one that does is not asked for."""
    sums, stored = judged.sums, judged.stored
    wanted = sums.product / (sums.power * np.float32(stored.tensor_scale))
    clips = (wanted < stored.scales) & (sums.amax > np.float32(CLIPPED * stored.tensor_scale) * wanted)
    return judged.rounds_to(wanted, max(slack, 1e-3)) | clips


BY_AMAX = ("maps the largest magnitude to 6", "maps the largest magnitude to 6 or 4")
"""Rules that scales obey only under the right tensor scale."""

RULES: dict[str, Callable[[Judged, float], Bools]] = {
    BY_AMAX[0]: _to_six,
    BY_AMAX[1]: _to_four_or_six,
    "has the least squared error for its codes": _least_squares,
}
"""What a rule says of a scale → which blocks obey, with this much slack."""


@dataclass
class ScaleRules:
    """Judges the scales of one tensor, chunk by chunk. Remembers no more than the blocks that break a rule."""

    blocks: int
    """Of the whole tensor."""
    broken: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {rule: [] for rule in RULES})
    """Rules that may still hold → (row, block) of blocks that break them."""
    narrowly: dict[str, set[tuple[int, int]]] = field(default_factory=lambda: {rule: set() for rule in BY_AMAX})
    """Rule → those of its broken blocks that 16-bit arithmetic explains."""
    near: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BY_AMAX, 0))
    """Rule → blocks that 16-bit arithmetic could have made break it, whether or not they do."""
    judged: int = 0

    @property
    def _most(self) -> int:
        return max(FEW, self.blocks // SHARE)

    def feed(self, start: int, sums: BlockSums, stored: Encoded) -> None:
        """The next rows, the first of which is row `start`. Blocks with a wrong code are found otherwise."""
        told = (sums.power > 0) & ~sums.wrong & (stored.scales >= SMALL)
        judged = Judged.of(sums, stored)
        self.judged += int(np.count_nonzero(told))
        for rule in list(self.broken):
            obeys = RULES[rule]
            with np.errstate(all="ignore"):
                breaks = told & ~obeys(judged, EXACT)
            if len(self.broken[rule]) + np.count_nonzero(breaks) > self._most:
                del self.broken[rule]
                continue
            self.broken[rule] += _places(start, breaks)
            if rule in self.near:
                with np.errstate(all="ignore"):
                    loosely = told & obeys(judged, SIXTEEN_BITS)
                    near = loosely & ~obeys(judged, -SIXTEEN_BITS)
                self.near[rule] += int(np.count_nonzero(near))
                self.narrowly[rule].update(_places(start, breaks & loosely))

    @property
    def by_amax(self) -> bool:
        """Whether the scales come from the largest magnitudes, which proves the tensor scale right."""
        return self.judged >= ENOUGH and any(rule in self.broken for rule in BY_AMAX)

    def verdict(self) -> tuple[str, list[tuple[int, int]]]:
        """The rule that the fewest blocks break, and those blocks; ("", []) where no rule holds."""
        if self.judged < ENOUGH or not self.broken:
            return "", []
        rule, places = min(self.broken.items(), key=lambda item: len(item[1]))
        narrowly = self.narrowly.get(rule, set())
        if len(narrowly) * CLEAR > self.near.get(rule, 0):
            places = [place for place in places if place not in narrowly]
        return rule, places


def _places(start: int, blocks: Bools) -> list[tuple[int, int]]:
    """(row, block) of each that is marked."""
    if not blocks.any():
        return []
    return [(start + int(row), int(block)) for row, block in np.argwhere(blocks)]
