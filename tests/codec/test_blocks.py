"""Splitting rows into blocks and tiles, and joining them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.codec.blocks import ceil_div, join, over_tiles, repeat_rows, split
from halfbyte.testing import assert_same_bits
from tests.samples import F32, f32

SHAPES = st.lists(st.integers(1, 5), max_size=3)


def counting(*shape: int) -> F32:
    """1, 2, 3, … so that no element looks like padding."""
    return np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


@given(SHAPES, st.integers(1, 70), st.sampled_from([4, 16, 32]), st.sampled_from([1, 2, 16]))
def test_join_inverts_split(leading: list[int], width: int, block: int, tile_rows: int) -> None:
    x = counting(*leading, width)
    blocks = split(x, block, tile_rows)
    rows = int(np.prod(leading))
    assert blocks.shape == (ceil_div(rows, tile_rows) * tile_rows, ceil_div(width, block), block)
    assert_same_bits(join(blocks, x.shape), x)


@given(st.integers(1, 5), st.integers(1, 40), st.sampled_from([1, 4]))
def test_padding_is_zero(rows: int, width: int, tile_rows: int) -> None:
    blocks = split(counting(rows, width), 16, tile_rows)
    assert np.count_nonzero(blocks) == rows * width
    assert not np.signbit(blocks).any()


def test_split_by_hand() -> None:
    blocks = split(f32(1, 2, 3, 4, 5), 2)
    assert blocks.tolist() == [[[1, 2], [3, 4], [5, 0]]]
    assert split(f32(1, 2).reshape(2, 1), 2, tile_rows=3).tolist() == [[[1, 0]], [[2, 0]], [[0, 0]]]


def test_split_keeps_dtype_and_needs_no_copy_of_whole_blocks() -> None:
    codes = np.arange(64, dtype=np.uint8).reshape(2, 32)
    assert split(codes, 16).dtype == np.uint8
    assert np.shares_memory(split(codes, 16), codes)


def test_split_leaves_its_input_alone() -> None:
    x = counting(3, 5)
    split(x, 4, 2)[...] = 0
    assert_same_bits(x, counting(3, 5))


def test_over_tiles_gathers_squares() -> None:
    """Tile (i, j) holds rows 2i, 2i+1 of block j."""
    blocks = split(counting(4, 6), 3)
    tiles = over_tiles(blocks, 2)
    assert tiles.shape == (2, 2, 2, 3)
    assert tiles[0, 1].tolist() == [[4, 5, 6], [10, 11, 12]]
    assert tiles[1, 0].tolist() == [[13, 14, 15], [19, 20, 21]]


def test_repeat_rows_gives_each_row_its_tile() -> None:
    per_tile = f32(1, 2, 3, 4).reshape(2, 2)
    repeated = repeat_rows(per_tile, 3)
    assert repeated.shape == (6, 2, 1)
    assert repeated[..., 0].tolist() == [[1, 2]] * 3 + [[3, 4]] * 3


@pytest.mark.parametrize(("a", "b", "quotient"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (8, 4, 2)])
def test_ceil_div(a: int, b: int, quotient: int) -> None:
    assert ceil_div(a, b) == quotient
