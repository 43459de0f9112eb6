"""Model-Optimizer's search for static weights: block amaxes by the error of a fake-quantized copy. (searches/static.py)

    sweep: amax = A·(e/448) for the 126 positive E4M3 values e     4over6: amax = v, 1.5·v
    scale = E4M3((amax/6)·factor)·(1/factor), or amax/6 (fused)    d = |x| − E2M1(|x|/scale)·scale
    loss = Σ d·d in eight lanes; the first of equals, and a NaN before all numbers

The exported byte is then made from the chosen amax by the contract's own formula, which differs from this one.
"""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.blocks import (
    decode_e4m3,
    largest,
    load_words,
    place,
    round_e2m1,
    round_e4m3,
    scale_place,
    source,
    store_words,
    unpack,
)
from halfbyte.backends.gpu.triton.numbers import (
    AMAX,
    FLOAT32_MAX,
    FP32,
    FUSED_SWEEP,
    SHARE_OF_TOP,
    STATIC_FOUR_SIX,
)
from halfbyte.backends.gpu.triton.plain import generic_codes
from halfbyte.backends.gpu.triton.scales import (
    element_constant,
    number,
    pre_scale,
    scale_byte,
)


@triton.jit
def eight_lanes(sizes, N: tl.constexpr):
    """The sum of 16 or 32 numbers as PyTorch's CPU kernels add: lane l takes l, l+8, …, then the lanes in order."""
    total = tl.zeros(sizes[0].shape, tl.float32)
    for i in tl.static_range(8):
        lane = sizes[i]
        for j in tl.static_range(1, N // 8):
            lane = lane + sizes[i + 8 * j]
        total = total + lane
    return total


@triton.jit
def _copy_factor(numbers_ptr, group):
    """The copy's tensor factor: 448 over a sixth of the amax that 448 stands for."""
    share = tl.div_rn(
        number(numbers_ptr, group, AMAX) * tl.div_rn(448.0, number(numbers_ptr, group, SHARE_OF_TOP)), 6.0
    )
    share = tl.where(share <= 5.960464477539063e-08, 1.0, share)  # 2**-24
    return tl.div_rn(1.0, share) * 448.0


@triton.jit
def _loss(x, amax, factor, N: tl.constexpr, METHOD: tl.constexpr):
    """Squared error of the copy whose block amax is `amax`; of magnitudes, because signs only mirror it."""
    sixth = tl.div_rn(amax, 6.0)
    if METHOD == FUSED_SWEEP:
        scale = sixth
    else:
        byte, value = round_e4m3(sixth * factor)
        scale = value * tl.div_rn(1.0, factor)
    usable = tl.where((scale == 0) | ((scale <= FLOAT32_MAX) == 0), 1.0, scale)
    sizes = ()
    for i in tl.static_range(N):
        magnitude = tl.abs(x[i])
        copy = round_e2m1(tl.minimum(tl.div_rn(magnitude, usable), 6.0)) * usable
        d = magnitude - tl.where(scale == 0, 0.0, copy)
        sizes = sizes + (d * d,)
    return eight_lanes(sizes, N)


@triton.jit(do_not_specialize=["blocks", "columns", "row_quads", "group_blocks"])
def quantize_static(
    x_ptr, codes_ptr, scales_ptr, numbers_ptr, blocks, columns, row_quads, group_blocks,
    B: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, MAP: tl.constexpr, GROUP: tl.constexpr,
    SWIZZLED: tl.constexpr, METHOD: tl.constexpr, PRE: tl.constexpr, ELEMENT: tl.constexpr,
    STATISTICS: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, FOR_ZERO: tl.constexpr,
    FOR_ZERO_BYTE: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr, NAN_CODE: tl.constexpr,
    ZERO_INPUT: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """Codes and scale bytes of the block amaxes with the least loss."""
    W: tl.constexpr = N if DTYPE == FP32 else N // 2
    block, first, row, column, group, exists = place(x_ptr, columns, row_quads, group_blocks, blocks, B, W, MAP, GROUP)
    x = unpack(load_words(source(x_ptr, group, MAP) + first, exists, W), W, DTYPE)
    v = largest(x, N)
    factor = _copy_factor(numbers_ptr, group) + tl.zeros(v.shape, tl.float32)
    if METHOD == STATIC_FOUR_SIX:
        loss = _loss(x, v, factor, N, METHOD)
        other = _loss(x, v * 1.5, factor, N, METHOD)
        better = (other < loss) | ((other != other) & (loss == loss))
        chosen = tl.where(better, v * 1.5, v)
    else:
        whole = number(numbers_ptr, group, AMAX) + tl.zeros(v.shape, tl.float32)
        best = tl.full(v.shape, float("inf"), tl.float32)
        best_byte = tl.full(v.shape, 1, tl.int32)
        for byte in range(1, 127):
            tried = tl.full(v.shape, byte, tl.int32)
            loss = _loss(x, whole * tl.div_rn(decode_e4m3(tried), 448.0), factor, N, METHOD)
            better = (loss < best) | ((loss != loss) & (best == best))
            best = tl.where(better, loss, best)
            best_byte = tl.where(better, tried, best_byte)
        chosen = whole * tl.div_rn(decode_e4m3(best_byte), 448.0)
    byte, scale = scale_byte(
        pre_scale(chosen, numbers_ptr, group, PRE, STATISTICS, LARGEST), SMALLEST, FOR_ZERO, FOR_ZERO_BYTE
    )
    constant = element_constant(scale, numbers_ptr, group, ELEMENT)
    out = generic_codes(x, constant, scale, N, ELEMENT, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS)
    store_words(codes_ptr + block * (N // 8), out, exists, N // 8)
    tl.store(scales_ptr + scale_place(block, row, column, columns, SWIZZLED), byte.to(tl.uint8), mask=exists)
