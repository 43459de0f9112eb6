"""Codes against the source: every encoder's are the nearest, and a changed one is not."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.formats import E2M1, E4M3
from halfbyte.verify.nearest import SLACK, VALUES, Encoded, block_sums, look_up, not_nearest


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
