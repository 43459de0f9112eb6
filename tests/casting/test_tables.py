"""The table of an exponent against plain loops: every magnitude under every scale that is worth a try."""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.casting import tables
from halfbyte.casting.rows import read, values_of
from halfbyte.casting.scales import hold, power
from halfbyte.casting.survey import Halves, Survey, multisets, rank, survey_of
from halfbyte.casting.tables import (
    ABSURD,
    best_scales,
    half_errors,
    largest_value,
    least_error,
    make_table,
    total_error,
)
from halfbyte.codec.bits import U8
from tests.casting.sources import random_source, source

TORCHAO = hb.contracts.torchao()


def halves(*counts: list[int], number: list[int] | None = None) -> Halves:
    ranks = rank(np.array(counts, np.uint8))
    return Halves(ranks.astype(np.uint32), np.array(number or [1] * len(counts), np.float64))


@pytest.mark.parametrize(
    ("k", "multiplier", "first", "last"),
    [
        # r = 2^k / g: bytes whose E4M3 value lies from r/16 up to the first from 12/7·r on, 15 at least
        (0, 1.0, 24, 62), (0, 2.0**-8, 88, 126), (0, 2.0**-9, 1, 126), (0, 448.0, 1, 15), (-8, 1.0, 1, 15),
        (-6, 1.0, 1, 15), (-5, 1.0, 1, 22), (-2, 1.0, 8, 46), (8, 1.0, 88, 126), (8, 256 / 448, 94, 126),
        (8, 256 / 449, 1, 126), (0, 1.5, 19, 58), (0, 12 / 7, 18, 56), (3, 1.0, 48, 86), (40, 1.0, 1, 126),
        (-60, 1.0, 1, 15),
    ],
)  # fmt: skip
def test_scales_that_are_worth_a_try(k: int, multiplier: float, first: int, last: int) -> None:
    scale = hold(multiplier, TORCHAO)
    table = make_table(k, scale, scale.decoded())
    assert (table.first, table.first + table.errors.shape[1] - 1) == (first, last)


@pytest.mark.parametrize(
    ("k", "multiplier"), [(0, 2.0**-8), (-17, 2.0**-8), (-19, 1 / 300), (2, 0.01), (5, 2.0**-3), (125, 2.0**117)]
)
def test_each_entry_is_the_nearest_value(k: int, multiplier: float) -> None:
    """The smaller code of equals; 0 stays 0."""
    scale = hold(multiplier, TORCHAO)
    decoded = scale.decoded()
    table = make_table(k, scale, decoded)
    for column in range(table.errors.shape[1]):
        offered = decoded[table.first - 1 + column].tolist()
        for index, value in enumerate(values_of(k).astype(np.float64).tolist()):
            distances = [abs(entry - value) for entry in offered]
            assert table.errors[index, column] == min(distances) * min(distances)
            assert table.codes[column, index] == distances.index(min(distances))
    assert not table.errors[0].any()
    assert table.codes.dtype == np.uint8


def test_inf_is_equal_to_inf_and_far_from_all_else() -> None:
    """6·2^126 is Inf in float32; under the scale 2^118 so is 6·2^8·2^118."""
    scale = power(118, TORCHAO)
    table = make_table(126, scale, scale.decoded())
    keeps = 120 - table.first  # the byte of 2^8
    assert table.errors[:, keeps].tolist() == [0] * 8
    assert table.codes[keeps].tolist() == [0, 1, 2, 3, 4, 5, 6, 6], "the smaller of the two that are Inf"
    assert table.errors[7, 0] == ABSURD
    assert (table.errors <= ABSURD).all()


def test_the_best_scale_of_a_half(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = hold(1 / 300, TORCHAO)
    table = make_table(-9, scale, scale.decoded())
    rng = np.random.default_rng(0)
    counts: U8 = multisets()[rng.integers(0, len(multisets()), 50)]
    errors = [
        [sum(float(c) * table.errors[i, column] for i, c in enumerate(row)) for column in range(table.errors.shape[1])]
        for row in counts.tolist()
    ]
    wanted = [row.index(min(row)) for row in errors]
    found = half_errors(counts.astype(np.float64), table)
    assert np.allclose(found, errors, rtol=1e-14, atol=0)
    for chunk in (1 << 11, 50, 49, 7, 1):
        monkeypatch.setattr(tables, "CHUNK", chunk)
        assert best_scales(counts, table).tolist() == found.argmin(axis=1).tolist() == wanted
        some = Halves(rank(counts).astype(np.uint32), np.arange(1.0, 51.0))
        least = sum(number * min(row) for number, row in zip(some.number.tolist(), errors, strict=True))
        assert least_error(some, table.errors) == pytest.approx(least, rel=1e-13)


def test_the_smaller_scale_of_equals() -> None:
    """Only ones: scales 1, 2 and 0.5 all give them exactly."""
    scale = power(0, TORCHAO)
    table = make_table(0, scale, scale.decoded())
    (column,) = best_scales(np.array([[0, 0, 16, 0, 0, 0, 0, 0]], np.uint8), table)
    assert table.first + column == table.first + int(np.flatnonzero(table.errors[2] == 0)[0])


def test_errors_of_a_whole_survey() -> None:
    q = random_source(np.random.default_rng(2), 40, (4, 64))
    survey, scale = survey_of([read(q, "q")]), power(-8, TORCHAO)
    decoded = scale.decoded()
    each = {k: least_error(part, make_table(k, scale, decoded).errors) for k, part in survey.halves.items()}
    lost = sum(survey.lost(k) for k in survey.faint)
    assert lost > 0
    assert total_error(survey, scale) == pytest.approx(sum(each.values()) + lost, rel=1e-14)
    inside = [k for k in each if -17 <= k <= 0]
    assert total_error(survey, scale, (-17, 0)) == pytest.approx(
        lost + sum(error for k, error in each.items() if k not in inside), rel=1e-14
    )
    for kept in ((-17, -1), (-16, 0)):  # both ends belong to what is kept
        left = [k for k in each if not kept[0] <= k <= kept[1]]
        assert total_error(survey, scale, kept) == pytest.approx(lost + sum(each[k] for k in left), rel=1e-14)


def test_the_largest_value() -> None:
    codes = np.concatenate([np.full(32, 1), np.full(32, 7), np.full(32, 12)])[None]
    survey = survey_of([read(source(np.array([[3, -1, 0]]), codes), "q")])
    assert largest_value(survey) == 4.0, "0.5·8, 6/2 and 2"
    survey = survey_of([read(source(np.array([[126]]), np.full((1, 32), 6)), "q")])
    assert largest_value(survey) == np.inf
    one = Survey({5: halves([15, 1, 0, 0, 0, 0, 0, 0])}, {})
    assert largest_value(one) == 16.0
