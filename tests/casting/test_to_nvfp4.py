"""The algorithms against their definitions, against each other, and reports against what was decoded."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

import halfbyte as hb
from halfbyte.casting.rows import read
from halfbyte.casting.scales import hold, power
from halfbyte.casting.survey import survey_of
from halfbyte.casting.tables import total_error
from halfbyte.casting.verbatim import midpoint, search, snapping_error
from halfbyte.formats import E4M3
from halfbyte.testing import assert_same_bits
from tests.casting.sources import decoded, random_source, source, sources
from tests.samples import E2M1_VALUES, codes_of

OTHERS = [("requantize", None), ("verbatim", "midpoint"), ("verbatim", "search"), ("hybrid", None)]


def run(q: hb.QuantizedTensor, algorithm: str, m: str | None = None) -> tuple[hb.QuantizedTensor, hb.CastReport]:
    return hb.cast(q, "nvfp4", algorithm=algorithm, m=m)


def squared_error(result: hb.QuantizedTensor, q: hb.QuantizedTensor) -> float:
    """By halfbyte's decoding of both, in float64."""
    got, wanted = np.asarray(hb.dequantize(result), np.float64), np.asarray(hb.dequantize(q), np.float64)
    return float(((got - wanted) ** 2).sum())


@given(sources())
@settings(max_examples=60, deadline=None)
def test_optimal_is_never_worse(q: hb.QuantizedTensor) -> None:
    result, report = run(q, "optimal")
    error = squared_error(result, q)
    for algorithm, m in OTHERS:
        other, other_report = run(q, algorithm, m)
        assert report.squared_error <= other_report.squared_error, algorithm
        smaller = squared_error(other, q) * (1 + 1e-12) < error  # False for Model-Optimizer's NaN of all-zero tensors
        assert not smaller, algorithm
    assert report.bound is not None
    assert report.bound <= report.squared_error


@pytest.mark.parametrize("spread", [18, 19, 21, 25, 32, 60, 200])
@pytest.mark.parametrize("seed", range(3))
def test_optimal_is_never_worse_on_wide_tensors(spread: int, seed: int) -> None:
    q = random_source(np.random.default_rng([spread, seed]), spread, (16, 256), top=100)
    report = run(q, "optimal")[1]
    errors = [run(q, algorithm, m)[1].squared_error for algorithm, m in OTHERS]
    assert report.squared_error <= min(errors)
    assert report.bound is not None
    assert 0.9 * report.squared_error < report.bound <= report.squared_error


@given(sources())
@settings(max_examples=40, deadline=None)
def test_reports_say_what_decoding_shows(q: hb.QuantizedTensor) -> None:
    blocks = decoded(q).reshape(-1, 32)
    exponents = np.asarray(q.scales).astype(int).reshape(-1) - 127
    used = exponents[(blocks != 0).any(axis=1)]
    for algorithm, m in [*OTHERS, ("optimal", None)]:
        result, report = run(q, algorithm, m)
        difference = np.abs(np.asarray(hb.dequantize(result), np.float64) - decoded(q)).reshape(-1, 32)
        if not np.isfinite(difference).all():
            continue  # Model-Optimizer's NaN scales for an all-zero tensor
        assert report.squared_error == pytest.approx(float((difference**2).sum()), rel=1e-12, abs=0)
        assert report.max_error == difference.max()
        assert report.requantized == (difference != 0).any(axis=1).sum()
        assert report.zero == (blocks == 0).all(axis=1).sum()
        assert report.zero + report.verbatim + report.recoded + report.requantized == report.blocks == len(blocks)
        assert report.lossless == (not difference.any())
        assert (report.k_min, report.k_max) == ((used.min(), used.max()) if used.size else (None, None))
        same = (codes_of(np.asarray(q.codes)) == codes_of(np.asarray(result.codes))).all()
        if report.label == "bit-exact":
            assert same
        assert report.mse == report.squared_error / decoded(q).size


def test_snr_is_signal_over_error() -> None:
    q = random_source(np.random.default_rng(0), 25)
    result, report = run(q, "verbatim")
    signal, error = float((decoded(q) ** 2).sum()), squared_error(result, q)
    assert report.snr == pytest.approx(10 * np.log10(signal / error))
    assert dataclasses.replace(report, signal=0.0).snr == -np.inf
    assert dataclasses.replace(report, squared_error=0.0, signal=0.0).snr == np.inf


# --- algorithm 1 ---


def test_requantize_is_quantize_of_bfloat16() -> None:
    q = random_source(np.random.default_rng(3), 9)
    result, report = run(q, "requantize")
    wanted = hb.quantize(hb.dequantize(q, "bfloat16"), "nvfp4", "modelopt")
    assert_same_bits(result.codes, wanted.codes)
    assert_same_bits(result.scales, wanted.scales)
    assert_same_bits(np.asarray(result.global_scale), np.asarray(wanted.global_scale))
    assert report.label == "lossy"


def test_requantize_takes_the_contract() -> None:
    q = random_source(np.random.default_rng(3), 9)
    result, _ = hb.cast(q, "nvfp4", algorithm="requantize", contract="transformer_engine")
    wanted = hb.quantize(hb.dequantize(q, "bfloat16"), "nvfp4", "transformer_engine")
    assert_same_bits(result.codes, wanted.codes)
    assert_same_bits(np.asarray(result.stored_scale), np.asarray(wanted.stored_scale))


# --- algorithm 2 ---


def closed_form(q: hb.QuantizedTensor, m: int) -> float:
    """The sum of the issue, block by block, written out."""
    total = 0.0
    codes, scales = codes_of(np.asarray(q.codes)).reshape(-1, 32), np.asarray(q.scales).reshape(-1)
    for block, byte in zip(codes, scales, strict=True):
        k = int(byte) - 127
        squares = sum(E2M1_VALUES[code & 7] ** 2 for code in block)
        total += squares * (2.0**k - 2.0 ** (m + min(max(k - m, -9), 8))) ** 2
    return total


@pytest.mark.parametrize("spread", [5, 18, 25, 40])
def test_snapping_error_has_the_closed_form(spread: int) -> None:
    q = random_source(np.random.default_rng(spread), spread)
    survey = survey_of([read(q, "q")])
    for m in range(-spread - 12, 14):
        assert snapping_error(survey, m) == pytest.approx(closed_form(q, m), rel=1e-12)
    best = min(closed_form(q, m) for m in range(-100, 60))
    assert closed_form(q, search(survey)) == pytest.approx(best, rel=1e-12, abs=1e-300)
    result, report = run(q, "verbatim", "search")
    assert report.m == search(survey)
    assert report.squared_error == pytest.approx(best, rel=1e-12, abs=1e-300)
    assert_same_bits(result.codes, q.codes)
    assert run(q, "verbatim")[1] == report, "search is the default"


def test_midpoint_centres_the_window() -> None:
    for spread in range(18):
        q = random_source(np.random.default_rng(spread), spread)
        assert midpoint(read(q, "q").exponents) in range(-8, 10 - spread)
        assert run(q, "verbatim", "midpoint")[1].label == "bit-exact"
    assert midpoint(read(source(np.array([[0, 0]]), np.zeros((1, 64))), "q").exponents) == 0


# --- algorithm 3 ---


def nearest_even(value: float, grid: list[float]) -> int:
    """Index of the nearest grid value, the even index of two."""
    distance = [abs(value - entry) for entry in grid]
    best = [i for i, d in enumerate(distance) if d == min(distance)]
    return best[0] if len(best) == 1 else next(i for i in best if i % 2 == 0)


def test_hybrid_half_by_half() -> None:
    q = random_source(np.random.default_rng(8), 24)
    result, report = run(q, "hybrid")
    assert report.m == -8
    e4m3 = [float(value) for value in E4M3.magnitudes]
    codes, new = (codes_of(np.asarray(t.codes)).reshape(-1, 16) for t in (q, result))
    scales, exponents = np.asarray(result.scales).reshape(-1), np.repeat(np.asarray(q.scales).reshape(-1), 2)
    for half, got, byte, e8m0 in zip(codes, new, scales, exponents, strict=True):
        n = int(e8m0) - 127 - (-8)
        if n >= -9:
            assert float(E4M3.values[byte]) == 2.0**n
            assert_same_bits(got, half)
            continue
        amax = max(E2M1_VALUES[code & 7] for code in half) * 2.0**n
        if amax == 0:
            continue
        scale = e4m3[nearest_even(min(max(amax / 6, 2.0**-9), 448), e4m3)]
        assert float(E4M3.values[byte]) == scale
        wanted = [(code & 8) | nearest_even(E2M1_VALUES[code & 7] * 2.0**n / scale, list(E2M1_VALUES)) for code in half]
        assert got.tolist() == wanted


# --- ours ---


def best_half_error(values: list[float], g: float) -> float:
    """Every scale and every code, in plain Python."""
    found = []
    for s in E4M3.magnitudes[1:]:
        offered = [float(np.float32(c) * (s * np.float32(g))) for c in E2M1_VALUES]  # rounded as q·(S·g) is
        found.append(sum(min((v - value) ** 2 for value in offered) for v in values))
    return min(found)


@pytest.mark.parametrize("g", [2.0**-8, 2.0**-12, 1 / 384, 1 / 448, 0.00303])
def test_every_half_gets_its_best_scale_and_codes(g: float) -> None:
    """Under a given global scale: against all 126 scales and all codes."""
    rng = np.random.default_rng(4)
    q = random_source(rng, 24, (2, 96))
    survey = survey_of([read(q, "q")])
    scale = hold(g, hb.contracts.torchao())
    halves = np.abs(decoded(q)).reshape(-1, 16)
    expected = sum(best_half_error(half.tolist(), float(scale.multiplier)) for half in halves)
    assert total_error(survey, scale) == pytest.approx(expected, rel=1e-12)


def test_no_power_of_two_is_better_than_the_chosen_one() -> None:
    for seed in range(4):
        q = random_source(np.random.default_rng(seed), 20, (4, 64))
        survey, contract = survey_of([read(q, "q")]), hb.contracts.torchao()
        errors = [total_error(survey, power(m, contract)) for m in range(-40, 10)]
        assert run(q, "optimal")[1].squared_error <= min(errors) * (1 + 1e-12)


def test_no_global_scale_of_a_fine_grid_beats_the_bound() -> None:
    for seed in range(3):
        q = random_source(np.random.default_rng([9, seed]), 21, (4, 64))
        survey, contract = survey_of([read(q, "q")]), hb.contracts.torchao()
        report = run(q, "optimal")[1]
        assert report.bound is not None
        rng = np.random.default_rng(seed)
        multipliers = [
            *(2.0 ** rng.uniform(-14, -2, 300)),
            *(2.0**-8 / s * 2.0**n for s in range(1, 16) for n in range(6)),
        ]
        assert min(total_error(survey, hold(g, contract)) for g in multipliers) >= report.bound


def test_a_wide_range_takes_a_global_scale_that_is_no_power_of_two() -> None:
    """One outlier above many small blocks: finer small scales are worth more than verbatim blocks."""
    rng = np.random.default_rng(6)
    exponents = rng.integers(-21, -19, (32, 8))
    codes = rng.integers(0, 16, (32, 256))
    exponents[0, 0], codes[0, :32] = 0, 0
    codes[0, 0] = 6
    q = source(exponents, codes)
    report = run(q, "optimal")[1]
    assert report.m is None
    assert report.squared_error < 0.5 * run(q, "hybrid")[1].squared_error


def test_threads_and_torch_change_nothing() -> None:
    import torch

    q = random_source(np.random.default_rng(12), 25, (8, 256))
    result, report = run(q, "optimal")
    tensors = hb.QuantizedTensor(
        q.format, q.shape, torch.from_numpy(q.codes), torch.from_numpy(q.scales), None, None, q.contract
    )
    same, same_report = hb.cast(tensors, "nvfp4", threads=2)
    assert isinstance(same.codes, torch.Tensor)
    assert isinstance(same.global_scale, torch.Tensor)
    assert_same_bits(same.codes, result.codes)
    assert_same_bits(same.scales, result.scales)
    assert_same_bits(hb.dequantize(same), hb.dequantize(result))
    assert same_report == report
