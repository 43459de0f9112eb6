"""The 128x4 scale tile against its address formula, byte by byte."""

from __future__ import annotations

import re

import numpy as np
import pytest

from halfbyte.errors import InputError
from halfbyte.layouts.swizzle import swizzle, unswizzle
from halfbyte.testing import assert_same_bits
from tests.samples import U8

SHAPES = [(1, 1), (128, 4), (129, 5), (127, 3), (300, 9), (256, 8), (5, 40)]


def by_formula(scales: U8) -> U8:
    """Scale (r, c) goes to ((r div 128)·(C/4) + c div 4)·512 + (r mod 32)·16 + ((r mod 128) div 32)·4 + c mod 4."""
    rows, columns = -(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4
    flat = np.zeros(rows * columns, np.uint8)
    for (r, c), byte in np.ndenumerate(scales):
        flat[((r // 128) * (columns // 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = byte
    return flat


def scales(shape: tuple[int, int]) -> U8:
    return np.random.default_rng(0).integers(1, 256, shape).astype(np.uint8)


@pytest.mark.parametrize("shape", SHAPES)
def test_swizzle_by_the_formula(shape: tuple[int, int]) -> None:
    assert_same_bits(swizzle(scales(shape)), by_formula(scales(shape)))


@pytest.mark.parametrize("shape", SHAPES)
def test_unswizzle_inverts(shape: tuple[int, int]) -> None:
    assert_same_bits(unswizzle(swizzle(scales(shape)), shape), scales(shape))


def test_padding_is_zero() -> None:
    flat = swizzle(scales((129, 5)))
    assert flat.size == 256 * 8
    assert np.count_nonzero(flat) == 129 * 5


def test_one_tile_by_hand() -> None:
    """Row 32 starts four bytes after row 0; row 1 sixteen."""
    tile = np.zeros((128, 4), np.uint8)
    tile[0, 1], tile[32, 0], tile[1, 0], tile[127, 3] = 1, 2, 3, 4
    flat = swizzle(tile)
    assert [int(flat[index]) for index in (1, 4, 16, 511)] == [1, 2, 3, 4]


def test_wrong_size() -> None:
    with pytest.raises(InputError, match="swizzled scales of a 129x5 matrix take 2048 bytes, got 100"):
        unswizzle(np.zeros(100, np.uint8), (129, 5))


@pytest.mark.parametrize("shape", [(128,), ()])
def test_only_matrices_are_swizzled(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=rf"scales of shape {re.escape(str(shape))}: swizzle takes \(rows, columns\)"):
        swizzle(np.zeros(shape, np.uint8))
    with pytest.raises(InputError, match="are those of"):
        unswizzle(np.zeros(512, np.uint8), shape)


def test_stacks_are_swizzled_one_by_one() -> None:
    whole = np.random.default_rng(1).integers(1, 256, (2, 3, 130, 6)).astype(np.uint8)
    flat = swizzle(whole)
    assert flat.shape == (2, 3, 2048)
    for place in np.ndindex(2, 3):
        assert_same_bits(flat[place], by_formula(whole[place]))
    assert_same_bits(unswizzle(flat.reshape(-1), whole.shape), whole)
    with pytest.raises(InputError, match=r"^swizzled scales of 6 matrices of 130x6 take 12288 bytes, got 2048$"):
        unswizzle(flat[0, 0], whole.shape)


def test_torch_stays_torch() -> None:
    torch = pytest.importorskip("torch")
    whole = np.random.default_rng(1).integers(1, 256, (2, 130, 6)).astype(np.uint8)
    flat = swizzle(torch.from_numpy(whole))
    assert isinstance(flat, torch.Tensor)
    assert_same_bits(flat.numpy(), swizzle(whole))
    assert_same_bits(unswizzle(flat, whole.shape).numpy(), whole)
