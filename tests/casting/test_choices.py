"""Choices that have one right answer, against all that could be chosen: windows, placements, ties."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.casting import closed_form, lossless, measure, to_bfloat16, to_mxfp4, window
from halfbyte.casting.hybrid import requantize_outside
from halfbyte.casting.lossless import Lossless, find_lossless
from halfbyte.casting.measure import decodes_kept, has_negative_zero, reads_zeros_alike, rows_of
from halfbyte.casting.rows import read
from halfbyte.casting.scales import power
from halfbyte.casting.survey import survey_of
from halfbyte.casting.verbatim import keep, midpoint, search, snapping_error
from halfbyte.casting.window import NO_BLOCKS, Exponents, join, power_table
from halfbyte.errors import UnsupportedError
from halfbyte.formats import E2M1, E4M3
from halfbyte.testing import assert_same_bits
from tests.casting.sources import Matrix, random_source, source
from tests.samples import codes_of


def test_the_window() -> None:
    """E4M3 has the powers of two from 2^-9 to 2^8: exponents that lie 17 apart fit."""
    assert (window.LOWEST, window.HIGHEST, window.WINDOW, window.BIAS) == (-9, 8, 17, 127)
    wide, wider = Exponents(-20, -3), Exponents(-20, -2)
    assert (wide.fit, wide.m, wider.fit, wider.m) == (True, -11, False, -10)
    assert [m for m in range(-30, 10) if wide.fit_under(m)] == [-11]
    assert [m for m in range(-30, 10) if wider.fit_under(m)] == []
    assert [m for m in range(-30, 30) if Exponents(4, 4).fit_under(m)] == list(range(-4, 14))
    assert (NO_BLOCKS.m, NO_BLOCKS.fit) == (0, True)
    assert join([None, wide, Exponents(-21, -9), None]) == Exponents(-21, -3)
    assert join([None]) is join([]) is None


def test_every_byte_of_a_power() -> None:
    for m in (-140, -127, -20, 0, 8, 119, 130):
        wanted = [2.0 ** min(max(byte - 127 - m, -9), 8) for byte in range(256)]
        assert E4M3.values[power_table(m)].tolist() == wanted
    assert not power_table(0).flags.writeable


@pytest.mark.parametrize("byte", [0x00, 0x08, 0x80, 0x88, 0x01, 0x70])
@pytest.mark.parametrize("place", [0, 1, 7, 8, 15])
def test_a_block_of_zeros(byte: int, place: int) -> None:
    codes = np.full((3, 16), 0x88, np.uint8)
    codes[1, place] = byte
    zero = byte & 0x77 == 0
    assert window.zero_blocks(codes).tolist() == [True, zero, True]
    assert window.used_exponents(codes, np.array([1, 5, 254], np.uint8)) == (None if zero else Exponents(-122, -122))
    assert has_negative_zero(codes)
    assert has_negative_zero(np.array([[0x80]], np.uint8))
    assert has_negative_zero(np.array([[0x18]], np.uint8))
    assert not has_negative_zero(np.array([[0x10, 0x97]], np.uint8))


def test_the_midpoint() -> None:
    assert midpoint(None) == 0
    assert [midpoint(Exponents(low, 0)) for low in (0, -1, -2, -17)] == [0, 0, -1, -8]
    assert midpoint(Exponents(3, 10)) == 7


@pytest.mark.parametrize(("top", "spread"), [(0, 18), (0, 25), (127, 30), (127, 254), (-90, 37), (5, 60), (100, 19)])
def test_the_best_snapping_of_all(top: int, spread: int) -> None:
    """Of equals the one nearest to the middle, then the smaller."""
    survey = survey_of([read(random_source(np.random.default_rng(spread), spread, (4, 64), top), "q")])
    found = survey.exponents
    assert found is not None
    every = [(snapping_error(survey, m), abs(m - midpoint(found)), m) for m in range(-140, 128)]
    assert search(survey) == min(every)[2]


@pytest.mark.parametrize("spread", [4, 17, 18, 31])
def test_where_verbatim_puts_the_window(spread: int) -> None:
    q = random_source(np.random.default_rng(spread), spread, (4, 64), 6)
    rows = read(q, "q")
    assert rows.exponents is not None
    middle, best = midpoint(rows.exponents), search(survey_of([rows]))
    assert (middle == best) == (spread <= 17)
    for placement, m in (("midpoint", middle), ("search", best), (None, best)):
        result, report = hb.cast(q, "nvfp4", "verbatim", m=placement)
        assert report.m == m
        assert_same_bits(np.asarray(result.scales), keep(rows, m)[1])
        assert_same_bits(result.codes, q.codes)
        assert float(np.asarray(result.global_scale)) == 2.0**m


def test_equal_snapping_errors() -> None:
    """One value each at 0 and -20: what is lost depends on the smaller one alone, or on the larger."""
    codes: Matrix = np.zeros((1, 64), np.int64)
    codes[0, 0], codes[0, 32] = 2, 2
    survey = survey_of([read(source(np.array([[0, -20]]), codes), "q")])
    errors = {m: snapping_error(survey, m) for m in range(-30, 20)}
    best = min(errors.values())
    assert [m for m in errors if errors[m] == best] == [-8]
    assert search(survey) == -8
    zero = survey_of([read(source(np.array([[0, -20]]), codes * 0), "q")])
    assert search(zero) == 0
    narrow = survey_of([read(source(np.array([[0, -17]]), codes), "q")])
    assert search(narrow) == -8


def test_the_lossless_scale_that_keeps_most() -> None:
    """Of equals the closed form's, then the least; of 2^m and 3·2^m the former."""
    rng = np.random.default_rng(0)
    low, high = lossless.intervals(1)
    seen = 0
    for seed in range(12):
        spread = 18 + seed % 3
        exponents = rng.choice([0, -spread, -5, -spread + 1], (3, 2))
        exponents[0, 0], exponents[0, 1] = 0, -spread
        codes = rng.choice([0, 6, 7, 14], (3, 64))
        codes[:, ::16] = 7
        survey = survey_of([read(source(exponents, codes), "q")])
        sizes = {k: int(halves.number.sum()) for k, halves in survey.halves.items()}
        sets = {
            k: np.packbits(halves.counts[:, 1:] > 0, axis=1, bitorder="little")[:, 0]
            for k, halves in survey.halves.items()
        }
        serve = [
            m
            for m in range(-40, 40)
            if all((low[s] <= m - k).all() and (m - k <= high[s]).all() for k, s in sets.items())
        ]
        found = find_lossless(survey)
        if not serve:
            assert found is None or found.odd == 3
            continue
        seen += 1
        kept = {m: sum(size for k, size in sizes.items() if -9 <= k - m <= 8) for m in serve}
        assert survey.exponents is not None
        form = survey.exponents.m
        assert found == Lossless(1, max(serve, key=lambda m: (kept[m], m == form, -m)))
    assert seen > 3


@pytest.mark.parametrize(
    ("magnitudes", "spread", "found"),
    [
        ([3, 5, 7], 17, Lossless(1, -8)),
        ([3, 5, 7], 18, Lossless(3, -9)),
        ([3, 5, 7], 19, None),
        ([7], 19, Lossless(1, -8)),
        ([7], 20, Lossless(3, -9)),
        ([1, 3, 5, 7], 18, None),
    ],
)
def test_the_lossless_scale_of_two_blocks_of_the_same_numbers(
    magnitudes: list[int], spread: int, found: Lossless | None
) -> None:
    """Multiples of three reach further under three times a power of two."""
    codes = np.resize(magnitudes, 32)
    survey = survey_of([read(source(np.array([[0, -spread]]), np.tile(codes, 2)[None]), "q")])
    assert find_lossless(survey) == found


@pytest.mark.parametrize("m", [-8, -3])
def test_halves_outside_a_window_alone_are_coded_again(m: int) -> None:
    q = random_source(np.random.default_rng(5), 24, (3, 70))
    rows = read(q, "q")
    codes, scales = requantize_outside(rows, m)
    kept_codes, kept_scales = keep(rows, m)
    outside = rows.outside(m)
    assert outside.any()
    assert_same_bits(scales[~outside], kept_scales[~outside])
    got, kept = (codes_of(part)[:, :70] for part in (codes, kept_codes))
    wide = np.repeat(outside, 16, axis=1)[:, :70]
    assert_same_bits(got[~wide], kept[~wide])
    assert (got & 8).tolist() == (kept & 8).tolist(), "signs stay"
    values = E2M1.magnitudes[codes_of(np.asarray(q.codes))[:, :70] & 7]
    for row, half in np.argwhere(outside):
        part = values[row, half * 16 : half * 16 + 16] * 2.0 ** (int(rows.half_exponents[row, half]) - m)
        scale = float(E4M3.values[scales[row, half]])
        wanted = min(max(part.max() / 6, 2.0**-9), 448.0)
        assert abs(scale - wanted) == np.abs(E4M3.magnitudes[1:] - np.float32(wanted)).min()


def test_halves_above_a_window_get_the_scale_of_their_own_amax() -> None:
    """A sixth of it: of 0.5 and of 3, both 2^9 times."""
    codes, scales = requantize_outside(read(source(np.array([[0]]), np.repeat([[1, 5]], 16, axis=1)), "q"), -9)
    assert E4M3.values[scales].tolist() == [[44, 256]]
    assert codes_of(codes)[0, ::16].tolist() == [7, 7]


def test_codes_without_negative_zero() -> None:
    table = closed_form.WITHOUT_NEGATIVE_ZERO
    for byte in range(256):
        low, high = byte & 15, byte >> 4
        assert table[byte] == (0 if low == 8 else low) | (0 if high == 8 else high) << 4


def test_a_cast_without_a_closed_form() -> None:
    rule = hb.contracts.modelopt(mode="quantize_mxfp4_to_nvfp4").cast
    rows = read(random_source(np.random.default_rng(0), 3), "q")
    assert rule is not None
    for call in (
        lambda: closed_form.closed_form_amax(rows, rule),
        lambda: closed_form.cast_by_rule(rows, np.zeros((1, 1), np.float32), hb.contracts.modelopt(), rule, 0),
    ):
        with pytest.raises(UnsupportedError, match=r"^this cast has no closed form: it goes through bfloat16$"):
            call()


@pytest.mark.parametrize(
    ("contract", "m", "low", "high", "kept"),
    [
        ("torchao", 106, 100, 114, True), ("transformer_engine", 106, 100, 114, True),
        ("transformer_engine", 107, 100, 115, False), ("transformer_engine", 107, 98, 100, True),
        ("torchao", 119, 110, 127, True), ("fouroversix", 107, 100, 115, False),
    ],
)  # fmt: skip
def test_whether_kept_codes_decode_to_the_same(contract: str, m: int, low: int, high: int, kept: bool) -> None:
    scale = power(m, hb.contracts.CONTRACTS[contract]())
    assert decodes_kept(scale, m, Exponents(low, high)) is kept
    assert decodes_kept(scale, m, None)


def test_zeros_that_are_read_alike() -> None:
    q = random_source(np.random.default_rng(0), 3)
    other = dataclasses.replace(q, contract=hb.contracts.gguf())
    for one, contract, alike in (
        (q, "torchao", True), (q, "modelopt", False), (other, "torchao", False), (other, "modelopt", True)
    ):  # fmt: skip
        assert reads_zeros_alike(one, hb.contracts.CONTRACTS[contract]()) is alike


def test_some_rows_of_a_stack() -> None:
    """Taken as one matrix; scales of rows go along, one of the tensor stays."""
    q = hb.quantize(np.random.default_rng(0).standard_normal((2, 3, 32)).astype(np.float32), "nvfp4", "modelopt")
    part = rows_of(q, 2, 5)
    assert part.shape == (3, 32)
    assert_same_bits(np.asarray(part.codes), np.asarray(q.codes).reshape(6, 16)[2:5])
    assert_same_bits(np.asarray(part.scales), np.asarray(q.scales).reshape(6, 2)[2:5])
    assert np.asarray(part.stored_scale).shape == ()
    assert rows_of(q, 5, 9).shape == (1, 32)
    expert = hb.cast(random_source(np.random.default_rng(1), 3, (2, 3, 64)), "nvfp4", share="expert")[0]
    rows = rows_of(expert, 2, 4)
    assert np.asarray(rows.stored_scale).tolist() == np.asarray(expert.stored_scale).reshape(-1)[2:4].tolist()


def test_blocks_of_a_cut_row_count_as_kept() -> None:
    """The last block of 40 elements has 8: the padding behind it is equal."""
    q = random_source(np.random.default_rng(2), 3, (2, 40))
    same = measure._kept_blocks(q, dataclasses.replace(q))
    assert same.tolist() == [[True, True], [True, True]]
    codes = np.asarray(q.codes).copy()
    codes[1, 19] ^= 1
    codes[0, 0] ^= 0x10
    assert measure._kept_blocks(q, dataclasses.replace(q, codes=codes)).tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize(("module", "target"), [(measure, "nvfp4"), (to_bfloat16, "bfloat16"), (to_mxfp4, "mxfp4")])
def test_values_are_decoded_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch, module: Any, target: str) -> None:
    """As many as fit the chunk, one at least: memory is bounded. It changes no more than the last bits of sums."""
    q = random_source(np.random.default_rng(3), 25, (6, 96) if target == "nvfp4" else (2, 3, 96))
    if target == "mxfp4":
        q = hb.cast(q, "nvfp4")[0]
    algorithm = "hybrid" if target == "nvfp4" else None
    whole, wanted = hb.cast(q, target, algorithm)
    real, decoded = module.dequantize, []

    def dequantize(part: hb.QuantizedTensor, *rest: Any) -> Any:
        decoded.append(part.shape)
        return real(part, *rest)

    monkeypatch.setattr(module, "dequantize", dequantize)
    for chunk, rows in ((1, [1] * 6), (95, [1] * 6), (2 * 96, [2] * 3), (5 * 96 - 1, [4, 2]), (1000, [6])):
        monkeypatch.setattr(module, "CHUNK", chunk)
        decoded.clear()
        again, report = hb.cast(q, target, algorithm)
        assert report.squared_error == pytest.approx(wanted.squared_error, rel=1e-14)
        assert report.signal == pytest.approx(wanted.signal, rel=1e-14)
        assert dataclasses.replace(report, squared_error=wanted.squared_error, signal=wanted.signal) == wanted
        assert decoded == [(number, 96) for number in rows for _ in range(2)]
        for name in ("codes", "scales") if target != "bfloat16" else ():
            assert_same_bits(np.asarray(getattr(again, name)), np.asarray(getattr(whole, name)))
        if target == "bfloat16":
            assert_same_bits(np.asarray(again), np.asarray(whole))
