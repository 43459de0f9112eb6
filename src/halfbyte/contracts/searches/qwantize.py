"""qwantize's own scale searches: the error of the naive scale gives bounds, which leave few scales to try.

Let E0 be the squared error of the naive scale (whose byte is given) and v the amax of the block. For each block:

1. If all-zero codes cost no more than E0, nothing is searched. The peer tests this twice, with two roundings: with the
   sum of squares, and with the last running sum of the squares in ascending order. A naive E4M3 scale of 0 therefore
   stays, although a block with an amax just below 6·2**-10 would do better with 2**-9.
2. A scale S is a candidate if max((v − √E0)/6, 0) ≤ S ≤ y/0.25, where y is the magnitude at which the running sum first
   exceeds E0. Below this range, clipping the amax alone costs more than E0. Above it, the elements rounded to zero
   cost more than E0.
3. The candidates are taken in ascending order. The error of a candidate is measured only if its clipping error,
   Σ max(|x| − 6·S, 0)², is below a limit.
4. A scale wins if its error is strictly smaller than the best so far. The first best is the error of the naive scale.

The error is Σ r², or rᵀHr with a Hessian, where r = x − q·S. Both bounds hold only for Σ r². So with a Hessian they can
exclude the scale with the least rᵀHr; this is reproduced. Under any other contract `halfbyte.Hessian` loses nothing.

All operations are float32, rounded once. Comparisons with NaN are false, so a block that holds NaN or Inf keeps its
naive scale. So does a block of zeros, and a block whose naive error overflows.

The peer leaves some sums to MKL, which chooses their order by processor and shape. This module follows the order that
MKL uses on x86 with FMA for at least four rows and two searched blocks. With fewer, a tie between two scales can be
decided the other way. This module does not follow MKL's square root, which can be wrong by one unit in the last place;
ours is correctly rounded. This changes a byte only if a scale is between the two lower bounds. It was seen only with a
Hessian and amaxes a million times the largest value of NVFP4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.codec.bits import F32, U8
from halfbyte.codec.element import encode_magnitude
from halfbyte.contracts.expressions import SIX
from halfbyte.contracts.reductions import eight_lanes
from halfbyte.errors import UnsupportedError
from halfbyte.formats.elements import E2M1, E4M3, E8M0
from halfbyte.methods import Hessian, Method, Optimal

ZERO_BELOW = np.float32(0.25)
"""Magnitudes up to a quarter of the scale become zero."""

Limit = Callable[[F32, F32], F32]
"""What the clipping error must stay below: from (best error so far, E0)."""
Measure = Callable[[F32], F32]
"""The error of each block, from its residuals."""


def search_e4m3(blocks: F32, naive: U8, method: Method) -> U8:
    """qwantize's search over the 126 positive E4M3 values, pruned by the naive scale's error

    `blocks` has shape (rows, blocks, block). `naive` has shape (rows, blocks, 1) and holds the bytes to start from; the
    result has the same shape. With a Hessian the clipping error must be below ten times the best rᵀHr so far.
    """
    candidates = range(1, E4M3.magnitudes.size)
    return _search(blocks, naive, method, E4M3.values, candidates, _ten_times_best)


def search_e8m0(blocks: F32, naive: U8, method: Method) -> U8:
    """qwantize's search over the powers of two of bytes 1…254, pruned by the naive scale's error

    Like `search_e4m3`, but with a Hessian the clipping error must be below E0. A block with NaN has byte 0 here and a
    NaN scale in the peer; its error is NaN either way.
    """
    return _search(blocks, naive, method, E8M0.values, range(1, 255), _as_at_the_start)


def _search(blocks: F32, naive: U8, method: Method, scale_values: F32, candidates: range, hessian_limit: Limit) -> U8:
    limit = hessian_limit if isinstance(method, Hessian) else _best_so_far
    first_measure, measure = _measures(method)
    start = residual(blocks, scale_values[naive])
    start_error = squared_error(start)
    bounds = search_bounds(blocks, start_error)
    best, chosen = first_measure(start), naive.copy()
    for candidate in candidates:
        scale = scale_values[candidate]
        tried = bounds.hold(scale) & (clipping_error(blocks, scale) < limit(best, start_error))
        if not tried.any():
            continue
        error = measure(residual(blocks, np.asarray(scale)))
        better = tried & (error < best)
        best = np.where(better, error, best).astype(np.float32)
        chosen = np.where(better[..., None], np.uint8(candidate), chosen)
    return chosen


def _best_so_far(best: F32, start_error: F32) -> F32:
    return best


def _ten_times_best(best: F32, start_error: F32) -> F32:
    return best * np.float32(10)


def _as_at_the_start(best: F32, start_error: F32) -> F32:
    return start_error


def _measures(method: Method) -> tuple[Measure, Measure]:
    """The error of the naive scale and that of a candidate. With a Hessian the two round differently."""
    match method:
        case Optimal():
            if method.weights is not None:
                raise UnsupportedError(
                    "qwantize's search knows no weights; qwantize() without a mode searches with them"
                )
            return squared_error, squared_error
        case Hessian():
            if method.codes != "nearest":
                raise UnsupportedError(
                    f"qwantize's search has no codes={method.codes!r}; qwantize() without a mode searches with them"
                )
            h = method.matrices
            return lambda r: hessian_error_fused(r, h), lambda r: hessian_error(r, h)
        case _:
            raise UnsupportedError(f"qwantize has no search for method {method.name}; it has optimal and hessian")


@dataclass(frozen=True)
class SearchBounds:
    """Which blocks are searched, and between which scales. Arrays have one entry per block."""

    searched: npt.NDArray[np.bool_]
    lower: F32
    upper: F32

    def hold(self, scale: np.float32) -> npt.NDArray[np.bool_]:
        """For each block, whether the scale is within the bounds, ends included."""
        held: npt.NDArray[np.bool_] = self.searched & (scale >= self.lower) & (scale <= self.upper)
        return held


def search_bounds(x: F32, start_error: F32) -> SearchBounds:
    """Steps 1 and 2 of the module's list. The running sum adds in float64, each term rounded to float32."""
    ascending = np.sort(np.abs(x), axis=-1)
    amax = ascending[..., -1]
    running = np.cumsum(ascending * ascending, axis=-1, dtype=np.float64).astype(np.float32)
    affordable = (running <= start_error[..., None]).sum(axis=-1)
    size = x.shape[-1]
    noise = (squared_error(x) <= start_error) | (affordable >= size)
    first_dear = np.take_along_axis(ascending, np.minimum(affordable, size - 1)[..., None], axis=-1)[..., 0]
    lower = np.maximum((amax - np.sqrt(start_error)) / SIX, np.float32(0))
    return SearchBounds(~noise, lower.astype(np.float32), (first_dear / ZERO_BELOW).astype(np.float32))


def residual(x: F32, scale: F32) -> F32:
    """x − q·S, where q is the E2M1 value nearest to |x|/S (ties to the smaller) with the sign of x. x/0 and 0/0: 6."""
    magnitude: F32 = np.divide(np.abs(x), scale)
    q = np.sign(x) * E2M1.magnitudes[encode_magnitude(magnitude, E2M1, "down")]
    return x - q * scale


def squared_error(r: F32) -> F32:
    """Σ r², in eight lanes."""
    return eight_lanes(r * r)


def clipping_error(x: F32, scale: np.float32) -> F32:
    """Σ max(|x| − 6·S, 0)², in eight lanes: the elements beyond the largest code cost at least this much."""
    beyond = np.maximum(np.abs(x) - SIX * scale, np.float32(0))
    return eight_lanes(beyond * beyond)


def hessian_error(r: F32, h: F32) -> F32:
    """rᵀ(H·r) of candidates: each row of H times r in index order, the outer sum in eight lanes."""
    inner = np.zeros_like(r)
    for k in range(r.shape[-1]):
        inner = inner + h[:, :, k] * r[..., k : k + 1]
    return eight_lanes(r * inner)


def hessian_error_fused(r: F32, h: F32) -> F32:
    """rᵀ(H·r) of the naive scale: as `hessian_error`, with fused multiply-adds in the inner sum.

    So a candidate with exactly the residuals of the naive scale can win, because the last bit differs.
    """
    inner = np.zeros_like(r)
    for k in range(r.shape[-1]):
        inner = fused_multiply_add(np.broadcast_to(h[:, :, k], r.shape), r[..., k : k + 1], inner)
    return eight_lanes(r * inner)


def fused_multiply_add(a: F32, b: F32, c: F32) -> F32:
    """a·b + c with one rounding to float32.

    The product is exact in float64. The sum is rounded to odd in float64: its last bit is set unless the sum is exact.
    So the second rounding, to float32, never sees a tie that was not one in the exact sum.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = np.asarray(product + addend)
    part = total - product
    lost = (product - (total - part)) + (addend - part)  # the exact rounding error of the sum
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (lost != 0) & (bits & 1 == 0)
    towards = np.where((lost > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + towards, bits).view(np.float64).astype(np.float32)
