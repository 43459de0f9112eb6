"""Where damage begins: every limit from both sides, and every sentence that places it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from halfbyte.formats import E4M3
from halfbyte.verify.against.measure import Measured, measure
from halfbyte.verify.against.places import (
    _bad,
    _nearest,
    _repaired,
    _same_row,
    damage_problems,
    is_off_by_a_factor,
    is_rounded_otherwise,
)
from halfbyte.verify.nearest import VALUES, Encoded, look_up
from halfbyte.verify.problems import WeightError
from halfbyte.verify.values import Matrix
from tests.verify.headers import lines
from tests.verify.matrices import matrix
from tests.verify.weights import Numbers, Weight


def measured(rows: int = 16, blocks: int = 8, wrong: dict[int, int] | None = None, **more: Any) -> Measured:
    error = WeightError("w", "nvfp4", (rows, 16 * blocks), 0.1, 0.1)
    return Measured(error, np.full(rows, 0.1), wrong or {}, blocks, **more)


def one_each(count: int, start: int = 0) -> dict[int, int]:
    return dict.fromkeys(range(start, start + count), 1)


@pytest.mark.parametrize(
    ("rows", "blocks", "wrong", "otherwise"),
    [
        # under 16 rows, blocks are counted: more than 8, and more than a quarter
        (15, 2, one_each(8), False),
        (15, 2, one_each(9), True),
        (4, 40, {0: 20, 1: 20}, False),
        (4, 40, {0: 20, 1: 21}, True),
        (15, 4, {0: 4, 1: 4, 2: 4, 3: 3}, False),
        (15, 4, {0: 4, 1: 4, 2: 4, 3: 4}, True),
        # from 16 on, rows: more than 4 of them in some blocks and more than one in 20
        (16, 8, one_each(4), False),
        (16, 8, one_each(5), True),
        (119, 8, one_each(5), False),
        (119, 8, one_each(6), True),
        (120, 8, one_each(6), False),
        (120, 8, one_each(7), True),
        # rows that are wrong as a whole do not count, up to half of all
        (16, 8, {**one_each(4), **dict.fromkeys(range(4, 8), 5)}, False),
        (16, 8, {**one_each(4), **dict.fromkeys(range(4, 9), 5)}, True),
        (16, 8, {**one_each(4), 4: 4}, True),
        (17, 8, dict.fromkeys(range(8), 8), False),
        (17, 8, dict.fromkeys(range(9), 8), True),
        # more than half of the blocks of a row are the whole row, and more than two
        (16, 2, {**one_each(4), 4: 2}, True),
        (16, 3, {**one_each(4), 4: 2}, True),
        (16, 3, {**one_each(4), 4: 3}, False),
        (16, 9, {**one_each(4), 4: 4}, True),
        (16, 9, {**one_each(4), 4: 5}, False),
    ],
)  # fmt: skip
def test_codes_that_a_writer_must_have_meant(rows: int, blocks: int, wrong: dict[int, int], otherwise: bool) -> None:
    assert is_rounded_otherwise(measured(rows, blocks, wrong)) is otherwise


NONE: Any = None
SURE: dict[str, Any] = {"factor_error": 0.001, "explained": 0.995}


@pytest.mark.parametrize(
    ("given", "off"),
    [
        ({"factors": (1.03, 1.03), **SURE}, True),
        ({"factors": (0.97, 0.97), **SURE}, True),
        ({"factors": (1.0201, 1.03), **SURE}, True),
        ({"factors": (1.0199, 1.03), **SURE}, False),
        ({"factors": (1.03, 0.9801), **SURE}, False),
        ({"factors": (1.03, 1.0199), **SURE}, False),
        ({"factors": (0.97, 1.03), **SURE}, False),
        ({"factors": (1.03, 1.03), "factor_error": 0.0074, "explained": 0.995}, True),
        ({"factors": (1.03, 1.03), "factor_error": 0.0076, "explained": 0.995}, False),
        ({"factors": (1.03, 1.03), "factor_error": 0.001, "explained": 0.99}, False),
        ({"factors": (1.03, 1.03), "factor_error": 0.001, "explained": 0.9901}, True),
        ({"factors": (1.03, 1.03), **SURE, "by_amax": True}, False),
        ({"factors": (1.5, 1.5), "factor_error": math.inf, "explained": 1.0}, False),
        ({"factors": (1.5, 2.0), "factor_error": 0.1, "explained": 1.0}, True),
        ({"factors": (1.5, 2.0), "factor_error": 0.125, "explained": 1.0}, True),
        ({"factors": (1.5, 2.0), "factor_error": 0.126, "explained": 1.0}, False),
    ],
)
def test_a_factor_that_explains_the_error(given: dict[str, Any], off: bool) -> None:
    assert is_off_by_a_factor(measured(**given), NONE, NONE) is off


@pytest.mark.parametrize("found", [False, True])
def test_the_middle_block_is_asked_of_other_roundings(monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
    asked = []

    def is_off(mine: object, theirs: object, least: float) -> bool:
        asked.append(least)
        return found

    monkeypatch.setattr("halfbyte.verify.against.otherwise.is_off_by_a_factor", is_off)
    wrong = one_each(9)
    assert is_off_by_a_factor(measured(wrong=wrong, factor_error=0.25), NONE, NONE) is found
    assert is_off_by_a_factor(measured(wrong=wrong, factor_error=0.001), NONE, NONE) is found
    assert asked == [1.0, 0.02]
    assert not is_off_by_a_factor(measured(wrong=wrong), NONE, NONE)  # no number is known
    assert not is_off_by_a_factor(measured(factor_error=0.25), NONE, NONE)
    assert asked == [1.0, 0.02]


def normal(rows: int = 32, columns: int = 64, seed: int = 3) -> Numbers:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def test_a_tensor_scale_is_said_with_its_factor() -> None:
    weight = Weight(normal(), "nvfp4", "modelopt")
    mine, theirs = weight.pair
    found = measured(32, 4, factors=(1.25, 1.25), **SURE)
    text = "nvfp4: right when multiplied by 1.2500; the tensor scale is off by 20.0%"
    assert lines(damage_problems(found, mine, theirs)) == [f"error [values] w: {text}"]


def test_rows_that_are_much_worse() -> None:
    """Where most rows are exact, all that are not; else those that are far from the source."""
    found = measured(5)
    found.row_errors = np.array([0, 0, 0, 1.1e-6, 0.9e-6])
    assert _bad(found) == [3]
    found.row_errors = np.array([0.1, 0.1, 0.1, 0.1, 0.5, 0.51, np.nan])
    assert _bad(found) == [5, 6]
    found.row_errors = np.array([0.2, 0.2, 0.2, 0.8, 0.81])
    assert _bad(found) == [4]
    found.row_errors = np.array([0, np.nan, 0, np.inf, 0])
    assert _bad(found) == [1, 3]


@pytest.mark.parametrize(("count", "more"), [(50, None), (51, "1 more row as bad"), (53, "3 more rows as bad")])
def test_fifty_rows_are_named(count: int, more: str | None) -> None:
    source = normal(200, 32)
    stored = source.copy()
    stored[:count] = 0
    mine, theirs = matrix("w", stored), matrix("w", source)
    told = lines(damage_problems(measure(mine, theirs), mine, theirs))
    expected = [f"error [row] w: row {row}: relative error 1; it decodes to 0" for row in range(50)]
    assert told == expected + ([] if more is None else [f"error [row] w: {more}"])


@pytest.mark.parametrize(("count", "more"), [(50, None), (51, "1 more row"), (52, "2 more rows")])
def test_fifty_rows_of_codes_are_named(count: int, more: str | None) -> None:
    weight = Weight(normal(1200, 64), "nvfp4", "modelopt")
    weight.codes[:count, 0] ^= 7
    told = [problem.text for problem in weight.problems()]
    assert [text.partition(":")[0] for text in told[:50]] == [f"row {row}, columns 0 to 15" for row in range(50)]
    assert told[50:] == ([] if more is None else [f"{more} with codes that are not the nearest to the source"])


def turned(cosine: float) -> Numbers:
    """Two rows at right angles, and one that has this cosine with the second."""
    return np.array([[1, 0, 0], [0, 1, 0], [0, cosine, math.sqrt(1 - cosine**2)]], np.float32)


@pytest.mark.parametrize("chunk", [3, 6, 1 << 21])
def test_the_row_whose_values_these_are(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("halfbyte.verify.values.CHUNK", chunk)
    theirs = matrix("w", [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 3, 0.1], [0, 0, np.nan]])
    assert _same_row(turned(0.9001)[2], theirs) == 3
    assert _same_row(turned(1)[1] * 7, theirs) == 2
    assert _same_row(-turned(1)[1], theirs) is None
    two = matrix("w", turned(1)[:2])
    assert _same_row(turned(0.9001)[2], two) == 1
    assert _same_row(turned(0.8999)[2], two) is None


def test_rows_that_hold_another() -> None:
    source = normal(20, 32)
    stored = source.copy()
    stored[3], stored[7], stored[9] = 2 * source[7], source[7] * -1, source[9] * 3
    mine, theirs = matrix("w", stored), matrix("w", source)
    first, second, third = lines(damage_problems(measure(mine, theirs), mine, theirs))
    assert first.endswith("; it holds the values of row 7 of the source")
    assert second == "error [row] w: row 7: relative error 2"
    assert third == "error [row] w: row 9: relative error 2"


def block(codes: list[int], byte: int = 0x38, scale: float = 1.0) -> Encoded:
    packed = np.array([[low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]], np.uint8)
    bytes_ = np.full((1, len(codes) // 16), byte, np.uint8)
    return Encoded(packed, bytes_, E4M3.values[bytes_], scale, E4M3)


def one_row(stored: Encoded, source: Numbers) -> tuple[Matrix, Matrix]:
    def read(start: int, stop: int) -> Numbers:
        values = np.repeat(stored.factors(), 16, axis=1)
        return np.asarray(look_up(VALUES, stored.codes) * values, np.float32)[start:stop]

    mine = matrix("w", np.zeros(source.shape), kind="nvfp4", encoded=lambda start, stop: stored)
    return Matrix(mine.name, mine.shape, mine.kind, mine.sources, read, encoded=mine.encoded), matrix("w", source)


def test_codes_are_placed_with_what_is_nearest() -> None:
    """Two blocks of a row: one code in one, three in the other, where one bit of the scale is wrong."""
    source = np.ones((1, 48), np.float32)
    source[0, 21], source[0, 32:] = -2.75, 0.5
    codes = [2] * 48
    codes[35] = 1
    stored = block(codes)
    mine, theirs = one_row(stored, source)
    told = lines(damage_problems(measured(1, 3, {0: 2}), mine, theirs))
    assert told == [
        "error [block] w: row 0, columns 16 to 31: the code in column 21 (1) decodes to 1, the source is -2.75; "
        "-3 is nearest",
        "error [block] w: row 0, columns 32 to 47: the code in column 32 (1) decodes to 1, the source is 0.5; "
        "0.5 is nearest (14 more in this block)",
    ]
    source[0, 35] = 0.25
    (_, second) = lines(damage_problems(measured(1, 3, {0: 2}), mine, matrix("w", source)))
    assert second.endswith("; all are right with scale byte 0x30, not 0x38: one bit differs")
    source[0, 32:] = 1
    source[0, 35], source[0, 40:42] = 0.5, 2
    (_, second) = lines(damage_problems(measured(1, 3, {0: 2}), mine, matrix("w", source)))
    assert second.endswith("the source is 2; 2 is nearest (1 more in this block)")


def test_the_nearest_value() -> None:
    wanted = np.array([[0.7] * 16 + [-5.2] * 16], np.float32)
    assert _nearest(block([0] * 32, 0x30), wanted, 15) == 1.5
    assert _nearest(block([0] * 32, 0x30), wanted, 16) == -6
    assert _nearest(block([0] * 32, 0x38, 2.0), wanted, 31) == -3


def test_a_scale_byte_that_makes_all_codes_right() -> None:
    """Of several, the one with the least error; none that is NaN, zero or negative."""
    exact = np.full((1, 32), 4, np.float32)
    assert _repaired(block([6] * 32, 0x30), exact, 1) == 0x38  # 1 instead of a half
    assert _repaired(block([6] * 32, 0xB8), exact, 0) == 0x38
    for number, byte in ((6, 0x38), (4.6, 0x34), (2.3, 0x2C)):
        assert _repaired(block([7] * 16, 0x3C), np.full((1, 16), number, np.float32), 0) == byte
    assert _repaired(block([7] * 32, 0x38), -exact, 0) is None
    zeros = np.zeros((1, 16), np.float32)
    assert _repaired(block([0] * 16, 0x01), zeros, 0) == 0x03
    assert _repaired(block([0] * 16, 0x7F), zeros, 0) == 0x3F


def test_a_scale_that_breaks_the_rule_is_placed() -> None:
    weight = Weight(normal(), "nvfp4", "modelopt")
    mine, theirs = weight.pair
    byte = int(weight.scales[9, 2])
    found = measured(32, 4, rule="maps X", odd_scales=[(9, 2)])
    text = f"row 9, columns 32 to 47: scale byte {byte:#04x} is not the one that maps X, as all other scales are"
    assert lines(damage_problems(found, mine, theirs)) == [f"error [block] w: {text}"]
