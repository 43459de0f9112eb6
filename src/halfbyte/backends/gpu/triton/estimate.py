"""The least squared error by estimates: six operations per element and scale, and a bound on their error.

With m ≈ 1/s' and M the constant whose last place is the grid step of y = x'·m (gpu/triton/blocks.py),

    M = exponent of (x'·x'·m·m + 12.5)·2^19        q = (x'·m + M) − M        d = q·s' − x'        estimate = Σ d·d

all fused. An estimate e differs from the reference's float32 error by less than 2.2e-5·e + 3e-6·s'·√e + 1e-12·amax²:

- near a tie the two may round y to different sides: y is off by less than 2^-21.5 of itself, and at a tie that changes
  d·d by less than 32 times as much of itself;
- the reference rounds q·s' (≤ 6·s') and each difference, square and sum; Σ|d| ≤ 4·√Σd·d over sixteen elements.

If the second best estimate exceeds the best by more than both errors, the best is the reference's choice. Otherwise,
and where a scale is not a normal number, the program runs the exact search.
"""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.blocks import (
    bits_of,
    float_of,
)
from halfbyte.backends.gpu.triton.numbers import FLOAT32_MAX


@triton.jit
def _inverse(x, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(1.0, x)


@triton.jit
def _estimate(scaled, squares, by_scale, N: tl.constexpr, CLIPS: tl.constexpr, ASM: tl.constexpr):
    """Σ d·d of magnitudes under one scale; CLIPS: some y may lie beyond 6.4."""
    inverse = _inverse(by_scale, ASM)
    inverse_square = inverse * inverse * 524288.0
    total = tl.zeros(by_scale.shape, tl.float32)
    for i in tl.static_range(N):
        magic = float_of(bits_of(tl.fma(squares[i], inverse_square, 6553600.0)) & 0x7F800000)
        q = tl.fma(scaled[i], inverse, magic) - magic
        if CLIPS:
            q = tl.minimum(q, 6.0)
        d = tl.fma(q, by_scale, 0.0 - scaled[i])
        total = tl.fma(d, d, total)
    return total


@triton.jit
def estimate_best(
    scaled, quarters, most, unit, nearest, last, searched, N: tl.constexpr, FIRST: tl.constexpr, ASM: tl.constexpr
):
    """Best byte by estimates, and whether a lane needs the exact search. FIRST: the smallest byte to estimate."""
    squares = ()
    for i in tl.static_range(N):
        squares = squares + (scaled[i] * scaled[i],)
    best = tl.full(most.shape, FLOAT32_MAX, tl.float32)
    second = best
    best_byte = nearest
    steps = tl.max(tl.where(searched, last - nearest + 1, 0), axis=0)
    for up in range(0, steps):
        byte = nearest + up
        by_scale = float_of((byte + 960) << 20) * unit
        error = _estimate(scaled, squares, by_scale, N, False, ASM)
        error = tl.where((3.5 * by_scale >= most) | (byte > 126), FLOAT32_MAX, error)  # excluded: see docs/methods.md
        best_byte = tl.where(error < best, byte, best_byte)
        second = tl.minimum(second, tl.maximum(best, error))
        best = tl.minimum(best, error)
    going = searched
    least = (most - tl.sqrt(best) * 1.0001) * _inverse(unit * 6.0 + most * 0, ASM)
    lowest = (bits_of(tl.maximum(least, 0.015625)) >> 20) - 961
    beyond_reach = lowest < FIRST
    lowest = tl.maximum(lowest, FIRST)
    steps = tl.max(tl.where(searched, nearest - lowest, 0), axis=0)
    for down in range(1, steps + 1):
        byte = nearest - down
        by_scale = float_of((byte + 960) << 20) * unit
        bound = tl.zeros(most.shape, tl.float32)
        for i in tl.static_range(4):
            beyond = tl.maximum(quarters[i] - 6.0 * by_scale, 0.0)
            bound = tl.fma(beyond, beyond, bound)
        going = going & (bound * 0.9998 <= best)
        if tl.max(going.to(tl.int32), axis=0) > 0:
            error = tl.where(going, _estimate(scaled, squares, by_scale, N, True, ASM), FLOAT32_MAX)
            best_byte = tl.where(error < best, byte, best_byte)
            second = tl.minimum(second, tl.maximum(best, error))
            best = tl.minimum(best, error)
    off = 5e-5 * second + 2e-6 * most * tl.sqrt(second) + 2e-12 * most * most
    unclear = (second < FLOAT32_MAX) & (second - best <= off)
    return best_byte, searched & (unclear | beyond_reach | (best >= FLOAT32_MAX))
