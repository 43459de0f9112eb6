"""The bytes of a source as the cast sees them: halves counted, cut blocks padded, other magnitudes written back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.casting import rows as module
from halfbyte.casting.rows import COUNTING, Rows, by_exponent, check_not_empty, read, values_of
from halfbyte.casting.window import Exponents
from halfbyte.testing import assert_same_bits
from tests.casting.sources import random_source, source
from tests.samples import E2M1_VALUES, codes_of


def test_the_counting_table() -> None:
    for byte in (0x00, 0x07, 0x70, 0x8F, 0xF7, 0x5A):
        counts = [0] * 8
        counts[byte & 7] += 1
        counts[byte >> 4 & 7] += 1
        assert COUNTING[byte : byte + 1].astype("<u8").view(np.uint8).tolist() == counts


@pytest.mark.parametrize("width", [16, 31, 32, 33, 48, 64, 70])
def test_halves_of_any_width(width: int) -> None:
    rng = np.random.default_rng(width)
    blocks = -(-width // 32)
    codes, exponents = rng.integers(0, 16, (3, width)), rng.integers(-5, 6, (3, blocks))
    codes[1, :16], exponents[2, 0] = 8, 40
    if width > 16:
        codes[1, 16:32] = 0
    rows = read(source(exponents, codes), "q")
    halves = -(-width // 16)
    assert (rows.halves, rows.width, rows.block) == (halves, width, 32)
    assert rows.regular is (width % 32 == 0)
    padded = np.zeros((3, blocks * 32), np.int64)
    padded[:, :width] = codes
    each = padded.reshape(3, -1, 16)[:, :halves] & 7
    assert rows.counts.tolist() == [[[(half == i).sum() for i in range(8)] for half in row] for row in each]
    assert rows.half_exponents.tolist() == np.repeat(exponents, 2, axis=1)[:, :halves].tolist()
    assert rows.nonzero_half.tolist() == (each != 0).any(axis=-1).tolist()
    used = (padded.reshape(3, blocks, 32) & 7 != 0).any(axis=-1)
    assert rows.zeros == int((~used).sum())
    assert rows.exponents == Exponents(int(exponents[used].min()), int(exponents[used].max()))
    n = np.repeat(exponents, 2, axis=1)[:, :halves]
    for m in (-4, 0, 3):
        wanted = ((n - m < -9) | (n - m > 8)) & rows.nonzero_half
        assert rows.outside(m).tolist() == wanted.tolist()
    assert codes_of(rows.whole.reshape(3, -1)).tolist() == padded.tolist()
    assert rows.count_blocks(rows.nonzero_half) == int(used.sum())
    assert rows.count_blocks(np.zeros((3, halves), np.bool_)) == 0


@pytest.mark.parametrize("place", [0, 1, 30, 31])
def test_the_largest_magnitude_of_a_block(place: int) -> None:
    """One element is enough, with either sign; -0.0 is the smallest."""
    codes = np.full((4, 64), 8)
    codes[0, place], codes[1, 32 + place], codes[2, place], codes[2, 31 - place] = 7, 9, 5, 12
    assert read(source(np.zeros((4, 2)), codes), "q").largest.tolist() == [[7, 0], [0, 1], [5, 0], [0, 0]]


def test_the_half_byte_behind_an_odd_width_is_no_element() -> None:
    q = source(np.array([[3, 7]]), np.zeros((1, 33), np.int64))
    codes = np.asarray(q.codes).copy()
    codes[0, 16] = 0x70
    rows = read(dataclasses.replace(q, codes=codes), "q")
    assert (rows.exponents, rows.zeros, bool(rows.nonzero_half.any())) == (None, 2, False)
    assert codes[0, 16] == 0x70, "the source stays"


@pytest.mark.parametrize("width", [32, 33, 47, 48, 70])
def test_other_magnitudes_keep_their_signs(width: int) -> None:
    """Only halves in `where` are written; what stands behind the last element stays."""
    rng = np.random.default_rng(width)
    codes = rng.integers(0, 16, (2, width))
    q = source(np.zeros((2, -(-width // 32))), codes)
    packed = np.asarray(q.codes).copy()
    if width % 2:
        packed[:, -1] |= 0xA0
    rows = Rows(packed, np.asarray(q.scales), width, 32)
    where = rng.random((2, rows.halves)) < 0.6
    where[0, -1] = True
    new = rng.integers(0, 8, (int(where.sum()), 8), dtype=np.uint8)
    new[:, 0] = 0  # zero stays zero
    out = packed.copy()
    rows.recode(out, where, new)
    wanted = codes.copy()
    for number, (row, half) in enumerate(np.argwhere(where)):
        part = wanted[row, half * 16 : half * 16 + 16]
        part[:] = (part & 8) | new[number][part & 7]
    assert codes_of(out)[:, :width].tolist() == wanted.tolist()
    if width % 2:
        assert (out[:, -1] >> 4).tolist() == [0xA, 0xA]


def test_rows_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = read(random_source(np.random.default_rng(0), 3, (5, 64)), "q")
    assert [(start, stop) for start, stop, _ in rows.slices()] == [(0, 5)]
    for size, step in ((1, 1), (64, 1), (127, 1), (128, 2), (320, 5)):
        monkeypatch.setattr(module, "SLICE", size)
        found = list(rows.slices())
        assert [(start, stop) for start, stop, _ in found] == [
            (start, min(start + step, 5)) for start in range(0, 5, step)
        ]
        for start, stop, part in found:
            assert_same_bits(part.codes, rows.codes[start:stop])
            assert_same_bits(part.scales, rows.scales[start:stop])
            assert (part.width, part.block) == (64, 32)


def test_values_and_exponents() -> None:
    assert values_of(-3).tolist() == [value / 8 for value in E2M1_VALUES]
    assert values_of(126).tolist()[-3:] == [3 * 2.0**126, np.inf, np.inf]
    assert values_of(-149).dtype == np.float32
    found = list(by_exponent(np.array([3, -2, 3, 5, -2], np.int16)))
    assert [(k, here.tolist()) for k, here in found] == [(-2, [1, 4]), (3, [0, 2]), (5, [3])]
    assert list(by_exponent(np.array([], np.int16))) == []


def test_what_cannot_be_read() -> None:
    q = random_source(np.random.default_rng(0), 3, (2, 3, 64))
    scales = np.asarray(q.scales).copy()
    scales[0, 1, 1] = scales[1, 2, 0] = 255
    with pytest.raises(hb.InputError) as caught:
        read(dataclasses.replace(q, scales=scales), "w")
    assert str(caught.value) == (
        "w of shape (2, 3, 64): 2 of 12 E8M0 scale bytes are 255 (NaN), the first at row 1, block 1; NVFP4 has no such "
        "block: repair or drop the tensor first"
    )
    with pytest.raises(hb.UnsupportedError, match=r"^w is nvfp4; this cast takes mxfp4$"):
        read(hb.quantize(np.ones((1, 32), np.float32), "nvfp4"), "w")
    check_not_empty(q, "w")
    with pytest.raises(hb.InputError) as caught:
        check_not_empty(q[:0], "w")
    assert str(caught.value) == "w of shape (0, 3, 64) has no elements; there is nothing to cast"
