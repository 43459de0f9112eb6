"""The bound of a cast: what an interval of global scales costs at least, against scales tried one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.casting import bound
from halfbyte.casting.bound import Bounds, interval_errors, prove
from halfbyte.casting.rows import F64, MAGNITUDES, read
from halfbyte.casting.scales import GlobalScale, hold
from halfbyte.casting.survey import survey_of
from halfbyte.casting.tables import largest_value, make_table, total_error
from halfbyte.contracts import get_contract
from halfbyte.formats import E4M3
from tests.casting.sources import random_source, source

CONTRACT = get_contract("modelopt", hb.get_format("nvfp4"))
SCALES = E4M3.magnitudes[1:].astype(np.float64)


def tried(k: int, low: float, high: float, points: int = 400) -> tuple[F64, F64]:
    """(8, 126): the least squared error of each magnitude under each scale, over many global scales; and the values."""
    values = MAGNITUDES * 2.0**k
    best = np.full((8, len(SCALES)), np.inf)
    for g in np.geomspace(low, high, points):
        offered = SCALES[:, None] * MAGNITUDES * g
        best = np.minimum(best, np.abs(offered[None] - values[:, None, None]).min(axis=2))
    return best**2, values


@pytest.mark.parametrize("k", [-20, -12, -3, 0, 4])
@pytest.mark.parametrize(("low", "high"), [(1.0, 1.01), (0.011, 0.0111), (1.0, 1.3)])
def test_an_interval_costs_what_its_best_scale_costs(k: int, low: float, high: float) -> None:
    """Never more than any scale within it, and hardly less than the best of many."""
    found = interval_errors(k, np.array([[low, high]]))[0]
    wanted, values = tried(k, low, high)
    least, least_tried = found.min(axis=1), wanted.min(axis=1)
    step = np.log(high / low) / 399 * values  # how far the nearest of the tried scales may be from the best
    assert (least <= least_tried * (1 + 1e-6) + 1e-30).all()
    assert (np.sqrt(least_tried) <= np.sqrt(least) + step + 1e-6 * values).all()


def test_scales_that_cannot_be_best_are_left_out_and_no_others() -> None:
    """For each half of a tensor, the least over the scales that are kept is the least over all of them."""
    survey = survey_of([read(random_source(np.random.default_rng(3), 24, (8, 96)), "q")])
    for low in (2.0**-9.3, 2.0**-8.7, 0.0033):
        interval = np.array([low, low * 1.0001])
        for k, halves in survey.halves.items():
            counts = halves.counts.astype(np.float64)
            every, _ = tried(k, float(interval[0]), float(interval[1]), 20)
            kept = interval_errors(k, interval[None])[0]
            least, wanted = (counts @ kept).min(axis=1), (counts @ every).min(axis=1)
            assert (least <= wanted * (1 + 1e-6) + 1e-30).all()
            assert (np.sqrt(wanted) <= np.sqrt(least) + 1e-3 * 2.0**k * 6 * 4).all()


def test_bounds_of_an_interval_add_up_over_halves() -> None:
    survey = survey_of([read(random_source(np.random.default_rng(4), 24, (8, 96)), "q")])
    bounds = Bounds(survey)
    assert bounds.size == sum(len(halves.ranks) for halves in survey.halves.values())
    interval = np.array([2.0**-8.4, 2.0**-8.39])
    total = 0.0
    for k, halves in survey.halves.items():
        errors = halves.counts.astype(np.float64) @ interval_errors(k, interval[None])[0]
        total += float(errors.min(axis=1) @ halves.number)
    found, looked_at = bounds.from_all(interval, np.inf)
    assert found == pytest.approx(total, rel=1e-12)
    assert looked_at == bounds.size
    assert bounds.from_front(interval[None], np.inf)[0] == pytest.approx(total, rel=1e-12), "few halves: all in front"
    assert bounds.from_all(interval, total / 1e3)[1] < bounds.size, "it stops where the bound is enough"


class NeverEnough:
    """Bounds that never reach the error, so that every interval stays open; they note what they are asked."""

    size = 1

    def __init__(self, survey: object) -> None:
        self.asked: list[F64] = []
        NeverEnough.last = self

    def from_front(self, intervals: F64, error: float) -> F64:
        self.asked.append(intervals)
        return np.zeros(len(intervals))

    def from_all(self, interval: F64, error: float) -> tuple[float, int]:
        """Only the first interval of a level stays open."""
        open_ = np.array_equal(interval, self.asked[-1][0])
        return (0.0 if open_ else error), 1

    last: NeverEnough


def test_the_whole_range_is_cut_and_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the least scale that clips less than the error to V/784, in 2048 pieces; what stays open in 8, ten times."""
    q = random_source(np.random.default_rng(4), 24, (8, 96))
    survey, contract = survey_of([read(q, "q")]), get_contract("modelopt", hb.get_format("nvfp4"))
    monkeypatch.setattr(bound, "Bounds", NeverEnough)
    scale = hold(0.01, contract)
    largest, error = largest_value(survey), 0.25
    found = prove(survey, scale, error, contract)
    assert (found.scale, found.error, found.bound) == (scale, error, 0.0), "no interval was proved"
    levels = NeverEnough.last.asked
    assert [len(intervals) for intervals in levels] == [2048, *9 * [8]]
    edges = np.geomspace((largest - 0.5) / (6 * 448), largest / 784, 2049)
    for intervals, (low, high) in zip(levels, [(edges[0], edges[-1]), *(part[0] for part in levels[:-1])], strict=True):
        assert (intervals[0, 0], intervals[-1, 1]) == pytest.approx((low, high), rel=1e-12)
        assert (intervals[1:, 0] == intervals[:-1, 1]).all()
        assert intervals[:, 1] / intervals[:, 0] == pytest.approx(intervals[0, 1] / intervals[0, 0], rel=1e-9)


def test_intervals_that_a_better_scale_settles_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    survey = survey_of([read(random_source(np.random.default_rng(4), 24, (8, 96)), "q")])
    contract = get_contract("modelopt", hb.get_format("nvfp4"))
    scale = hold(0.01, contract)
    monkeypatch.setattr(bound, "Bounds", NeverEnough)
    monkeypatch.setattr(NeverEnough, "from_all", lambda self, interval, error: (0.1 * bound.CLOSE, 1))
    tried: list[float] = []

    def better(multiplier: float, *_: object) -> tuple[GlobalScale, float]:
        tried.append(multiplier)
        return scale, 0.1

    monkeypatch.setattr(bound, "_better", better)
    found = prove(survey, scale, 0.25, contract)
    assert [len(intervals) for intervals in NeverEnough.last.asked] == [2048, 0]
    low, high = NeverEnough.last.asked[0][0]
    assert tried == [pytest.approx(np.sqrt(low * high), rel=1e-12)], "the middle of the interval of the least bound"
    assert found.bound == pytest.approx(0.1 * bound.CLOSE)


def test_intervals_whose_front_is_just_enough_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other interval: the rest is looked at in full, each under its own bound."""
    survey = survey_of([read(random_source(np.random.default_rng(4), 24, (8, 96)), "q")])
    contract = get_contract("modelopt", hb.get_format("nvfp4"))
    asked: list[F64] = []

    def front(self: object, intervals: F64, error: float) -> F64:
        return np.where(np.arange(len(intervals)) % 2, 0.0, error * bound.CLOSE)

    def every(self: object, interval: F64, error: float) -> tuple[float, int]:
        asked.append(interval)
        return error * bound.CLOSE, 1

    monkeypatch.setattr(bound.Bounds, "from_front", front)
    monkeypatch.setattr(bound.Bounds, "from_all", every)
    monkeypatch.setattr(bound, "_better", None)  # no interval is left whose middle is worth a try
    found = prove(survey, hold(0.01, contract), 0.25, contract)
    assert found.bound == 0.25 * bound.CLOSE
    edges = np.geomspace((largest_value(survey) - 0.5) / (6 * 448), largest_value(survey) / 784, 2049)
    np.testing.assert_array_equal(np.array(asked), np.stack([edges[1:-1:2], edges[2::2]], axis=1))


def test_how_many_halves_were_looked_at() -> None:
    """All of them, or those of the largest exponent if these are enough."""
    survey = survey_of([read(random_source(np.random.default_rng(4), 24, (8, 96)), "q")])
    bounds, interval = bound.Bounds(survey), np.array([0.01, 0.0101])
    assert bounds.from_all(interval, np.inf)[1] == bounds.size == 48
    assert bounds.from_all(interval, 0.0)[1] == len(survey.halves[max(survey.halves)].ranks) < 48


def test_the_front_is_added_up_until_it_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the largest exponent on, and for those intervals alone for which it is not enough yet."""
    survey = survey_of([read(random_source(np.random.default_rng(4), 24, (8, 96)), "q")])
    bounds, intervals = Bounds(survey), np.array([[0.01, 0.0101], [0.012, 0.0121]])
    exponents = sorted(survey.halves, reverse=True)
    each = [
        [
            float((halves.counts.astype(np.float64) @ interval_errors(k, one[None])[0]).min(axis=1) @ halves.number)
            for k, halves in sorted(survey.halves.items(), reverse=True)
        ]
        for one in intervals
    ]
    asked: list[tuple[int, int]] = []

    def errors(k: int, intervals: F64) -> F64:
        asked.append((k, len(intervals)))
        return interval_errors(k, intervals)

    monkeypatch.setattr(bound, "interval_errors", errors)
    before = np.cumsum([[0, *row] for row in each], axis=1)
    for error in (0.5, 0.741, 0.75, 0.8198, 1.0):
        asked.clear()
        found = bounds.from_front(intervals, error / bound.CLOSE)
        open_ = (before[:, :-1] < error).sum(axis=0).tolist()
        assert asked == [(k, number) for k, number in zip(exponents, open_, strict=True) if number]
        ends = [next((total for total in row if total >= error), row[-1]) for row in before]
        assert found.tolist() == pytest.approx(ends, rel=1e-12)


def test_many_intervals_at_once() -> None:
    """Each has the bound that it has alone."""
    survey = survey_of([read(random_source(np.random.default_rng(4), 24, (2, 64)), "q")])
    edges, bounds = np.geomspace(0.002, 0.02, 301), Bounds(survey)
    intervals = np.stack([edges[:-1], edges[1:]], axis=1)
    alone = np.concatenate([bounds.from_front(one[None], np.inf) for one in intervals])
    assert (alone > 0).all()
    np.testing.assert_allclose(bounds.from_front(intervals, np.inf), alone, rtol=1e-12)


@pytest.mark.parametrize(("low", "known"), [(2.0**-116, True), (np.nextafter(2.0**-116, 0), False)])
def test_no_bound_where_products_may_be_subnormal(monkeypatch: pytest.MonkeyPatch, low: float, known: bool) -> None:
    survey = survey_of([read(random_source(np.random.default_rng(4), 24, (2, 64)), "q")])
    monkeypatch.setattr(bound, "largest_value", lambda survey: 2 * 2688 * low)
    error = (2688 * low) ** 2
    monkeypatch.setattr(Bounds, "from_front", lambda self, intervals, error: np.full(len(intervals), error))
    assert prove(survey, hold(0.01, CONTRACT), error, CONTRACT).bound == (error * bound.CLOSE if known else 0)


@pytest.mark.parametrize(
    ("size", "each", "looks"), [(1 << 24, 1 << 24, 16), (1 << 18, 1 << 19, 8), (5, 1 << 19, 8), (5, (1 << 22) - 1, 2)]
)
def test_sixteen_full_looks_or_four_million_halves(
    monkeypatch: pytest.MonkeyPatch, size: int, each: int, looks: int
) -> None:
    """That much work goes into a bound, whichever is more, into the intervals of the least front first.

    The least front of the others is then the bound.
    """
    survey = survey_of([read(random_source(np.random.default_rng(4), 24, (8, 96)), "q")])
    fronts, asked = np.random.default_rng(0).permutation(2048) / 2048 * 0.9, []

    def every(self: Bounds, interval: F64, error: float) -> tuple[float, int]:
        asked.append(interval[0])
        return error, each

    monkeypatch.setattr(Bounds, "size", size)
    monkeypatch.setattr(Bounds, "from_front", lambda self, intervals, error: fronts)
    monkeypatch.setattr(Bounds, "from_all", every)
    found = prove(survey, hold(0.01, CONTRACT), 1.0, CONTRACT)
    edges = np.geomspace((largest_value(survey) - 1) / (6 * 448), largest_value(survey) / 784, 2049)
    assert asked == edges[np.argsort(fronts)[:looks]].tolist()
    assert found.bound == np.sort(fronts)[looks]


@pytest.mark.parametrize(("open_", "levels", "least"), [(512, [2048, 4096], 1.0), (513, [2048], 0.25)])
def test_more_intervals_than_4096_are_given_up(
    monkeypatch: pytest.MonkeyPatch, open_: int, levels: list[int], least: float
) -> None:
    """The least of their bounds stands. 512 are cut in 8 each."""
    survey = survey_of([read(random_source(np.random.default_rng(4), 24, (8, 96)), "q")])
    asked: list[int] = []
    bounds = iter([*np.linspace(0.25, 0.5, open_), *np.ones(8192)])

    def front(self: Bounds, intervals: F64, error: float) -> F64:
        asked.append(len(intervals))
        return np.zeros(len(intervals))

    monkeypatch.setattr(Bounds, "from_front", front)
    monkeypatch.setattr(Bounds, "from_all", lambda self, interval, error: (float(next(bounds)), 1))
    monkeypatch.setattr(bound, "_better", lambda multiplier, survey, contract, scale, error: (scale, error))
    found = prove(survey, hold(0.01, CONTRACT), 1.0, CONTRACT)
    assert asked == levels
    assert found.bound == least * (bound.CLOSE if least == 1 else 1)


def test_another_scale_is_taken_only_if_it_is_clearly_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a scale with doubled block scales decodes alike: the one that is known stays."""
    codes = np.zeros((1, 64), np.int64)
    codes[0, :16], codes[0, 32] = np.arange(16), 7
    survey = survey_of([read(source(np.array([[0, -30]]), codes), "q")])
    contract = get_contract("modelopt", hb.get_format("nvfp4"))
    good, half, bad = (hold(value, contract) for value in (0.013, 0.0065, 0.21))
    error, worse = (total_error(survey, scale) for scale in (good, bad))
    assert 0 < error == total_error(survey, half) < worse
    assert bound._better(0.0065, survey, contract, good, error) == (good, error)
    assert bound._better(0.21, survey, contract, good, error) == (good, error)
    assert bound._better(0.013, survey, contract, bad, worse) == (good, error)
    enough = worse * (1 - 1e-12)
    for found, taken in ((enough, False), (np.nextafter(enough, 0), True)):
        with monkeypatch.context() as patch:
            patch.setattr(bound, "total_error", lambda *_, found=found: found)
            assert bound._better(0.013, survey, contract, bad, worse) == ((good, found) if taken else (bad, worse))
    barely = error * (1 + 1e-13)
    assert bound._better(0.013, survey, contract, half, barely) == (half, barely)
    other = get_contract("compressed_tensors", hb.get_format("nvfp4"))
    assert bound._better(2.0**-140, survey, other, good, error) == (good, error), "1/g is no float32"


def test_faint_halves_cost_their_values_if_the_least_value_is_far_above_them() -> None:
    """Under g = 1.01 the least value above zero is 1.01·2^-10, which is twice 6·2^k up to k = -14."""
    survey: Any = SimpleNamespace(halves={}, faint=range(-18, -10), lost=lambda k: 10.0 ** (k + 18))
    assert Bounds(survey)._from_faint(1.01) == 11111.0
    assert Bounds(survey)._from_faint(2.02) == 111111.0
    assert Bounds(survey)._from_faint(2.0**-40) == 0
    assert Bounds(survey)._from_faint(0.75 * (1 + 2.0**-21)) == 11111.0
    assert Bounds(survey)._from_faint(0.75 * (1 + 2.0**-23)) == 1111.0, "decoding rounds"
    assert Bounds(survey).from_all(np.array([1.01, 2.02]), 1.0) == (11111.0, 0), "the lower end of an interval counts"


@pytest.mark.parametrize("g", [0.97, 0.013, 2.0**-8 * 1.01, 1 / 390])
def test_no_more_scales_are_looked_at_than_are_worth_a_try(g: float) -> None:
    """For an interval of one scale they are those of its table; a wider one has those of both its ends."""
    scale = hold(g, get_contract("torchao", hb.get_format("nvfp4")))
    decoded, point = scale.decoded(), float(scale.multiplier)
    for k in range(-22, 14):
        table = make_table(k, scale, decoded)
        found = interval_errors(k, np.array([[point, point]]))
        assert found.shape == (1, 8, table.errors.shape[1]), k
        assert (found[0] <= table.errors).all(), "what decoding rounds to is within"
    for k, low, high in ((0, 0.98, 2.03), (3, 0.98, 1.01), (2, 0.03, 0.4)):
        near, far = (
            make_table(k, one, one.decoded()) for one in (hold(low, scale.contract), hold(high, scale.contract))
        )
        wanted = near.first + near.errors.shape[1] - far.first
        assert interval_errors(k, np.array([[low, high]])).shape[2] == wanted, (k, low, high)
