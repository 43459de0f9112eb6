"""Losslessness: kept where it should be, found wherever any choice has it, and the bits are those of the source."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings

import halfbyte as hb
from halfbyte.casting.lossless import intervals
from halfbyte.casting.rows import Rows
from halfbyte.casting.window import power_bytes, power_scales
from halfbyte.formats import E4M3
from halfbyte.testing import assert_same_bits
from tests.casting.sources import Matrix, decoded, random_source, source, sources
from tests.samples import E2M1_VALUES


def same_values(result: hb.QuantizedTensor, original: hb.QuantizedTensor) -> bool:
    return bool(np.array_equal(decoded(result), decoded(original)))


@pytest.mark.parametrize("algorithm", ["optimal", "hybrid", "verbatim"])
@pytest.mark.parametrize("spread", [0, 1, 16, 17])
@pytest.mark.parametrize("top", [-100, -20, 0, 60, 127])
def test_up_to_17_every_nibble_and_every_bit_is_kept(algorithm: str, spread: int, top: int) -> None:
    q = random_source(np.random.default_rng(spread + top + 200), spread, top=top)
    result, report = hb.cast(q, "nvfp4", algorithm=algorithm)
    assert_same_bits(result.codes, q.codes)
    assert_same_bits(hb.dequantize(result), hb.dequantize(q))
    assert (report.label, report.lossless, report.squared_error, report.max_error) == ("bit-exact", True, 0, 0)
    assert (report.k_max, report.spread, report.snr) == (top, spread, np.inf)
    if algorithm != "verbatim":
        assert report.m == top - 8
        assert result.global_scale == np.float32(2.0 ** (top - 8))


def test_every_exponent_byte_but_nan_survives_alone() -> None:
    for byte in range(255):
        q = source(np.full((1, 1), byte - 127), np.arange(32)[None] % 16)
        result, report = hb.cast(q, "nvfp4")
        assert_same_bits(hb.dequantize(result), hb.dequantize(q))
        assert report.label == "bit-exact"


def test_18_is_one_too_many() -> None:
    q = random_source(np.random.default_rng(1), 18)
    result, report = hb.cast(q, "nvfp4")
    assert report.label == "lossy"
    assert not same_values(result, q)


def test_block_scales_are_the_powers_of_two_that_e4m3_holds() -> None:
    steps = np.arange(18, dtype=np.uint8)
    assert_same_bits(E4M3.values[power_bytes(steps)], (2.0 ** np.arange(-9, 9)).astype(np.float32))
    scales = np.arange(255, dtype=np.uint8)[None]
    for m in range(-150, 140):
        wanted = (2.0 ** np.clip(np.arange(255) - 127 - m, -9, 8)).astype(np.float32)
        assert_same_bits(E4M3.values[power_scales(scales, m, 2, 510)], np.repeat(wanted, 2)[None])
        assert_same_bits(E4M3.values[power_scales(scales, m, 1, 255)], wanted[None])


@pytest.mark.parametrize(
    ("magnitudes", "reach"),
    [([7], 19), ([6], 20), ([5], 18), ([3, 5, 7], 17), ([1, 2, 4, 6], 17), (list(range(8)), 17)],
)
def test_few_magnitudes_reach_further_down(magnitudes: list[int], reach: int) -> None:
    """A block of only ±6 is exact two octaves below the window, of only ±4 three: with other codes."""
    codes = np.resize(np.array(magnitudes + [index + 8 for index in magnitudes]), 32)
    full = np.arange(32) % 16
    for spread in (reach, reach + 1):
        q = source(np.array([[0, -spread]]), np.concatenate([full, codes])[None])
        result, report = hb.cast(q, "nvfp4")
        assert report.lossless == same_values(result, q) == (spread == reach)
        if report.lossless and reach > 17:
            assert (report.label, report.verbatim, report.recoded) == ("value-exact", 1, 1)
            assert_same_bits(hb.dequantize(result), hb.dequantize(q))


def test_multiples_of_three_reach_one_octave_further_under_three_times_a_power() -> None:
    """Values 1.5, 3 and 6 only: 3·2^m keeps a spread that no 2^m does."""
    codes = np.resize(np.array([3, 5, 7, 11, 13, 15]), 64)[None]
    q = source(np.array([[0, -18]]), codes)
    result, report = hb.cast(q, "nvfp4")
    assert same_values(result, q)
    assert report.label == "value-exact"
    assert report.m is None
    assert float(np.asarray(result.global_scale)) in [3 * 2.0**m for m in range(-30, 10)]
    assert hb.cast(q, "nvfp4", algorithm="hybrid")[1].label == "lossy"


def brute_force_is_lossless(exponents: list[int], halves: list[list[int]]) -> bool:
    """Whether any real global scale serves: tried are all that put the first half's largest value on some q'·S."""
    scales, grid = E4M3.magnitudes[1:].astype(np.float64), np.array(E2M1_VALUES[1:])
    values = [np.array([E2M1_VALUES[i] for i in half]) * 2.0**k for k, half in zip(exponents, halves, strict=True)]
    for q, s in itertools.product(grid, scales):
        g = values[0].max() / (q * s)
        served = []
        for half in values:
            codes = half[:, None] / (scales * g)  # what each value would be under each scale
            on_grid = (np.abs(codes[..., None] / grid - 1) < 1e-9).any(axis=-1)
            served.append(on_grid.all(axis=0).any())
        if all(served):
            return True
    return False


def test_lossless_exactly_when_some_real_global_scale_is() -> None:
    """Against all 882 global scales that could serve the first half, whatever their odd part."""
    rng = np.random.default_rng(5)
    seen = {True: 0, False: 0}
    for _ in range(40):
        sets = [sorted(rng.choice(np.arange(1, 8), rng.integers(1, 4), replace=False).tolist()) for _ in range(2)]
        spread = int(rng.integers(17, 22))
        expected = brute_force_is_lossless([0, -spread], sets)
        codes = np.concatenate([np.resize(np.array(magnitudes), 32) for magnitudes in sets])[None]
        report = hb.cast(source(np.array([[0, -spread]]), codes), "nvfp4")[1]
        assert report.lossless == expected, (sets, spread)
        seen[expected] += 1
    assert min(seen.values()) >= 5


def test_intervals_contain_the_window_and_the_worked_examples() -> None:
    low, high = intervals(1)
    assert (low[127], high[127]) == (-8, 9)
    assert (low[64], high[64]) == (-8, 11), "only 6: m may be two more"
    assert (low[1:] <= -8).all()
    assert (high[1:] >= 9).all()
    low, high = intervals(3)
    assert (low[64 + 16 + 4], high[64 + 16 + 4]) == (-9, 9), "1.5, 3 and 6"
    assert low[127] > high[127]


def test_zero_blocks_do_not_count() -> None:
    """A block of ±0 may have any scale byte; -0.0 keeps its sign."""
    codes = np.concatenate([np.arange(32) % 16, np.full(32, 8), np.zeros(32)])[None].astype(np.uint8)
    q = source(np.array([[-60, 100, -127]]), codes)
    result, report = hb.cast(q, "nvfp4")
    assert (report.k_min, report.k_max, report.m, report.zero, report.verbatim) == (-60, -60, -68, 2, 1)
    assert report.label == "bit-exact"
    assert_same_bits(hb.dequantize(result), hb.dequantize(q))


@pytest.mark.parametrize("spread", [3, 19])
@pytest.mark.parametrize("contract", ["modelopt", "torchao"])
def test_bit_exact_means_the_sign_of_zeros_too(contract: str, spread: int) -> None:
    """Model-Optimizer reads code 8 as +0.0; the source is OCP's, where it is -0.0. Without code 8 all bits are kept."""
    sixes = np.resize(np.array([7, 15]), 32)
    for zero in (8, 0):
        codes = np.concatenate([np.append(np.arange(1, 32) % 8, zero), sixes])[None]
        q = source(np.array([[0, -spread]]), codes)
        result, report = hb.cast(q, "nvfp4", contract=contract)
        before, after = np.asarray(hb.dequantize(q)), np.asarray(hb.dequantize(result))
        same_bits = np.array_equal(before.view(np.uint32), after.view(np.uint32))
        assert same_bits == (contract == "torchao" or zero == 0)
        assert report.lossless
        assert (report.label == "bit-exact") == (same_bits and spread == 3)


def test_byte_0_with_nibbles_is_a_value() -> None:
    """Model-Optimizer takes byte 0 for an empty block; here it is 2^-127 times what the nibbles say."""
    q = source(np.full((1, 2), -127), np.arange(64)[None] % 16)
    result, report = hb.cast(q, "nvfp4")
    assert (report.k_max, report.zero, report.label) == (-127, 0, "bit-exact")
    assert_same_bits(hb.dequantize(result), hb.dequantize(q))
    assert np.asarray(hb.dequantize(result)).any()


def test_all_zero_tensor() -> None:
    result, report = hb.cast(source(np.zeros((2, 1)), np.zeros((2, 32))), "nvfp4")
    assert (report.k_max, report.spread, report.zero, report.label) == (None, None, 2, "bit-exact")
    assert not np.asarray(hb.dequantize(result)).any()


@pytest.mark.parametrize("width", [1, 15, 16, 17, 31, 33, 40, 48, 63, 65])
@pytest.mark.parametrize("spread", [3, 25])
def test_ragged_rows(width: int, spread: int) -> None:
    rng = np.random.default_rng(width)
    q = random_source(rng, spread, (3, width))
    result, report = hb.cast(q, "nvfp4")
    assert result.shape == q.shape
    error = float(((decoded(result) - decoded(q)) ** 2).sum())
    assert report.squared_error == pytest.approx(error, rel=1e-6)
    if spread <= 17:
        assert_same_bits(hb.dequantize(result), hb.dequantize(q))


@pytest.mark.parametrize("contract", ["modelopt", "torchao", "compressed_tensors", "transformer_engine", "vllm"])
def test_every_way_to_store_the_global_scale_decodes_alike(contract: str) -> None:
    q = random_source(np.random.default_rng(2), 17, top=-3)
    result, report = hb.cast(q, "nvfp4", contract=contract)
    assert report.lossless
    values: Matrix = np.asarray(hb.dequantize(result))
    assert np.array_equal(values, hb.dequantize(q))
    assert result.contract.name == contract


def test_blocks_of_16_become_one_block_each() -> None:
    q = hb.quantize(np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32), "mxfp4", block=16)
    result, report = hb.cast(q, "nvfp4")
    assert (report.blocks, np.asarray(result.scales).shape) == (16, (4, 4))
    assert_same_bits(hb.dequantize(result), hb.dequantize(q))


def test_halves_are_counted_only_where_blocks_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spread of 17 is kept without a look at the halves; a spread of 18 asks for them."""

    def refuse(self: Rows) -> None:
        raise AssertionError("halves were counted")

    monkeypatch.setattr(Rows, "counts", property(refuse))
    assert hb.cast(random_source(np.random.default_rng(0), 17), "nvfp4")[1].label == "bit-exact"
    with pytest.raises(AssertionError, match="halves were counted"):
        hb.cast(random_source(np.random.default_rng(0), 18), "nvfp4")


@given(sources(widest=17))
@settings(max_examples=40, deadline=None)
def test_any_tensor_of_spread_17_is_bit_exact(q: hb.QuantizedTensor) -> None:
    result, report = hb.cast(q, "nvfp4")
    assert report.label == "bit-exact"
    assert_same_bits(result.codes, q.codes)
    assert_same_bits(hb.dequantize(result), hb.dequantize(q))


@pytest.mark.parametrize("width", [33, 41, 63])
def test_the_half_byte_behind_an_odd_row_is_no_element(width: int) -> None:
    """Whatever lies there, the cast is that of a row with nothing there."""
    rng = np.random.default_rng(width)
    exponents = np.array([[0, 100], [-3, 100]])  # the last block is zero: its scale byte has no say
    codes = np.where(np.arange(width) < 32, rng.integers(0, 16, (2, width)), 0)
    clean = source(exponents, codes)
    packed = np.array(clean.codes)
    packed[:, -1] |= 0x70
    dirty = dataclasses.replace(clean, codes=packed)
    wanted, report = hb.cast(clean, "nvfp4")
    result, same = hb.cast(dirty, "nvfp4")
    assert (same, same.k_max, same.zero) == (report, 0, 2)
    assert_same_bits(result.scales, wanted.scales)
    assert_same_bits(np.asarray(result.codes)[:, -1] & 0xF, np.asarray(wanted.codes)[:, -1] & 0xF)
    wide = dataclasses.replace(dirty, scales=np.array([[127, 127], [127 - 30, 127]], np.uint8))
    assert hb.cast(wide, "nvfp4")[1].requantized == 1


def test_of_lossless_scales_the_one_that_keeps_most_blocks() -> None:
    """Blocks of ±0.5 serve 2^-11 to 2^-7 and more, the block of ±6 far below too: at 2^-8 only that one gets new codes.

    2^-11 is the least of them and would keep no other block than that one.
    """
    codes = np.repeat(np.array([1, 9, 1, 7]), 32)[None]
    _, report = hb.cast(source(np.array([[0, 0, 0, -18]]), codes), "nvfp4")
    assert (report.label, report.m, report.verbatim, report.recoded) == ("value-exact", -8, 3, 1)
