"""Codes against the source: every encoder's are the nearest, and a changed one is not."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.formats import E2M1, E4M3
from halfbyte.verify.nearest import BY_CODE, HIGH, LOW, SLACK, VALUES, Encoded, block_sums, look_up, not_nearest


def one_block(codes: list[int], scale_byte: int = 0x38, tensor_scale: float = 1.0) -> Encoded:
    packed = np.array([[low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]], np.uint8)
    scale_bytes = np.array([[scale_byte]], np.uint8)
    return Encoded(packed, scale_bytes, E4M3.values[scale_bytes], tensor_scale, E4M3)


def test_values_come_in_the_order_of_the_elements() -> None:
    stored = one_block(list(range(16)))
    assert look_up(VALUES, stored.codes)[0].tolist() == E2M1.values.tolist()


@pytest.mark.parametrize("scale_byte", [0x30, 0x38, 0x7E])
def test_every_code_is_nearest_from_middle_to_middle(scale_byte: int) -> None:
    """Compare with a search among the values, for numbers all over the range and beyond."""
    values = np.unique(E2M1.values)
    step = float(E4M3.values[scale_byte]) * 0.5
    for number in np.linspace(-8, 8, 161):
        source = np.full((1, 16), number * step, np.float32)
        wrong = not_nearest(one_block(list(range(16)), scale_byte, 0.5), source)[0]
        distance = np.abs(E2M1.values - np.clip(number, -6, 6))
        nearest = distance.min()
        gap = np.diff(values).max()
        assert wrong[distance > nearest + 4 * SLACK * gap + 1e-6].all()
        assert not wrong[distance <= nearest + 1e-6].any()


def test_sums_of_a_block() -> None:
    source = np.arange(16, dtype=np.float32)[None] - 8
    stored = one_block([7] * 8 + [15] * 8, tensor_scale=2.0)
    sums = block_sums(stored, source)
    assert sums.amax.item() == 8
    assert sums.power.item() == 16 * 36
    assert sums.product.item() == 6 * (source[0, :8].sum() - source[0, 8:].sum())
    assert sums.squares.item() == (source**2).sum()
    assert sums.wrong.item()


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF])
def test_blocks_without_a_scale_are_not_judged(byte: int) -> None:
    stored = one_block([7] * 16, byte)
    assert not block_sums(stored, np.ones((1, 16), np.float32)).wrong.any()


def test_bounds_of_each_code() -> None:
    """From middle to middle, with a little more: the source and the quotient may have been rounded to bfloat16."""
    more, less = 1 + 2.0**-7, 1 - 2.0**-7
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    high = [middle * more for middle in middles] + [np.inf]
    low = [-0.25 * more] + [middle * less for middle in middles]
    values, lower, upper = BY_CODE
    assert values.tolist() == E2M1.values.tolist()
    assert upper.tolist() == [*high, *(-bound for bound in low)]
    assert lower.tolist() == [*low, *(-bound for bound in high)]


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_tables_by_two_bytes(chunk: int) -> None:
    assert len(VALUES) == len(LOW) == len(HIGH) == 1 << 16
    codes = np.arange(16, dtype=np.uint8).repeat(chunk).reshape(1, -1)
    codes = np.concatenate([codes, codes[:, ::-1]], axis=1) * np.uint8(17)
    for table, of_codes in zip((VALUES, LOW, HIGH), BY_CODE, strict=True):
        assert look_up(table, codes)[0].tolist() == of_codes[np.repeat(codes[0] & 15, 2)].tolist()


def test_numbers_at_the_bounds() -> None:
    """A number on the bound of its code is right, the next one is not."""
    for code, low, high in zip(range(16), *BY_CODE[1:], strict=True):
        for number, wrong in (
            (low, False),
            (high, False),
            (np.nextafter(low, -np.inf), np.isfinite(low)),
            (np.nextafter(high, np.inf), np.isfinite(high)),
        ):
            source = np.full((1, 16), number, np.float32)
            assert not_nearest(one_block([code] * 16), source).any() == wrong
    assert not not_nearest(one_block([7] * 16, tensor_scale=0.0), np.ones((1, 16), np.float32)).any()


def test_what_codes_are_multiplied_by() -> None:
    stored = Encoded(
        np.zeros((2, 16), np.uint8), np.zeros((2, 2), np.uint8), np.array([[2, -4], [0, np.nan]], np.float32), 0.5, E4M3
    )
    assert stored.block == 16
    np.testing.assert_array_equal(stored.factors(), [[1, -2], [0, np.nan]])
    np.testing.assert_array_equal(stored.multiplier()[:, :, 0], [[1, 2], [np.nan, np.nan]])
    assert stored.multiplier().shape == (2, 2, 1)


def test_sums_of_several_blocks() -> None:
    """A wrong code in one block, NaN in another."""
    codes = np.full((2, 16), 0x22, np.uint8)
    stored = Encoded(codes, np.full((2, 2), 0x38, np.uint8), np.ones((2, 2), np.float32), 1.0, E4M3)
    source = np.ones((2, 32), np.float32)
    source[0, 17], source[1, 3], source[1, 30] = -3, np.nan, 1.25
    sums = block_sums(stored, source)
    assert sums.wrong.tolist() == [[False, True], [False, False]]
    np.testing.assert_array_equal(sums.amax, [[1, 3], [np.nan, 1.25]])
    np.testing.assert_array_equal(sums.product, [[16, 12], [np.nan, 16.25]])
    np.testing.assert_array_equal(sums.power, [[16, 16], [16, 16]])
    np.testing.assert_array_equal(sums.squares, [[16, 24], [np.nan, 15 + 1.25**2]])
    np.testing.assert_array_equal(sums.off, [[0, 16], [np.nan, 0.0625]])
    assert sums.largest == 4
