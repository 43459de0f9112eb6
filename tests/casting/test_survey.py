"""The survey: every half counted, whatever the chunks and their order, in a bounded number of histograms."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.casting.lossless import intervals
from halfbyte.casting.rows import Rows, read
from halfbyte.casting.scales import hold, power
from halfbyte.casting.survey import DEPTH, MULTISETS, Survey, multisets, rank, survey_of
from halfbyte.casting.tables import total_error
from halfbyte.testing import assert_same_bits
from tests.casting.sources import decoded, random_source, source, sources
from tests.samples import E2M1_VALUES, codes_of


def cut(rows: Rows, places: list[int]) -> list[Rows]:
    """Rows cut at some places."""
    edges = [0, *sorted(place % (len(rows.scales) + 1) for place in places), len(rows.scales)]
    pairs = [(a, b) for a, b in itertools.pairwise(edges) if a < b]
    return [Rows(rows.codes[a:b], rows.scales[a:b], rows.width, rows.block) for a, b in pairs]


def assert_same_survey(a: Survey, b: Survey) -> None:
    assert list(a.halves) == list(b.halves)
    assert list(a.faint) == list(b.faint)
    for k in a.halves:
        assert_same_bits(a.halves[k].ranks, b.halves[k].ranks)
        assert_same_bits(a.halves[k].number, b.halves[k].number)
    for k in a.faint:
        assert_same_bits(a.faint[k], b.faint[k])


def test_every_multiset_has_a_number_of_its_own() -> None:
    table = multisets()
    assert table.shape == (MULTISETS, 8) == (245157, 8)
    assert (table.sum(axis=1) == 16).all()
    assert_same_bits(rank(table), np.arange(MULTISETS))
    assert not table.flags.writeable, "kept for all surveys"


@given(sources(widest=60))
@settings(max_examples=60, deadline=None)
def test_every_half_is_counted(q: hb.QuantizedTensor) -> None:
    survey = survey_of([read(q, "q")])
    wanted: dict[int, Counter[tuple[int, ...]]] = {}
    exponents = np.repeat(np.asarray(q.scales).reshape(-1), 2).astype(int) - 127
    for half, k in zip(codes_of(np.asarray(q.codes)).reshape(-1, 16), exponents.tolist(), strict=True):
        counts = tuple(int((half % 8 == index).sum()) for index in range(8))
        if counts[0] < 16:
            wanted.setdefault(k, Counter())[counts] += 1
    top = max(wanted, default=0)
    assert set(survey.halves) == {k for k in wanted if k > top - DEPTH}
    assert set(survey.faint) == {k for k in wanted if k <= top - DEPTH}
    for k, halves in survey.halves.items():
        assert {tuple(c): n for c, n in zip(halves.counts.tolist(), halves.number.tolist(), strict=True)} == wanted[k]
    for k in wanted:
        squares = sum(n * c[i] * E2M1_VALUES[i] ** 2 for c, n in wanted[k].items() for i in range(8))
        assert survey.energy[k] == squares
        assert survey.lost(k) == squares * 4.0**k


@given(sources(widest=60), st.lists(st.integers(0, 10)), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_chunks_and_their_order_change_nothing(q: hb.QuantizedTensor, places: list[int], random: object) -> None:
    rows = read(q, "q")
    parts = cut(rows, places)
    random.shuffle(parts)  # type: ignore[attr-defined]
    assert_same_survey(survey_of(parts), survey_of([rows]))


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q = random_source(np.random.default_rng(1), 60, (40, 96))
    whole = survey_of([read(q, "q")])
    monkeypatch.setattr("halfbyte.casting.rows.SLICE", 200)
    assert len(list(read(q, "q").slices())) == 20
    assert_same_survey(survey_of([read(q, "q")]), whole)


def test_no_more_histograms_than_the_depth() -> None:
    """Exponents that come in ascending order push each other out: their sums remain."""
    parts = [read(source(np.array([[k]]), np.full((1, 32), 7)), "q") for k in range(-120, 120)]
    for stop in range(1, 240, 40):
        assert len(survey_of(parts[:stop]).halves) <= DEPTH
    survey = survey_of(parts)
    assert set(survey.halves) == set(range(120 - DEPTH, 120))
    assert all(survey.energy[k] == 32 * 36 for k in range(-120, 120))
    assert (survey.exponents and (survey.exponents.low, survey.exponents.high)) == (-120, 119)


def test_no_lossless_scale_reaches_into_the_faint() -> None:
    for odd in (1, 3):
        low, high = intervals(odd)
        some = low[1:] <= high[1:]
        reach = int(high[1:][some].max() - low[1:][some].min())
        assert reach < DEPTH


@pytest.mark.parametrize("g", [2.0**-8, 2.0**-12, 1 / 384, 1 / 2688])
def test_faint_halves_become_zero(g: float) -> None:
    """Under every global scale that is worth a try: the sum of their squares is their least error."""
    rng = np.random.default_rng(2)
    q = source(np.array([[0, -DEPTH, -DEPTH - 9]]), np.concatenate([np.full(32, 1), rng.integers(0, 16, 64)])[None])
    survey = survey_of([read(q, "q")])
    assert set(survey.faint) == {-DEPTH, -DEPTH - 9}
    scale = hold(g, hb.contracts.torchao())
    offered = scale.decoded()
    faint = np.abs(decoded(q))[0, 32:].reshape(-1, 16)
    least = sum(float(((half[:, None, None] - offered) ** 2).min(axis=2).sum(axis=0).min()) for half in faint)
    assert sum(survey.lost(k) for k in survey.faint) == pytest.approx(least, rel=1e-12)


def test_the_error_is_that_of_every_half_alone() -> None:
    """Distinct halves times how often they occur: the same as one after the other."""
    q = random_source(np.random.default_rng(3), 22, (6, 64))
    repeated = source(
        np.tile(np.asarray(q.scales).astype(int) - 127, (5, 1)), np.tile(codes_of(np.asarray(q.codes)), (5, 1))
    )
    once, five = survey_of([read(q, "q")]), survey_of([read(repeated, "q")])
    assert [len(a.number) for a in once.halves.values()] == [len(b.number) for b in five.halves.values()]
    scale = power(-8, hb.contracts.torchao())
    assert total_error(five, scale) == pytest.approx(5 * total_error(once, scale), rel=1e-12)
