"""The cast in chunks: exponents, survey, choice and rows give what `hb.cast` gives for the whole tensor."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.casting import optimal, scales, tables
from halfbyte.casting.bound import Bounded
from halfbyte.casting.optimal import choose, write
from halfbyte.casting.rows import read
from halfbyte.casting.scales import nvfp4_rule
from halfbyte.casting.survey import Halves, Survey, rank, survey_of
from halfbyte.casting.tables import total_error
from halfbyte.casting.window import join
from halfbyte.codec.bits import F32
from halfbyte.contracts import get_contract
from halfbyte.testing import assert_same_bits
from tests.casting.sources import random_source, source, sources
from tests.casting.test_survey import cut

NVFP4 = hb.get_format("nvfp4")


def assert_chunks_agree(q: hb.QuantizedTensor, places: list[int], name: str) -> hb.CastReport:
    """Cast a tensor in chunks and as a whole; the same bytes, the same scale, the same count of changed blocks."""
    contract = get_contract(name, NVFP4)
    whole, report = hb.cast(q, "nvfp4", contract=contract)
    parts = cut(read(q, "q"), places)
    choice = choose(join(part.exponents for part in parts), lambda: survey_of(parts[::-1]), contract, contract)
    written = [write(part, choice) for part in parts]
    assert_same_bits(np.concatenate([part.codes for part in written]), whole.codes)
    assert_same_bits(np.concatenate([part.scales for part in written]), whole.scales)
    assert_same_bits(np.asarray(choice.scale.stored), np.asarray(whole.stored_scale))
    assert sum(part.changed for part in written) == report.requantized
    assert choice.bound <= report.squared_error
    assert report.lossless or not choice.keeps
    return report


@given(sources(), st.lists(st.integers(0, 10)), st.sampled_from(["modelopt", "compressed_tensors", "torchao"]))
@settings(max_examples=40, deadline=None)
def test_any_tensor_in_any_chunks(q: hb.QuantizedTensor, places: list[int], contract: str) -> None:
    assert_chunks_agree(q, places, contract)


@pytest.mark.parametrize("spread", range(0, 41, 2))
def test_wide_and_narrow(spread: int) -> None:
    q = random_source(np.random.default_rng(spread), spread, (12, 96))
    report = assert_chunks_agree(q, [1, 4, 5, 11], "modelopt")
    assert report.lossless == (spread <= 17)


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are looked at a few at a time, odd widths and short last blocks among them."""
    for width in (96, 41):
        q = random_source(np.random.default_rng(1), 30, (40, width))
        whole, report = hb.cast(q, "nvfp4")
        with monkeypatch.context() as patch:
            patch.setattr("halfbyte.casting.rows.SLICE", 200)
            sliced, same = hb.cast(q, "nvfp4")
        assert_same_bits(sliced.codes, whole.codes)
        assert_same_bits(sliced.scales, whole.scales)
        assert same == report


def outlier() -> hb.QuantizedTensor:
    """One value far above many small blocks: the scale of algorithm 1 is better than any power of two."""
    rng = np.random.default_rng(6)
    exponents, codes = rng.integers(-21, -19, (32, 8)), rng.integers(0, 16, (32, 256))
    exponents[0, 0], codes[0, :32] = 0, 0
    codes[0, 0] = 6
    return source(exponents, codes)


@pytest.mark.parametrize("contract", ["modelopt", "compressed_tensors", "transformer_engine"])
def test_algorithm_1s_scale_is_a_candidate(contract: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the other candidates, and without the search for better ones, the result is as good as algorithm 1."""
    q = outlier()
    monkeypatch.setattr(optimal, "sampled_candidates", lambda survey, contract: [])
    monkeypatch.setattr(optimal, "_polished", lambda survey, contract, scale, error: (scale, error))
    monkeypatch.setattr(optimal, "prove", lambda survey, scale, error, contract: Bounded(scale, error, 0.0))
    result, report = hb.cast(q, "nvfp4", contract=contract)
    first, wanted = hb.cast(q, "nvfp4", "requantize", contract=contract)
    assert report.m is None
    assert report.squared_error <= wanted.squared_error
    assert report.squared_error < hb.cast(q, "nvfp4", "hybrid")[1].squared_error
    assert_same_bits(np.asarray(result.stored_scale), np.asarray(first.stored_scale))


@pytest.mark.parametrize(("spread", "multiplier"), [(17, 2.0**-8), (18, 3 * 2.0**-9), (19, None)])
def test_the_lossless_scale_as_the_contract_holds_it(spread: int, multiplier: float | None) -> None:
    codes = np.resize(np.array([3, 5, 7, 11, 13, 15]), 64)[None]
    survey = survey_of([read(source(np.array([[0, -spread]]), codes), "q")])
    contract = get_contract("torchao", NVFP4)
    wanted = None if multiplier is None else scales.hold(multiplier, contract)
    assert optimal.choose_lossless(survey, contract) == wanted


def test_a_scale_is_lossless_only_as_the_contract_decodes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An invented contract rounds the multiplier that it stores to a power of two, so 3·2^m does not come back."""

    def snapped(stored: F32, top: np.float32) -> F32:
        return np.exp2(np.round(np.log2(stored))).astype(np.float32)

    def decode(q: F32, scale: F32, stored: F32, top: np.float32) -> F32:
        return q * (scale * snapped(stored, top))

    plain = get_contract("torchao", NVFP4)
    rule = dataclasses.replace(nvfp4_rule(plain), multiplier=snapped, decode=decode)
    invented = dataclasses.replace(plain, rules={"nvfp4": rule})
    monkeypatch.setattr(scales, "DECODES", [*scales.DECODES, (rule.stored_as, snapped, decode)])
    q = source(np.array([[0, -18]]), np.resize(np.array([3, 5, 7, 11, 13, 15]), 64)[None])
    assert optimal.choose_lossless(survey_of([read(q, "q")]), invented) is None
    report = hb.cast(q, "nvfp4", contract=invented)[1]
    assert not report.lossless
    assert report.squared_error <= hb.cast(q, "nvfp4", "hybrid", contract=invented)[1].squared_error


@pytest.mark.parametrize("top", [-80, -61, -40])
@pytest.mark.parametrize("spread", [19, 26])
def test_small_exponents_change_nothing_but_the_power_of_two(top: int, spread: int) -> None:
    """Far from float32's ends a power of two only moves exponents: the same bytes, and a bound that is as tight."""
    plain, small = (random_source(np.random.default_rng(spread), spread, (12, 96), top=t) for t in (0, top))
    wanted, report = hb.cast(plain, "nvfp4")
    result, same = hb.cast(small, "nvfp4")
    assert not report.lossless
    assert_same_bits(result.codes, wanted.codes)
    assert_same_bits(result.scales, wanted.scales)
    assert_same_bits(np.asarray(result.global_scale), np.asarray(np.ldexp(np.asarray(wanted.global_scale), top)))
    assert same.squared_error == np.ldexp(report.squared_error, 2 * top)
    assert same.bound == pytest.approx(np.ldexp(report.bound or 0.0, 2 * top), rel=1e-9)
    assert same.bound is not None
    assert 0.99 * same.squared_error <= same.bound <= same.squared_error


# --- every candidate counts ---


def test_every_candidate_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of algorithm 1's scale and the sampled ones is best is taken, the last one too."""
    q = outlier()
    survey, contract = survey_of([read(q, "q")]), get_contract("modelopt", NVFP4)
    monkeypatch.setattr(optimal, "_polished", lambda survey, contract, scale, error: (scale, error))
    monkeypatch.setattr(optimal, "prove", lambda survey, scale, error, contract: Bounded(scale, error, 0.0))
    good = optimal.requantized_scale(survey, contract, contract)
    assert good is not None
    bad = [scales.hold(float(good.multiplier) * factor, contract) for factor in (40.0, 50.0, 60.0)]
    monkeypatch.setattr(optimal, "requantized_scale", lambda *_: None)
    for place in range(4):
        offered = [*bad[:place], good, *bad[place:]]
        monkeypatch.setattr(optimal, "sampled_candidates", lambda survey, contract, offered=offered: offered)
        assert optimal.choose_lossy(survey, contract, contract).scale == good


def test_the_sampled_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both elements with all upper scales, a grid of 56 sixteenths of an octave, two rounds of nine around the best.

    The four best of them are measured on all halves.
    """
    survey, contract = survey_of([read(outlier(), "q")]), get_contract("modelopt", NVFP4)
    rounds: list[list[float]] = []
    real = optimal._rated

    def rated(multipliers: Any, sample: Any, contract: Any) -> Any:
        rounds.append(list(multipliers))
        return real(rounds[-1], sample, contract)

    monkeypatch.setattr(optimal, "_rated", rated)
    found = optimal.sampled_candidates(survey, contract)
    largest = 4.0  # code 6 under exponent 0
    first = [largest / (element * scale) for element in (6, 4) for scale in UPPER]
    grid = [largest / 2688 * 2.0 ** (i / 16) for i in range(-16, 40)]
    assert rounds[0] == pytest.approx(first + grid, rel=1e-12)
    best = float(real(rounds[0], optimal._sample(survey), contract)[0][1].multiplier)
    assert rounds[1] == pytest.approx([best * 2.0 ** (i / 128) for i in range(-4, 5)], rel=1e-12)
    sample = optimal._sample(survey)
    tried = sorted((entry for values in rounds[:2] for entry in real(values, sample, contract)), key=optimal._rating)
    better = float(tried[0][1].multiplier)
    assert rounds[2] == pytest.approx([better * 2.0 ** (i / 512) for i in range(-4, 5)], rel=1e-12)
    tried = sorted(tried + real(rounds[2], sample, contract), key=optimal._rating)
    assert len(rounds) == 3
    assert len(found) == optimal.FINALISTS == 4
    assert found == [scale for _, scale in tried[:4]]


UPPER = [2.0**e * (1 + i / 8) for e in (7, 8) for i in range(8) if 2.0**e * (1 + i / 8) <= 448]
"""The E4M3 numbers from 128 to 448."""


def test_another_scale_has_to_be_better_by_more_than_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Better by one part in 10^12 is not enough, whoever proposes the scale; the least bit more is."""
    survey, contract = survey_of([read(outlier(), "q")]), get_contract("modelopt", NVFP4)
    known, other = scales.hold(0.01, contract), scales.hold(0.011, contract)
    monkeypatch.setattr(optimal, "requantized_scale", lambda *_: None)
    monkeypatch.setattr(optimal, "sampled_candidates", lambda *_: [other])
    monkeypatch.setattr(optimal, "prove", lambda survey, scale, error, contract: Bounded(scale, error, 0.0))
    for error, taken in ((3.0 * (1 - 1e-12), False), (np.nextafter(3.0 * (1 - 1e-12), 0), True)):
        with monkeypatch.context() as patch:
            patch.setattr(optimal, "total_error", lambda *_, error=error: error)
            polished, _ = optimal._polished(survey, contract, known, 3.0)
            assert (polished != known) == taken
            patch.setattr(optimal, "_polished", lambda survey, contract, scale, error: (scale, error))
            patch.setattr(optimal, "best_power", lambda *_: (known, 3.0))
            assert (optimal.choose_lossy(survey, contract, contract).scale == other) == taken
        errors = {m: 3.0 if m > -9 else error for m in range(-150, 10)}
        with monkeypatch.context() as patch:
            patch.setattr(optimal, "total_error", lambda survey, scale, kept, errors=errors: errors[scale.exponent])
            assert optimal.best_power(survey, contract)[0].exponent == (-9 if taken else -8)


def test_halves_that_a_power_of_two_keeps_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighteen exponents, from m - 9 to m + 8. Under any other scale every half is."""
    survey = survey_of([read(random_source(np.random.default_rng(0), 26, (20, 256), top=3), "q")])
    contract, looked_at = get_contract("torchao", NVFP4), list[int]()
    real = tables.make_table

    def make_table(k: int, *rest: Any) -> tables.Table:
        looked_at.append(k)
        return real(k, *rest)

    monkeypatch.setattr(tables, "make_table", make_table)
    for scale, kept in ((scales.power(-6, contract), range(-15, 3)), (scales.hold(3 / 64, contract), range(0))):
        looked_at.clear()
        total_error(survey, scale, optimal._kept(scale))
        assert looked_at == [k for k in range(-23, 4) if k not in kept]


def test_the_neighbours_of_a_scale_that_is_no_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten neighbours in float32 are measured; each of them wins if it is the best."""
    survey, contract = survey_of([read(outlier(), "q")]), get_contract("modelopt", NVFP4)
    start = scales.hold(np.float32(0.00123), contract)
    bits = int(start.multiplier.view(np.uint32))
    for wanted in (-64, -16, -4, -2, -1, 1, 2, 4, 16, 64):
        target = np.uint32(bits + wanted).view(np.float32)
        errors = {float(target): 0.5}
        monkeypatch.setattr(optimal, "total_error", lambda survey, scale, e=errors: e.get(float(scale.multiplier), 2.0))
        scale, error = optimal._polished(survey, contract, start, 1.0)
        assert (float(scale.multiplier), error) == (float(target), 0.5)
    monkeypatch.setattr(optimal, "total_error", lambda survey, scale: 0.5)
    first, _ = optimal._polished(survey, contract, start, 1.0)
    assert int(first.multiplier.view(np.uint32)) == bits - 64, "of equals the first"


@pytest.mark.parametrize("multiplier", [0.0, np.inf, np.nan])
def test_a_quantizers_scale_that_is_no_scale(monkeypatch: pytest.MonkeyPatch, multiplier: float) -> None:
    survey, contract = survey_of([read(outlier(), "q")]), get_contract("modelopt", NVFP4)
    word = np.float32(multiplier)
    monkeypatch.setattr(optimal, "scale_of", lambda *_: scales.GlobalScale(word, word, contract))
    assert optimal.requantized_scale(survey, contract, contract) is None


@pytest.mark.parametrize("magnitude", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("spread", [19, 23, 30])
def test_the_best_power_of_all(magnitude: int, spread: int) -> None:
    """The largest block may hold small numbers alone: then a smaller 2^m, with other codes for it, is better."""
    rng = np.random.default_rng([magnitude, spread])
    codes = np.concatenate([np.full((1, 32), magnitude), rng.integers(0, 16, (1, 64))], axis=1)
    survey = survey_of([read(source(np.array([[0, -spread, -spread + 2]]), codes), "q")])
    contract = get_contract("torchao", NVFP4)
    errors = {m: total_error(survey, scales.power(m, contract)) for m in range(0, -45, -1)}
    scale, error = optimal.best_power(survey, contract)
    best = min(errors.values())
    assert error == pytest.approx(best, rel=1e-11)
    assert scale.exponent == next(m for m, cost in errors.items() if cost <= best * (1 + 1e-11) and m <= -8)
    if magnitude < 3 and spread < 30:
        assert scale.exponent in range(-14, -8)


@pytest.mark.parametrize("top", [20, 0, -40])
@pytest.mark.parametrize("crowd", [1e9, 3e12, 1e14])
def test_the_best_power_for_a_crowd_of_small_halves(crowd: float, top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small halves are worth clipping the largest value for, as far as that costs less than they do.

    No power is tried under which clipping alone costs more.
    """
    one, small = (rank(np.bincount(codes, minlength=8)[None].astype(np.uint8)) for codes in ([7, *15 * [0]], 16 * [3]))
    halves = {
        top - 21: Halves(small.astype(np.uint32), np.array([crowd])),
        top: Halves(one.astype(np.uint32), np.ones(1)),
    }
    survey, contract = Survey(halves, {}), get_contract("torchao", NVFP4)
    errors = {m: total_error(survey, scales.power(m, contract)) for m in range(top - 8, top - 45, -1)}
    tried: list[int | None] = []

    def looked_at(survey: Survey, scale: scales.GlobalScale, kept: tuple[int, int] | None) -> float:
        tried.append(scale.exponent)
        return total_error(survey, scale, kept)

    monkeypatch.setattr(optimal, "total_error", looked_at)
    scale, error = optimal.best_power(survey, contract)
    assert error == pytest.approx(min(errors.values()), rel=1e-11)
    assert scale.exponent == min(errors, key=lambda m: (errors[m], -m))
    lost = {m: max(6 * 2.0**top - 2688 * 2.0**m, 0) ** 2 for m in errors}
    assert tried == [m for m in errors if all(lost[m] <= errors[larger] for larger in errors if larger > m)]


def test_no_power_of_two_that_a_contract_can_store() -> None:
    survey = survey_of([read(source(np.array([[-127, -120]]), np.full((1, 64), 7)), "q")])
    with pytest.raises(hb.UnsupportedError, match="stores the encode factor, which float32 cannot hold"):
        optimal.best_power(survey, get_contract("compressed_tensors", NVFP4))


def test_a_sample_is_spread_over_the_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal shares of the exponents, at the middles of equal parts; an exponent with few halves is taken whole."""
    many = Halves(np.arange(16, dtype=np.uint32) * 3, np.ones(16))
    uneven = Halves(np.arange(5, dtype=np.uint32), np.array([1.0, 1, 28, 1, 1]))
    few = Halves(np.arange(4, dtype=np.uint32), np.array([9.0, 8, 7, 6]))
    monkeypatch.setattr(optimal, "SAMPLE", 14)
    found = optimal._sample(Survey({0: many, -1: uneven, -2: few}, {}))
    assert found[-2] is few
    assert (found[0].ranks.tolist(), found[0].number.tolist()) == ([6, 18, 30, 42], [4.0] * 4)
    assert (found[-1].ranks.tolist(), found[-1].number.tolist()) == ([2], [32.0])
