"""The short forms that the kernels use, tried in numpy where a claim says "for every number"."""

from __future__ import annotations

import numpy as np
import pytest

from tests.samples import E2M1_VALUES, F32

SHORT_DIVISIONS = {
    6.0: (0.1666666567325592, 9.934107758624577e-09),
    2688.0: (0.0003720237873494625, 2.217434742768365e-11),
    1536.0: (0.0006510416278615594, 3.8805108432127255e-11),
}
"""1/c in two float32 parts, as they stand in gpu/triton/scales.py and gpu/triton/four_six.py."""


def fma(x: F32, y: np.float32, z: F32) -> F32:
    """x·y + z rounded once: 80-bit numbers hold the sum, whose parts are at most 2**40 apart."""
    return (x.astype(np.longdouble) * np.longdouble(y) + z.astype(np.longdouble)).astype(np.float32)


@pytest.mark.parametrize("divisor", SHORT_DIVISIONS)
def test_division_by_a_constant(divisor: float) -> None:
    """fma(x, high, x·low) is x/c for all 2**23 significands; and it is not with the upper part alone."""
    x = (np.arange(1 << 23, dtype=np.int32) | 0x3F800000).view(np.float32)
    high, low = map(np.float32, SHORT_DIVISIONS[divisor])
    expected = x / np.float32(divisor)
    assert np.array_equal(fma(x, high, x * low), expected)
    assert not np.array_equal(x * high, expected)


def round_like_the_kernels(y: F32) -> tuple[F32, np.ndarray[tuple[int, ...], np.dtype[np.int32]]]:
    """step_of, round_e2m1 and raw_code of gpu/triton/blocks.py."""
    power = ((y * y + np.float32(12.5)).view(np.int32) & 0x7F800000).view(np.float32)
    shifted = power * np.float32(524288) + y
    raw = shifted.view(np.int32)
    return shifted - power * np.float32(524288), (raw + (raw >> 22) - 298) & 0xF


def test_rounding_to_e2m1() -> None:
    """Every 16-bit step from 0 to 7, and every float32 next to a tie, against nearest-even among the values."""
    grid = np.array(E2M1_VALUES, np.float32)
    middles = (grid[1:] + grid[:-1]) / 2
    around = np.concatenate([[np.nextafter(m, np.float32(0)), m, np.nextafter(m, np.float32(9))] for m in middles])
    y = np.concatenate([np.arange(0, 7, 2.0**-13), around]).astype(np.float32)
    y = y[y < 7]
    lower, upper = np.searchsorted(middles, y, "left"), np.searchsorted(middles, y, "right")
    code = np.where(lower % 2 == 0, lower, upper)
    values, codes = round_like_the_kernels(y)
    assert np.array_equal(codes, code)
    assert np.array_equal(values, grid[code])


def estimate(x: F32, scale: F32) -> F32:
    """_estimate of gpu/triton/estimate.py, in float32 without fusing: off by no less than with it."""
    inverse = np.float32(1) / scale
    squares = (x * x) * (inverse * inverse * np.float32(524288)) + np.float32(6553600)
    magic = (squares.view(np.int32) & 0x7F800000).view(np.float32)
    q = np.minimum((x * inverse + magic) - magic, np.float32(6))
    d = q * scale - x
    total = np.zeros(len(d), np.float32)
    for i in range(16):
        total = total + d[:, i] * d[:, i]
    return np.asarray(total, np.float32)


def test_estimates_are_as_near_as_the_kernel_assumes() -> None:
    """Against the exact squared error in float64, for scales from amax/7 to 2·amax/7."""
    generator = np.random.default_rng(0)
    grid = np.array(E2M1_VALUES)
    middles = (grid[1:] + grid[:-1]) / 2
    for _ in range(20):
        x = np.abs(generator.standard_normal((4096, 16))).astype(np.float32)
        amax = x.max(axis=1, keepdims=True)
        scale = (amax * generator.uniform(1 / 7, 2 / 7, amax.shape)).astype(np.float32)
        q = grid[np.searchsorted(middles, x / scale.astype(np.float64))]
        exact = ((q * scale - x) ** 2).sum(axis=1)
        off = 1.1e-5 * exact + 1.5e-6 * scale[:, 0] * np.sqrt(exact) + 1e-12 * amax[:, 0] ** 2
        assert (np.abs(estimate(x, scale) - exact) <= off).all()
