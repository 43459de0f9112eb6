"""Model-Optimizer's search for static weights, compared with a plain loop over blocks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfbyte.contracts.searches.static import fake_quantize, search_block_amax, searched_scale
from halfbyte.contracts.spec import TensorScale
from halfbyte.methods import FourSix, Method, Sweep
from halfbyte.testing import assert_same_bits
from tests.samples import F32, e2m1, f32, gaussian

f = np.float32
FOUR_OVER_SIX = FourSix("mse", 256)


def tensor_scale(x: F32, e4m3_max: int) -> TensorScale:
    amax = np.abs(x).max(keepdims=True)
    top = f(6 * e4m3_max)
    return TensorScale(amax, (amax / top).astype(np.float32), f(6), top, "fp32")


def plain_scale(amax: Any, largest: Any, anchor: int) -> Any:
    """E4M3(clamp((a/6)·k, ±448))·(1/k) with k = (1/ga)·448, ga = (G·(448/N))/6."""
    ga = f(f(largest * f(448 / anchor)) / f(6))
    ga = f(1) if ga <= f(2.0**-24) else ga
    k = f(f(f(1) / ga) * f(448))
    rounded = np.minimum(f(f(amax / f(6)) * k), f(448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return f(rounded * f(f(1) / k))


def plain_loss(block: F32, scale: Any) -> Any:
    """Eight lanes of two, then the lanes in order."""
    if scale == 0:
        errors = block * block
    else:
        codes = (np.abs(block) / scale).astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        difference = block - np.copysign(e2m1(codes) * scale, block).astype(np.float32)
        errors = (difference * difference).astype(np.float32)
    total = f(0)
    for lane in errors[:8] + errors[8:]:
        total = f(total + lane)
    return total


def plain_search(block: F32, largest: Any, method: Method) -> Any:
    amax = np.abs(block).max()
    anchor = 448
    if isinstance(method, Sweep):
        shares = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32) / f(448)
        candidates = [f(largest * share) for share in shares]
    else:
        anchor, candidates = 256, [amax, f(amax * f(1.5))]
    best, best_loss = candidates[0], None
    for candidate in candidates:
        fused = isinstance(method, Sweep) and method.fused
        scale = f(candidate / f(6)) if fused else plain_scale(candidate, largest, anchor)
        loss = plain_loss(block, scale)
        if best_loss is None or loss < best_loss:  # of equal losses the first stays
            best, best_loss = candidate, loss
    return best


@pytest.mark.parametrize("method", [FOUR_OVER_SIX, Sweep(), Sweep(fused=True)])
def test_search_by_a_plain_loop(method: Method) -> None:
    x = gaussian(3, 5, 16)
    x[0, 0] *= 8
    x[1, 1] = 0
    t = tensor_scale(x, 256 if isinstance(method, FourSix) else 448)
    got = search_block_amax(x, np.abs(x).max(axis=-1, keepdims=True), t, method)
    expected = [[plain_search(block, t.amax.reshape(-1)[0], method) for block in row] for row in x]
    assert_same_bits(got[..., 0], np.array(expected, np.float32))


def test_four_over_six_keeps_one_on_a_tie() -> None:
    """A zero block has no error at either scale."""
    x = np.zeros((1, 2, 16), np.float32)
    x[0, 1, 0] = 1
    v = np.abs(x).max(axis=-1, keepdims=True)
    assert search_block_amax(x, v, tensor_scale(x, 256), FOUR_OVER_SIX)[0, 0, 0] == 0


def test_four_over_six_takes_either() -> None:
    """On the scale that maps the amax to 6, 3 is a value and 4.5 is not; on the scale for 4 the latter becomes 3."""
    x = np.stack([f32(6, *[3.0] * 15), f32(4, *[3.0] * 15)])[None]
    v = np.abs(x).max(axis=-1, keepdims=True)
    chosen = search_block_amax(x, v, tensor_scale(x, 256), FOUR_OVER_SIX)[0, :, 0]
    assert chosen.tolist() == [6.0, 6.0]  # 6·1 and 4·1.5


def test_tiny_tensors_search_with_a_factor_of_one() -> None:
    tiny = f32(2.0**-30).reshape(1, 1, 1)
    t = TensorScale(tiny, tiny, f(6), f(6 * 448), "fp32")
    assert_same_bits(searched_scale(tiny, t), np.zeros((1, 1, 1), np.float32))  # k = 448: the scale underflows


def test_fake_quantize_by_hand() -> None:
    """Scale 2: 5/2 = 2.5 → 2, 7/2 = 3.5 → 4, saturation at 6; -0.0 becomes +0.0, a small negative -0.0."""
    x = f32(5, 7, 100, -3, -0.0, 0.0, -0.1)
    assert_same_bits(fake_quantize(x, f32(2)), f32(4, 8, 12, -3, 0.0, 0.0, -0.0))
    assert_same_bits(fake_quantize(x, f32(0)), np.zeros(7, np.float32))
