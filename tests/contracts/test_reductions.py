"""Sums in a fixed order, compared with plain loops over float32 scalars, on inputs for which the order matters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.contracts import reductions
from halfbyte.testing import assert_same_bits
from tests.samples import F32, f32


def wide(*shape: int, seed: int = 0) -> F32:
    """Positive numbers over six binades, so that the rounding of a sum depends on the order."""
    rng = np.random.default_rng(seed)
    return (rng.random(shape) * 2.0 ** rng.integers(-3, 3, shape)).astype(np.float32)


def loop(numbers: Sequence[np.float32]) -> np.float32:
    total = np.float32(0)
    for number in numbers:
        total = np.float32(total + number)
    return total


def lanes_loop(numbers: Sequence[np.float32]) -> np.float32:
    """PyTorch's CPU order: lane l takes l, l+8, …; from 32 numbers on, vector i goes to partial i mod 4."""
    vectors = [numbers[start : start + 8] for start in range(0, len(numbers), 8)]
    count = 4 if len(vectors) >= 4 else 1
    lanes = []
    for lane in range(8):
        partials = [loop([vector[lane] for vector in vectors[partial::count]]) for partial in range(count)]
        lanes.append(loop(partials))
    return loop(lanes)


def tree_loop(rows: Sequence[Sequence[np.float32]]) -> np.float32:
    sums = [loop(row) for row in rows]
    for half in (8, 4, 2, 1):
        sums = [np.float32(sums[i] + sums[i + half]) for i in range(half)]
    return sums[0]


@pytest.mark.parametrize("length", [16, 32])
def test_sequential(length: int) -> None:
    x = wide(50, length)
    assert_same_bits(reductions.sequential(x), np.array([loop(list(row)) for row in x]))


@pytest.mark.parametrize("length", [8, 16, 24, 32, 40, 64, 256])
def test_eight_lanes(length: int) -> None:
    x = wide(50, length)
    assert_same_bits(reductions.eight_lanes(x), np.array([lanes_loop(list(row)) for row in x]))


def test_rows_then_tree() -> None:
    x = wide(20, 16, 16)
    assert_same_bits(reductions.rows_then_tree(x), np.array([tree_loop([list(row) for row in tile]) for tile in x]))


def test_eight_lanes_flat() -> None:
    x = wide(20, 16, 16)
    assert_same_bits(reductions.eight_lanes_flat(x), np.array([lanes_loop(list(tile.reshape(-1))) for tile in x]))


def test_the_orders_of_a_block_differ() -> None:
    """If a large number comes first, each small one is lost. In lanes the small ones are added to each other first."""
    x = f32(2.0**24, *[1.0] * 15)
    assert reductions.sequential(x[None]).tolist() == [2.0**24]
    # lanes: 2^24 + 1 → 2^24, then seven pairs of 2, each of which counts
    assert reductions.eight_lanes(x[None]).tolist() == [2.0**24 + 14]


def test_the_orders_of_a_tile_differ() -> None:
    """Any two orders differ on many of a hundred tiles."""
    tiles = wide(100, 16, 16)
    orders = [
        reductions.rows_then_tree(tiles),
        reductions.eight_lanes_flat(tiles),
        reductions.sequential(tiles.reshape(100, -1)),
        reductions.sequential(reductions.sequential(tiles)),
    ]
    for one, other in itertools.combinations(orders, 2):
        assert np.count_nonzero(one != other) > 10


def test_partial_sums_matter_from_32_on() -> None:
    """With 32 elements, plain lanes give another sum than four partial sums, so the rule matters."""
    x = wide(200, 64, seed=1)
    plain = np.array([loop([loop(list(row[lane::8])) for lane in range(8)]) for row in x])
    assert np.count_nonzero(plain != reductions.eight_lanes(x)) > 10


def test_sums_start_from_plus_zero() -> None:
    zeros = np.full((1, 16), -0.0, np.float32)
    assert_same_bits(reductions.sequential(zeros), f32(0.0))


def test_maximum() -> None:
    x = wide(5, 2, 16)
    assert_same_bits(reductions.maximum(x), np.array([[max(row) for row in tile] for tile in x]))
    assert_same_bits(reductions.maximum_flat(x), np.array([max(tile.reshape(-1)) for tile in x]))


@given(st.lists(st.floats(0, 2.0**20, width=32), min_size=16, max_size=16))
def test_a_nan_or_inf_reaches_every_sum(numbers: list[float]) -> None:
    for index in (0, 7, 15):
        for bad in (np.nan, np.inf):
            x = f32(*numbers)
            x[index] = bad
            for reduce in (reductions.sequential, reductions.eight_lanes, reductions.maximum):
                assert not np.isfinite(reduce(x[None])[0])
