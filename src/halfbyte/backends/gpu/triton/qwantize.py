"""qwantize's own searches, pruned by the error of the naive scale. (contracts/searches/qwantize.py has the steps)

The plain kernel has written the naive codes and bytes; blocks whose byte changes get new ones. A lane goes up from the
lower bound to the upper one, in the reference's order, because what is measured depends on the best error so far.
"""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.blocks import (
    bits_of,
    load_words,
    pack_codes,
    place,
    round_e4m3,
    scale_place,
    source,
    store_words,
    unpack,
)
from halfbyte.backends.gpu.triton.mx_search import (
    place_column,
    power_of,
)
from halfbyte.backends.gpu.triton.numbers import (
    BELOW_ZERO,
    DOWN,
    FP32,
)
from halfbyte.backends.gpu.triton.plain import round_element
from halfbyte.backends.gpu.triton.search import (
    any_lane,
    value_of_byte,
)
from halfbyte.backends.gpu.triton.sweep import eight_lanes


@triton.jit
def _scale_of(byte, POWERS: tl.constexpr):
    if POWERS:
        return power_of(byte)
    else:
        return value_of_byte(byte)


@triton.jit
def _residuals(x, scale, N: tl.constexpr):
    """x − q·S, q the nearest value, ties to the smaller."""
    r = ()
    for i in tl.static_range(N):
        y = tl.div_rn(tl.abs(x[i]), scale)
        code, q = round_element(x[i], y, DOWN, BELOW_ZERO, 7, False, False)
        r = r + (x[i] - tl.where(x[i] < 0, -q, q) * scale,)
    return r


@triton.jit
def _squares(r, N: tl.constexpr):
    sizes = ()
    for i in tl.static_range(N):
        sizes = sizes + (r[i] * r[i],)
    return eight_lanes(sizes, N)


@triton.jit
def _clipping(x, scale, N: tl.constexpr):
    """Σ max(|x| − 6·S, 0)²."""
    sizes = ()
    for i in tl.static_range(N):
        beyond = tl.maximum(tl.abs(x[i]) - 6.0 * scale, 0.0)
        sizes = sizes + (beyond * beyond,)
    return eight_lanes(sizes, N)


@triton.jit
def fused_multiply_add(a, b, c, ASM: tl.constexpr):
    """a·b + c rounded once. The interpreter has no such operation: there the sum is rounded to odd in float64 first."""
    if ASM:
        return tl.fma(a, b, c)
    else:
        product = a.to(tl.float64) * b.to(tl.float64)
        addend = c.to(tl.float64)
        total = product + addend
        part = total - product
        lost = (product - (total - part)) + (addend - part)
        bits = total.to(tl.int64, bitcast=True)
        inexact = (tl.abs(total) < float("inf")) & (lost != 0) & ((bits & 1) == 0)
        towards = tl.where((lost > 0) == (total > 0), 1, -1)
        return tl.where(inexact, bits + towards, bits).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _through(r, matrix_ptr, N: tl.constexpr, FUSES: tl.constexpr, ASM: tl.constexpr):
    """rᵀ(H·r): each row of H in index order, fused or not; the outer sum in eight lanes."""
    sizes = ()
    for i in tl.static_range(N):
        inner = tl.zeros(r[0].shape, tl.float32)
        for k in tl.static_range(N):
            entry = tl.load(matrix_ptr + i * N + k)
            if FUSES:
                inner = fused_multiply_add(entry, r[k], inner, ASM)
            else:
                inner = inner + entry * r[k]
        sizes = sizes + (r[i] * inner,)
    return eight_lanes(sizes, N)


@triton.jit
def _exchange(mine, other, PLACE: tl.constexpr, K: tl.constexpr, J: tl.constexpr):
    """Which of two numbers, J places apart, a place of the sorting network keeps; K is the length of the runs."""
    smaller: tl.constexpr = ((PLACE & J) == 0) == ((PLACE & K) == 0)
    if smaller:
        return tl.minimum(mine, other)
    else:
        return tl.maximum(mine, other)


@triton.jit
def _stage(values, N: tl.constexpr, K: tl.constexpr, J: tl.constexpr):
    """One step of the bitonic network."""
    out = ()
    for i in tl.static_range(N):
        out = out + (_exchange(values[i], values[i ^ J], i, K, J),)
    return out


@triton.jit
def ascending(x, N: tl.constexpr):
    """Magnitudes in ascending order."""
    values = ()
    for i in tl.static_range(N):
        values = values + (tl.abs(x[i]),)
    for run in tl.static_range(1, 6):
        if (1 << run) <= N:
            for step in tl.static_range(run):
                values = _stage(values, N, 1 << run, 1 << (run - 1 - step))
    return values


@triton.jit
def _first_dear(ordered, error, N: tl.constexpr):
    """The magnitude at which the running sum of squares first exceeds the error, and whether one does.

    The sum is added in float64, each term of it rounded to float32.
    """
    running = tl.zeros(error.shape, tl.float64)
    found = error != error
    dear = ordered[N - 1]
    for i in tl.static_range(N):
        running = running + (ordered[i] * ordered[i]).to(tl.float64)
        exceeds = (found == 0) & (running.to(tl.float32) > error)
        dear = tl.where(exceeds, ordered[i], dear)
        found = found | exceeds
    return dear, found


@triton.jit(do_not_specialize=["blocks", "rows", "columns", "row_quads"])
def improve_as_qwantize(
    x_ptr, codes_ptr, scales_ptr, matrices_ptr, blocks, rows, columns, row_quads,
    B: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, MAP: tl.constexpr, SWIZZLED: tl.constexpr,
    POWERS: tl.constexpr, MATRICES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Codes and bytes of scales that beat the naive ones. POWERS: E8M0 scales, else E4M3. MATRICES: with a Hessian."""
    W: tl.constexpr = N if DTYPE == FP32 else N // 2
    if MATRICES:
        block, first, row, column, exists = place_column(rows, columns, row_quads, B, W)
        words = load_words(x_ptr + first, exists, W)
    else:
        block, first, row, column, group, exists = place(x_ptr, columns, row_quads, 1, blocks, B, W, MAP, 0)
        words = load_words(source(x_ptr, group, MAP) + first, exists, W)
    x = unpack(words, W, DTYPE)
    byte_ptr = scales_ptr + scale_place(block, row, column, columns, SWIZZLED)
    naive = tl.load(byte_ptr, mask=exists, other=1).to(tl.int32)
    start = _residuals(x, _scale_of(naive, POWERS), N)
    start_error = _squares(start, N)
    ordered = ascending(x, N)
    dear, found = _first_dear(ordered, start_error, N)
    # Comparisons with NaN are false, so a block with NaN or Inf, whose error is NaN or Inf, is not searched.
    searched = exists & found & (_squares(x, N) > start_error)
    lower = tl.maximum(tl.div_rn(ordered[N - 1] - tl.sqrt_rn(start_error), 6.0), 0.0)
    upper = tl.div_rn(dear, 0.25)
    if MATRICES:
        matrix_ptr = matrices_ptr + column * (N * N)
        best = _through(start, matrix_ptr, N, True, ASM)
    else:
        best = start_error
    if POWERS:
        last: tl.constexpr = 254
        tried = (bits_of(lower) >> 23) & 0xFF  # no smaller power reaches the lower bound
    else:
        last: tl.constexpr = 126
        tried, value = round_e4m3(lower)
        tried = tried - 1
    tried = tl.minimum(tl.maximum(tried, 1), last)
    chosen = naive
    alive = searched
    going = any_lane(alive)
    while going:
        scale = _scale_of(tried, POWERS)
        alive = alive & (scale <= upper)
        if MATRICES:
            limit = start_error if POWERS else best * 10.0
        else:
            limit = best
        measured = alive & (scale >= lower) & (_clipping(x, scale, N) < limit)
        if any_lane(measured):
            r = _residuals(x, scale, N)
            if MATRICES:
                error = _through(r, matrix_ptr, N, False, ASM)
            else:
                error = _squares(r, N)
            better = measured & (error < best)
            best = tl.where(better, error, best)
            chosen = tl.where(better, tried, chosen)
        alive = alive & (tried < last)
        tried = tl.minimum(tried + 1, last)
        going = any_lane(alive)
    changed = exists & (chosen != naive)
    scale = _scale_of(chosen, POWERS)
    codes = ()
    for i in tl.static_range(N):
        code, value = round_element(x[i], tl.div_rn(x[i], scale), DOWN, BELOW_ZERO, 7, True, False)
        codes = codes + (code,)
    store_words(codes_ptr + block * (N // 8), pack_codes(codes, N), changed, N // 8)
    tl.store(byte_ptr, chosen.to(tl.uint8), mask=changed)
