"""qwantize's own scale searches: bounds taken from the error of the naive scale leave few scales to try.

With E0 the squared error of the naive scale (its byte is given) and v the block's amax, one block runs like this:

1. Nothing is searched if all-zero codes cost no more than E0. The peer asks twice, with two roundings: the sum of
   squares, and the last running sum of the squares in ascending order. A naive E4M3 scale of 0 therefore stays,
   although a block with an amax just below 6·2**-10 would do better with 2**-9.
2. A scale S is tried if max((v − √E0)/6, 0) ≤ S ≤ y/0.25, where y is the magnitude at which that running sum first
   exceeds E0: below, clipping the amax alone costs more than E0; above, the elements rounded to zero do.
3. Of those, ascending, only scales whose clipping error Σ max(|x| − 6·S, 0)² stays below a limit are measured.
4. A scale wins if its error is strictly smaller than the best so far, which starts at that of the naive scale.

The error is Σ r², or rᵀHr with a Hessian, r = x − q·S. Both bounds are about Σ r² alone, so with a Hessian they can cut
off the scale with the least rᵀHr: reproduced as it is. `halfbyte.Hessian` under any other contract prunes nothing.

All operations are float32, rounded once. Comparisons with NaN are false, so a block that holds NaN or Inf keeps its
naive scale; so does a block of zeros, and one whose naive error overflows.

The peer leaves some sums to MKL, which chooses their order by processor and shape. Followed here is what it does on x86
with FMA from four rows and two searched blocks on; with fewer, a tie between two scales can fall the other way. Not
followed is MKL's square root, which can be off by one unit in the last place; ours is correctly rounded. That moves a
byte only if a scale lies between the two lower bounds: seen with a Hessian and amaxes a million times what NVFP4 holds.
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

    `blocks` is (rows, blocks, block), `naive` the bytes that it starts from, (rows, blocks, 1); the chosen bytes come
    back in that shape. With a Hessian the clipping error must stay below ten times the best rᵀHr so far.
    """
    candidates = range(1, E4M3.magnitudes.size)
    return _search(blocks, naive, method, E4M3.values, candidates, lambda best, start: best * np.float32(10))


def search_e8m0(blocks: F32, naive: U8, method: Method) -> U8:
    """qwantize's search over the powers of two of bytes 1…254, pruned by the naive scale's error

    As `search_e4m3`, but with a Hessian the clipping error must stay below E0. A block with NaN has byte 0 here, where
    the peer has a NaN scale: its error is NaN either way.
    """
    return _search(blocks, naive, method, E8M0.values, range(1, 255), lambda best, start: start)


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
    """Which blocks are searched, and between which scales; one entry a block."""

    searched: npt.NDArray[np.bool_]
    lower: F32
    upper: F32

    def hold(self, scale: np.float32) -> npt.NDArray[np.bool_]:
        """Where the scale lies within the bounds, ends included."""
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
    """x − q·S, q the nearest E2M1 value to |x|/S (ties to the smaller) with the sign of x; 0/0 and x/0 give 6."""
    magnitude: F32 = np.divide(np.abs(x), scale)
    q = np.sign(x) * E2M1.magnitudes[encode_magnitude(magnitude, E2M1, "down")]
    return x - q * scale


def squared_error(r: F32) -> F32:
    """Σ r², in eight lanes."""
    return eight_lanes(r * r)


def clipping_error(x: F32, scale: np.float32) -> F32:
    """Σ max(|x| − 6·S, 0)², in eight lanes: what lies beyond the largest code costs at least this."""
    beyond = np.maximum(np.abs(x) - SIX * scale, np.float32(0))
    return eight_lanes(beyond * beyond)


def hessian_error(r: F32, h: F32) -> F32:
    """rᵀ(H·r): each row of H times r in index order, the outer sum in eight lanes. Candidates are measured so."""
    inner = np.zeros_like(r)
    for k in range(r.shape[-1]):
        inner = inner + h[:, :, k] * r[..., k : k + 1]
    return eight_lanes(r * inner)


def hessian_error_fused(r: F32, h: F32) -> F32:
    """As `hessian_error`, with fused multiply-adds in the inner sum. The naive scale is measured so.

    So a candidate with the very residuals of the naive scale can win, by the last bit.
    """
    inner = np.zeros_like(r)
    for k in range(r.shape[-1]):
        inner = fused_multiply_add(np.broadcast_to(h[:, :, k], r.shape), r[..., k : k + 1], inner)
    return eight_lanes(r * inner)


def fused_multiply_add(a: F32, b: F32, c: F32) -> F32:
    """a·b + c with one rounding to float32.

    The product is exact in float64. The sum is rounded to odd there (its last bit set unless it is exact), which keeps
    the second rounding, to float32, from falling on a tie that is none.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = np.asarray(product + addend)
    part = total - product
    lost = (product - (total - part)) + (addend - part)  # exactly what the rounding of the sum left out
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (lost != 0) & (bits & 1 == 0)
    towards = np.where((lost > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + towards, bits).view(np.float64).astype(np.float32)
