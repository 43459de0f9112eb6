"""Model-Optimizer's closed form of a cast from MXFP4: exponents, amaxes and what counts as lossless, by hand."""

from __future__ import annotations

import pytest

from halfbyte.contracts.peers.modelopt_cast import (
    amax_of_block,
    count_lossless,
    factor_of_exponent,
    largest_exponent,
)
from tests.samples import f32, u8


@pytest.mark.parametrize(("bytes_", "k"), [((127, 130, 1), 3), ((0, 120), -7), ((0, 0), 0), ((1,), -126)])
def test_the_largest_exponent(bytes_: tuple[int, ...], k: int) -> None:
    """Bytes of 0 do not count."""
    assert largest_exponent(u8(*bytes_)) == k


@pytest.mark.parametrize(("k_max", "factor"), [(8, 1), (0, 2.0**-8), (10, 4)])
def test_the_factor(k_max: int, factor: float) -> None:
    assert factor_of_exponent(k_max).tolist() == [factor]


def test_amaxes_of_blocks() -> None:
    """Six times the power where it is an E4M3 value after the factor, down to seventeen below the largest."""
    largest = f32(4, 4, 3, 2, 0)
    bytes_ = u8(140, 130, 123, 122, 0)  # k = 13, 3, -4, -5, -127
    assert amax_of_block(largest, bytes_).tolist() == [6 * 2.0**13, 6 * 2.0**3, 6 * 2.0**-4, 2 * 2.0**-5, 0]


@pytest.mark.parametrize(("k_max", "count"), [(13, 4), (12, 5), (14, 3), (30, 2), (31, 1)])
def test_blocks_that_are_lossless(k_max: int, count: int) -> None:
    """Seventeen below the largest, and those that are empty."""
    assert count_lossless(u8(140, 130, 123, 122, 0), k_max) == count
