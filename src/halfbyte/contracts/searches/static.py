"""Model-Optimizer's search for static weights: it chooses block amaxes by the error of a fake-quantized copy.

The scale of the copy is computed by another formula than the exported scale. So the error that the search minimises is
not exactly the error of the stored tensor. This module reproduces that.
"""

from __future__ import annotations

import numpy as np

from halfbyte.codec.bits import F32
from halfbyte.codec.element import decode, encode
from halfbyte.contracts.expressions import ONE, SIX
from halfbyte.contracts.reductions import eight_lanes
from halfbyte.contracts.rounding import round_elements
from halfbyte.contracts.spec import Rounding, TensorScale
from halfbyte.formats.elements import E2M1, E4M3
from halfbyte.methods import Method, Sweep

E4M3_MAX = np.float32(E4M3.max)
SMALLEST_AMAX = np.float32(2.0**-24)


def search_block_amax(x: F32, v: F32, t: TensorScale, method: Method) -> F32:
    """The block amax with the smallest loss among the candidates of a method; of equal ones, the first.

    x is (rows, blocks, block), v the block amaxes (rows, blocks, 1), t the tensor's scale with top = 6·N.
    """
    if isinstance(method, Sweep):
        candidates = [np.broadcast_to(amax, v.shape) for amax in sweep_amaxes(t)]
    else:
        candidates = [v * ONE, v * np.float32(1.5)]
    losses = []
    for amax in candidates:
        fused = isinstance(method, Sweep) and method.fused
        scale: F32 = np.divide(amax, SIX) if fused else searched_scale(amax, t)
        difference: F32 = np.subtract(x, fake_quantize(x, scale))
        losses.append(eight_lanes(difference * difference)[..., None])
    best = np.argmin(
        np.stack(losses), axis=0
    )  # argmin takes the first of equal losses, and the first NaN if there is one
    chosen: F32 = np.take_along_axis(np.stack(candidates), best[None], axis=0)[0]
    return chosen


def sweep_amaxes(t: TensorScale) -> list[F32]:
    """The block amaxes that the sweep tries, ascending: tensor amax × (positive E4M3 value / largest E4M3 value)."""
    return [t.amax * share for share in E4M3.magnitudes[1:] / E4M3_MAX]


def copy_factor(t: TensorScale) -> F32:
    """The factor that multiplies the scales of the fake-quantized copy before they are rounded to E4M3."""
    anchor = t.top / SIX
    share = (t.amax * (E4M3_MAX / anchor)) / SIX
    share = np.where(share <= SMALLEST_AMAX, ONE, share).astype(np.float32)
    return (ONE / share) * E4M3_MAX


def searched_scale(amax: F32, t: TensorScale) -> F32:
    """The scale that the search tries for a block amax: an E4M3 value times the copy's own tensor factor."""
    factor = copy_factor(t)
    code = encode(np.clip((amax / SIX) * factor, -E4M3_MAX, E4M3_MAX), E4M3)
    return decode(code, E4M3) * (ONE / factor)


def fake_quantize(x: F32, scale: F32) -> F32:
    """x rounded to E2M1 multiples of the scale, as float32.

    A scale of 0 gives 0. A scale that is NaN or Inf counts as 1. -0.0 becomes +0.0. A NaN becomes -6 times the scale.
    """
    usable = np.where((scale == 0) | ~np.isfinite(scale), ONE, scale).astype(np.float32)
    magnitude: F32 = np.divide(np.abs(x), usable)
    codes, _ = round_elements(x, magnitude, E2M1, Rounding(nan_code=7))
    value = decode(codes, E2M1) * usable
    value = np.where(x >= 0, value, -value)
    return np.where(scale == 0, np.float32(0), value).astype(np.float32)
