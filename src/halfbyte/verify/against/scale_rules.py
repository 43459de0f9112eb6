"""By which rule a writer chose the scales of a tensor, and the few blocks that break it.

A scale that is off by one step often leaves every code the nearest one. It shows only against the other blocks: if all
but a few have the scale that one rule gives, the few are damaged. Where no rule fits, nothing can be said.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from halfbyte.backends.compare import ScaleMark
from halfbyte.codec.bits import F32, U8
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

LEAST = 1e-3
"""The same for the rule of least squares, whose sums were added in another order."""

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


@functools.lru_cache(maxsize=64)
def judge_numbers(tensor_scale: float) -> Mapping[str, Any]:
    """The numbers of the rules for a kernel (backends/compare.py), by which `marks_of` computes too."""
    with np.errstate(all="ignore"):
        return {
            "six": np.float32(E2M1.max * tensor_scale),
            "four": np.float32(4 * tensor_scale),
            "tensor_scale": np.float32(tensor_scale),
            "clipped": np.float32(CLIPPED * tensor_scale),
            "small": SMALL,
            "exact": _slack(EXACT),
            "loose": _slack(SIXTEEN_BITS),
            "tight": _slack(-SIXTEEN_BITS),
            "least": _slack(LEAST),
            "low": LOW,
            "high": HIGH,
        }


def _slack(slack: float) -> F32:
    """What the ends of a step are multiplied by."""
    return np.array([1 - slack, 1 + slack], np.float32)


@np.errstate(all="ignore")
def marks_of(sums: BlockSums, stored: Encoded) -> U8:
    """Which rules the scale of each block obeys, as bits of ScaleMark."""
    numbers = judge_numbers(stored.tensor_scale)
    at = (stored.scale_bytes & np.uint8(0x7F)).astype(np.intp)
    low, high = LOW.take(at, mode="clip"), HIGH.take(at, mode="clip")

    def within(wanted: F32, slack: str) -> Bools:
        """Whether a number rounds to the stored scale, nearly enough."""
        below, above = numbers[slack]
        return np.asarray((wanted >= low * below) & (wanted <= high * above))

    six, four, zero = sums.amax / numbers["six"], sums.amax / numbers["four"], sums.amax == 0
    marks = np.zeros(at.shape, np.uint8)
    for slack, mark_six, mark_four in (
        ("exact", ScaleMark.EXACTLY_SIX, ScaleMark.EXACTLY_FOUR),
        ("loose", ScaleMark.LOOSELY_SIX, ScaleMark.LOOSELY_FOUR),
        ("tight", ScaleMark.CLEARLY_SIX, ScaleMark.CLEARLY_FOUR),
    ):
        to_six = within(six, slack) | zero
        marks |= np.where(to_six, np.uint8(mark_six), np.uint8(0))
        marks |= np.where(to_six | within(four, slack), np.uint8(mark_four), np.uint8(0))
    wanted = sums.product / (sums.power * numbers["tensor_scale"])
    # Some writers take no scale that would clip a number beyond 7 steps: a smaller one that does is not asked for.
    clips = (wanted < stored.scales) & (sums.amax > numbers["clipped"] * wanted)
    marks |= np.where(within(wanted, "least") | clips, np.uint8(ScaleMark.LEAST_SQUARES), np.uint8(0))
    told = (sums.power > 0) & ~sums.wrong & (stored.scales >= SMALL)
    return np.asarray(marks | np.where(told, np.uint8(ScaleMark.TOLD), np.uint8(0)))


BY_AMAX = ("maps the largest magnitude to 6", "maps the largest magnitude to 6 or 4")
"""Rules that scales obey only under the right tensor scale."""

RULES: dict[str, ScaleMark] = {
    BY_AMAX[0]: ScaleMark.EXACTLY_SIX,
    BY_AMAX[1]: ScaleMark.EXACTLY_FOUR,
    "has the least squared error for its codes": ScaleMark.LEAST_SQUARES,
}
"""What a rule says of a scale → the mark of blocks that obey."""

IN_SIXTEEN_BITS = {
    BY_AMAX[0]: (ScaleMark.LOOSELY_SIX, ScaleMark.CLEARLY_SIX),
    BY_AMAX[1]: (ScaleMark.LOOSELY_FOUR, ScaleMark.CLEARLY_FOUR),
}
"""Rule → the marks of blocks that obey in 16-bit arithmetic: perhaps, and certainly."""


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

    def feed(self, start: int, marks: U8) -> None:
        """The next rows, the first of which is row `start`. Blocks with a wrong code are found otherwise."""
        told = np.uint8(ScaleMark.TOLD)
        self.judged += int(np.count_nonzero(marks & told))
        for rule in list(self.broken):
            breaks = (marks & np.uint8(told | RULES[rule])) == told
            count = int(np.count_nonzero(breaks))
            if len(self.broken[rule]) + count > self._most:
                del self.broken[rule]
                continue
            self.broken[rule] += _places(start, breaks)
            if rule in IN_SIXTEEN_BITS:
                perhaps, certainly = (np.uint8(mark) for mark in IN_SIXTEEN_BITS[rule])
                self.near[rule] += int(np.count_nonzero((marks & (told | perhaps | certainly)) == (told | perhaps)))
                self.narrowly[rule].update(_places(start, breaks & ((marks & perhaps) != 0)))

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
