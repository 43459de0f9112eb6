"""By which rule scales were chosen: the marks of single blocks, and how few may break a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from halfbyte.backends.compare import ScaleMark
from halfbyte.formats import E4M3
from halfbyte.verify.against.scale_rules import BY_AMAX, HIGH, LOW, RULES, ScaleRules, judge_numbers, marks_of
from halfbyte.verify.nearest import BlockSums, Encoded

SIX, FOUR, LEAST, TOLD = (ScaleMark.EXACTLY_SIX, ScaleMark.EXACTLY_FOUR, ScaleMark.LEAST_SQUARES, ScaleMark.TOLD)
ALL = 255


def test_steps_of_e4m3() -> None:
    """From middle to middle; without an end at 256 and 448, where writers stop."""
    assert (LOW[0], HIGH[0], LOW[1]) == (0, 2.0**-10, 2.0**-10)
    assert (LOW[0x38], HIGH[0x38]) == (1 - 2.0**-5, 1 + 2.0**-4)
    ends = {byte: (float(LOW[byte]), float(HIGH[byte])) for byte in (0x77, 0x78, 0x79, 0x7D, 0x7E)}
    assert ends == {0x77: (232, 248), 0x78: (248, np.inf), 0x79: (272, 304), 0x7D: (400, 432), 0x7E: (432, np.inf)}
    assert np.isnan(LOW[0x7F])
    assert np.isnan(HIGH[0x7F])
    assert len(LOW) == len(HIGH) == 128


def test_numbers_for_the_kernel() -> None:
    numbers = judge_numbers(0.5)
    assert {name: float(numbers[name]) for name in ("six", "four", "tensor_scale", "small")} == {
        "six": 3, "four": 2, "tensor_scale": 0.5, "small": 2.0**-5
    }  # fmt: skip
    assert float(numbers["clipped"]) == np.float32(3.3)
    for name, slack in (("exact", 1e-5), ("loose", 2.0**-7.9), ("tight", -(2.0**-7.9)), ("least", 1e-3)):
        assert numbers[name].tolist() == np.array([1 - slack, 1 + slack], np.float32).tolist()


def marks(
    amax: float = 6, product: float = 16, power: float = 16, *, byte: int = 0x38, scale: float = 1, wrong: bool = False
) -> int:
    """The marks of one block."""
    one: Any = lambda number, kind=np.float32: np.array([[number]], kind)  # noqa: E731
    sums = BlockSums(one(amax), one(product), one(power), one(0, np.float64), one(0, np.float64), one(wrong, np.bool_))
    bytes_ = np.array([[byte]], np.uint8)
    return int(marks_of(sums, Encoded(np.zeros((1, 8), np.uint8), bytes_, E4M3.values[bytes_], scale, E4M3))[0, 0])


LOOSE, CLEAR = 1 + 2.0**-7.9, 1 - 2.0**-7.9
BY_SIX = SIX | ScaleMark.LOOSELY_SIX | ScaleMark.CLEARLY_SIX
BY_FOUR = FOUR | ScaleMark.LOOSELY_FOUR | ScaleMark.CLEARLY_FOUR


@pytest.mark.parametrize(
    ("step", "six"),
    [
        (1.0, BY_SIX),
        (1.0625 * (CLEAR - 1e-4), BY_SIX),
        (1.0625 * (CLEAR + 1e-4), SIX | ScaleMark.LOOSELY_SIX),
        (1.0625 * (1 + 0.9e-5), SIX | ScaleMark.LOOSELY_SIX),
        (1.0625 * (1 + 1.2e-5), ScaleMark.LOOSELY_SIX),
        (1.0625 * (LOOSE - 1e-4), ScaleMark.LOOSELY_SIX),
        (1.0625 * (LOOSE + 1e-4), 0),
        (0.96875 * (2 - CLEAR + 1e-4), BY_SIX),
        (0.96875 * (2 - CLEAR - 1e-4), SIX | ScaleMark.LOOSELY_SIX),
        (0.96875 * (1 - 1.2e-5), ScaleMark.LOOSELY_SIX),
        (0.96875 * (2 - LOOSE - 1e-4), 0),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_marks_of_amaxes(step: float, six: int, scale: float) -> None:
    """How near the largest magnitude over 6, or over 4, comes to the ends of the step of the scale."""
    four = six * 8
    by_six = marks(6 * step * scale, 16 * 9 * scale, scale=scale)
    assert by_six == six | four | TOLD
    by_four = marks(4 * step * scale, 16 * 9 * scale, scale=scale)
    assert by_four == four | TOLD


def test_the_largest_scales_have_no_end() -> None:
    assert marks(np.inf, byte=0x7E) & ~LEAST == marks(np.inf, byte=0x78) & ~LEAST == BY_SIX | BY_FOUR | TOLD
    assert marks(np.inf, byte=0x7D) & ~LEAST == TOLD


@pytest.mark.parametrize(
    ("wanted", "obeys"),
    [(1, True), (1.0625 * 1.0009, True), (1.0625 * 1.0011, False), (0.96875 * 0.9991, True), (0.96875 * 0.9989, False)],
)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_marks_of_least_squares(wanted: float, obeys: bool, scale: float) -> None:
    assert bool(marks(2 * scale, 16 * wanted * scale, scale=scale) & LEAST) is obeys
    assert bool(marks(2 * scale, 32 * wanted * scale, 32, scale=scale) & LEAST) is obeys


@pytest.mark.parametrize(
    ("amax", "product", "excused"),
    [(6.6 * 0.75 + 0.01, 12, True), (6.6 * 0.75 - 0.01, 12, False), (6.6 * 1.25 + 0.01, 20, False)],
)
def test_scales_that_do_not_clip(amax: float, product: float, excused: bool) -> None:
    """The rule asks for a smaller scale, which would clip a number beyond 6.6 steps."""
    assert bool(marks(amax, product) & LEAST) is excused


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, True),
        ({"power": 0}, False),
        ({"wrong": True}, False),
        ({"byte": 0x10, "amax": 6 * 2.0**-5}, True),
        ({"byte": 0x0F, "amax": 6 * 2.0**-6}, False),
    ],
)
def test_blocks_that_tell(given: dict[str, Any], told: bool) -> None:
    assert bool(marks(**given) & TOLD) is told


def test_blocks_of_zeros_obey_every_rule_of_amaxes() -> None:
    assert marks(0, 0, 0) == BY_SIX | BY_FOUR


OBEYS = TOLD | BY_SIX | BY_FOUR | LEAST
BREAKS = {SIX: TOLD | BY_FOUR | LEAST, FOUR: TOLD | LEAST | BY_SIX & ~FOUR, LEAST: TOLD | BY_SIX | BY_FOUR}


def fed(blocks: int, *rows: Sequence[int]) -> ScaleRules:
    rules = ScaleRules(blocks)
    for start, row in enumerate(rows):
        rules.feed(start, np.array([row], np.uint8))
    return rules


@pytest.mark.parametrize(("count", "known"), [(23, False), (24, True)])
def test_so_many_blocks_must_tell(count: int, known: bool) -> None:
    rules = fed(1000, [OBEYS] * count + [OBEYS & ~TOLD] * 9)
    assert rules.judged == count
    assert rules.by_amax is known
    assert rules.verdict() == (("maps the largest magnitude to 6", []) if known else ("", []))


@pytest.mark.parametrize(("blocks", "most"), [(100, 2), (4000, 2), (5999, 2), (6000, 3)])
def test_so_few_may_break_a_rule(blocks: int, most: int) -> None:
    """Two, or one in two thousand."""
    broken = int(TOLD | LEAST)
    for count, holds in ((most, True), (most + 1, False)):
        rules = fed(blocks, [OBEYS] * 24, [broken] * 1, [broken] * (count - 1))
        assert (BY_AMAX[0] in rules.broken) is (BY_AMAX[1] in rules.broken) is rules.by_amax is holds
    only_six = fed(blocks, [OBEYS] * 24, [int(BREAKS[SIX])] * (most + 1))
    assert (list(only_six.broken), only_six.by_amax) == (
        [BY_AMAX[1], "has the least squared error for its codes"],
        True,
    )
    assert only_six.verdict() == (BY_AMAX[1], [])


def test_the_rule_that_the_fewest_break() -> None:
    rules = fed(100, [OBEYS] * 24, [OBEYS, int(BREAKS[SIX]), int(BREAKS[LEAST])], [int(TOLD | BY_FOUR)])
    assert rules.verdict() == (BY_AMAX[1], [])
    lone = fed(100, [OBEYS] * 24 + [int(TOLD | LEAST)] * 3 + [int(TOLD)])
    assert lone.verdict() == ("has the least squared error for its codes", [(0, 27)])
    none = fed(100, [OBEYS] * 24 + [int(TOLD)] * 3)
    assert (none.broken, none.verdict()) == ({}, ("", []))
    assert len(RULES) == 3


@pytest.mark.parametrize(("near", "damaged"), [(255, False), (256, True), (257, True)])
def test_blocks_that_16_bits_explain(near: int, damaged: bool) -> None:
    """One that lies beyond a step is damage if 256 others lie as near to the end of theirs and do not."""
    perhaps = int(TOLD | SIX | ScaleMark.LOOSELY_SIX)
    lies_beyond = int(TOLD | ScaleMark.LOOSELY_SIX)
    rules = fed(4000, [perhaps] * (near - 1) + [lies_beyond], [int(TOLD | BY_SIX)] * 30)
    assert rules.near[BY_AMAX[0]] == near
    assert rules.narrowly[BY_AMAX[0]] == {(0, near - 1)}
    assert rules.verdict() == (BY_AMAX[0], [(0, near - 1)] if damaged else [])
    clear = fed(4000, [int(TOLD)] + [perhaps] * 40)
    assert clear.verdict() == (BY_AMAX[0], [(0, 0)])  # no arithmetic explains that one
