"""Mistakes that are told by what undoes them, up to the limits of what counts as undone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from halfbyte.codec.bits import F32
from halfbyte.verify.against.diagnose import CANDIDATES, _distance, _factor, diagnose
from tests.samples import f32
from tests.verify.matrices import matrix

NAME = "l.0.mlp.up_proj"


def normal(seed: int, rows: int = 4, columns: int = 32) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def told(values: Any, wanted: Any, **others: Any) -> str:
    theirs = {name.replace("_0", ".0").replace("_1", ".1").replace("__", "."): x for name, x in others.items()}
    return diagnose(matrix(NAME, values), matrix(NAME, wanted), {name: matrix(name, x) for name, x in theirs.items()})


def test_numbers_that_are_none() -> None:
    values = normal(0)
    assert told(np.where(values == values[3, 31], np.nan, values), normal(1)) == "it decodes to NaN"
    assert told(np.zeros((2, 4)), np.ones((2, 4))) == ""
    assert told(np.full((2, 4), np.inf), np.ones((2, 4))) == ""
    assert told(np.ones((2, 4)), np.zeros((2, 4))) == ""


def test_known_mistakes() -> None:
    wanted, other = normal(0), normal(1)
    swapped = wanted.reshape(4, -1, 2)[:, :, ::-1].reshape(4, 32)
    assert told(other, wanted) == ""
    assert told(swapped, wanted) == "the two nibbles of each byte are swapped"
    scale = "it is right when divided by {}: a tensor scale is wrong (reciprocal?)"
    assert told(wanted * 4, wanted) == scale.format(4)
    assert told(wanted / 3, wanted) == scale.format("0.333333")
    assert told(swapped * 8, wanted) == scale.format(8) + ", and the two nibbles of each byte are swapped"
    assert told(-wanted, wanted) == ""


def test_values_that_belong_elsewhere() -> None:
    wanted, other = normal(0), normal(1)
    gate = diagnose(matrix(NAME, other), matrix(NAME, wanted), {"l.0.mlp.gate_proj": matrix("g", other)})
    assert gate == "it holds the values of gate_proj: the two are swapped"
    narrow = {"l.0.mlp.gate_proj": matrix("g", other[:3]), "l.1.mlp.up_proj": matrix("u", other[:3])}
    assert diagnose(matrix(NAME, other), matrix(NAME, wanted), narrow) == ""
    elsewhere = {name: matrix(name, other) for name in ("l.0.mlp.down_proj", NAME, "l.7.mlp.up_proj")}
    assert diagnose(matrix(NAME, other), matrix(NAME, wanted), elsewhere) == "it holds the values of l.7.mlp.up_proj"


@pytest.mark.parametrize(("place", "found"), [(CANDIDATES - 1, True), (CANDIDATES, False)])
def test_so_many_layers_are_looked_at(place: int, found: bool) -> None:
    assert CANDIDATES == 512
    other, wrong = normal(1, 1), matrix("w", normal(2, 1))
    theirs = {f"l.{number}.mlp.up_proj": wrong for number in range(1, place + 1)}
    theirs["l.999.mlp.up_proj"] = matrix("o", other)
    told = diagnose(matrix(NAME, other), matrix(NAME, normal(0, 1)), theirs)
    assert told == ("it holds the values of l.999.mlp.up_proj" if found else "")


def test_the_first_rows_are_looked_at() -> None:
    """64, and 8 of them in other layers."""
    wanted, other = normal(0, 80), normal(1, 80)
    for rows, said in ((64, ""), (63, "it holds the values of l.1.mlp.up_proj")):
        values = np.concatenate([wanted[:rows], 1e4 * other[rows:]])
        theirs = {"l.1.mlp.up_proj": matrix("u", values)}
        assert diagnose(matrix(NAME, values), matrix(NAME, wanted), theirs) == said
    for rows, said in ((8, "it holds the values of l.1.mlp.up_proj"), (7, "")):
        there = np.concatenate([other[:rows], 9 * wanted[rows:]])
        theirs = {"l.1.mlp.up_proj": matrix("u", there)}
        assert diagnose(matrix(NAME, other), matrix(NAME, wanted), theirs) == said


ONES = np.ones((1, 16), np.float32)
ALL_BUT_ONE = np.where(np.arange(16) == 15, 0, ONES).astype(np.float32)
"""Away from ONES by a quarter, and by nothing less under any factor."""


def test_a_quarter_is_not_near() -> None:
    assert _distance(ALL_BUT_ONE, ONES) == 0.25
    theirs = {"l.7.mlp.up_proj": matrix("u", ALL_BUT_ONE)}
    said = diagnose(matrix(NAME, ALL_BUT_ONE), matrix(NAME, ONES), theirs)
    assert said == "it holds the values of l.7.mlp.up_proj"
    assert diagnose(matrix(NAME, ALL_BUT_ONE), matrix(NAME, ONES), {"l.7.mlp.up_proj": matrix("u", ONES)}) == ""
    partner = {"l.0.mlp.gate_proj": matrix("g", ONES)}
    assert diagnose(matrix(NAME, ALL_BUT_ONE), matrix(NAME, -ONES), partner) == ""
    assert told(ALL_BUT_ONE * 8, ONES) == ""


def test_half_of_an_error_is_not_most_of_it() -> None:
    """A quarter too large, and off by something else beside: then the factor is no reason."""
    wanted, beside = np.zeros((1, 64), np.float32), np.zeros((1, 64), np.float32)
    wanted[0, :32], beside[0, 32:] = 1, 1
    scale = "it is right when divided by 1.282: a tensor scale is wrong (reciprocal?)"
    assert told(wanted * 1.25 + 0.2 * beside, wanted) == scale
    assert told(wanted * 1.25 + 0.21 * beside, wanted) == ""


def test_a_quarter_that_is_left_is_too_much() -> None:
    wanted = np.where(np.arange(16) % 2, -1, ONES)
    values = (ALL_BUT_ONE * wanted).reshape(1, -1, 2)[:, :, ::-1].reshape(1, 16)
    assert told(values, wanted) == told(4 * values, wanted) == ""


def test_distance_and_factor() -> None:
    assert _distance(f32(3, 4), f32(0, 4)) == 0.75
    assert _distance(f32(1), f32(0)) == np.inf
    assert _factor(f32(2, 4), f32(1, 2)) == (0.5, 0.0)
    assert _factor(f32(2, -4), f32(-1, 2)) == (0.0, 1.0)
    assert _factor(f32(1, 1), f32(1, 3)) == pytest.approx((2.0, 0.2**0.5))
    assert _factor(f32(0, 0), f32(1, 3)) == _factor(f32(1, np.inf), f32(1, 3)) == (0.0, np.inf)
