"""4over6: quantize a block with both scales, add the errors in the contract's order, keep the better; a tie keeps 6.

    base = (v/6)·enc        S6 = E4M3(base)     S4 = E4M3(base·1.5)
    d = ((q·S)·A)/c − x     (q·S)·(1/enc) − x     q·S − x·enc
    error = Σ |d| or Σ d·d in index order (tiles: rows in index order, then a tree of rows)

q·S has at most six significant bits, so fusing it with the subtraction changes nothing. Errors are measured on
magnitudes, because signs only mirror them. A division by c = 6·448 or 6·256 becomes a product with 1/c in two parts,
which is correctly rounded for every significand as long as nothing underflows (tests/backends/gpu/test_arithmetic.py
tries all).
"""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.blocks import (
    add_rows,
    bits_of,
    float_of,
    largest,
    load_words,
    over_tile,
    pack_codes,
    place,
    round_e4m3,
    scale_place,
    source,
    step_of,
    store_words,
    unpack,
)
from halfbyte.backends.gpu.triton.numbers import (
    ABS_MAX,
    AMAX,
    EIGHT_LANES,
    ERROR_BY_AMAX,
    ERROR_BY_RECIPROCAL,
    FACTOR,
    FP4_ASSEMBLY,
    FP32,
    INVERSE,
    MSE,
    NO_UNDERFLOW,
    TILES,
)
from halfbyte.backends.gpu.triton.plain import (
    hardware_words,
    pack_signed,
    round_element,
)
from halfbyte.backends.gpu.triton.scales import (
    element,
    element_constant,
    number,
    pre_scale,
    scale_byte,
    short_reciprocal,
    short_sixth,
)


@triton.jit
def _over_top(x, TOP: tl.constexpr, ASM: tl.constexpr):
    """x/c, correctly rounded. The short form needs a true fma, which the interpreter does not have.

    The upper part of 1/c is rounded down, so both parts are positive and -0.0 keeps its sign.
    """
    if ASM and (TOP == 2688 or TOP == 1536):
        high: tl.constexpr = 0.0003720237873494625 if TOP == 2688 else 0.0006510416278615594
        low: tl.constexpr = 2.217434742768365e-11 if TOP == 2688 else 3.8805108432127255e-11
        return tl.fma(x, high, x * low)
    else:
        return tl.div_rn(x, TOP)


@triton.jit
def _size(d, METRIC: tl.constexpr):
    if METRIC == MSE:
        return d * d
    else:  # MAE, ABS_MAX
        return tl.abs(d)


@triton.jit
def _short_error(
    x,
    scale,
    multiplier,
    amax,
    factor,
    inverse,
    N: tl.constexpr,
    KIND: tl.constexpr,
    METRIC: tl.constexpr,
    TOP: tl.constexpr,
    ASM: tl.constexpr,
):
    """Error of one scale, added in index order, and the rounded elements as integers that still hold their codes."""
    shifted = ()
    total = tl.zeros(scale.shape, tl.float32)
    for i in tl.static_range(N):
        magnitude = tl.abs(x[i])
        y = tl.minimum(magnitude * multiplier, 6.0)
        step = step_of(y)
        moved = tl.fma(step, 524288.0, y)
        q = tl.fma(step, -524288.0, moved)
        if KIND == ERROR_BY_AMAX:
            d = _over_top((q * scale) * amax, TOP, ASM) - magnitude
        elif KIND == ERROR_BY_RECIPROCAL:
            d = (q * scale) * inverse - magnitude
        else:  # ERROR_SCALED
            d = tl.fma(q, scale, -(magnitude * factor))
        total = total + _size(d, METRIC)
        shifted = shifted + (bits_of(moved),)
    return total, shifted


@triton.jit
def _error(x, q, scale, numbers_ptr, group, KIND: tl.constexpr, TOP: tl.constexpr):
    if KIND == ERROR_BY_AMAX:
        return tl.div_rn((q * scale) * number(numbers_ptr, group, AMAX), TOP) - x
    elif KIND == ERROR_BY_RECIPROCAL:
        return (q * scale) * number(numbers_ptr, group, INVERSE) - x
    else:  # ERROR_SCALED
        return q * scale - x * number(numbers_ptr, group, FACTOR)


@triton.jit
def _add(sizes, N: tl.constexpr, METRIC: tl.constexpr, ORDER: tl.constexpr):
    """The errors of a block added in the contract's order, or the largest of them."""
    if METRIC == ABS_MAX:
        total = sizes[0]
        for i in tl.static_range(1, N):
            total = tl.maximum(total, sizes[i], propagate_nan=tl.PropagateNan.ALL)
    elif ORDER == EIGHT_LANES:
        total = tl.zeros(sizes[0].shape, tl.float32)
        for i in tl.static_range(8):
            lane = sizes[i]
            for j in tl.static_range(1, N // 8):
                lane = lane + sizes[i + 8 * j]
            total = total + lane
    else:  # SEQUENTIAL
        total = tl.zeros(sizes[0].shape, tl.float32)
        for i in tl.static_range(N):
            total = total + sizes[i]
    return total


@triton.jit
def _generic(
    x, pre, numbers_ptr, group, N: tl.constexpr, KIND: tl.constexpr, METRIC: tl.constexpr, ORDER: tl.constexpr,
    TOP: tl.constexpr, ELEMENT: tl.constexpr, SMALLEST: tl.constexpr, FOR_ZERO: tl.constexpr,
    FOR_ZERO_BYTE: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr, NAN_CODE: tl.constexpr,
    ZERO_INPUT: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """Codes, byte and error of one scale by the contract's formulas."""
    byte, scale = scale_byte(pre, SMALLEST, FOR_ZERO, FOR_ZERO_BYTE)
    constant = element_constant(scale, numbers_ptr, group, ELEMENT)
    codes = ()
    sizes = ()
    for i in tl.static_range(N):
        y = element(x[i], constant, scale, ELEMENT)
        code, value = round_element(x[i], y, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS)
        codes = codes + (code,)
        sizes = sizes + (_size(_error(tl.abs(x[i]), value, scale, numbers_ptr, group, KIND, TOP), METRIC),)
    return codes, byte, _add(sizes, N, METRIC, ORDER)


@triton.jit
def _short_blocks(
    words,
    x,
    v,
    numbers_ptr,
    group,
    B: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    DTYPE: tl.constexpr,
    MAP: tl.constexpr,
    KIND: tl.constexpr,
    METRIC: tl.constexpr,
    TOP: tl.constexpr,
    ASM: tl.constexpr,
):
    """Words of codes and byte by TransformerEngine's formulas, where nothing under- or overflows."""
    amax = number(numbers_ptr, group, AMAX)
    factor = number(numbers_ptr, group, FACTOR)
    inverse = number(numbers_ptr, group, INVERSE)
    base = short_sixth(v, ASM) * factor
    byte_six, six = round_e4m3(base)
    byte_four, four = round_e4m3(base * 1.5)
    by_six = short_reciprocal(six * inverse, ASM)
    by_four = short_reciprocal(four * inverse, ASM)
    error_six, shifted_six = _short_error(x, six, by_six, amax, factor, inverse, N, KIND, METRIC, TOP, ASM)
    error_four, shifted_four = _short_error(x, four, by_four, amax, factor, inverse, N, KIND, METRIC, TOP, ASM)
    if MAP == TILES:
        error_six = add_rows(error_six, B)
        error_four = add_rows(error_four, B)
    better = error_four < error_six
    if ASM == FP4_ASSEMBLY:
        packed = hardware_words(x, tl.where(better, by_four, by_six), N)
    else:
        raw = ()
        for i in tl.static_range(N):
            shifted = tl.where(better, shifted_four[i], shifted_six[i])
            raw = raw + (shifted + (shifted >> 22),)
        packed = pack_signed(raw, words, x, tl.where(better, by_four, by_six), N, W, DTYPE, ASM)
    finite = v == v
    out = ()
    for i in tl.static_range(N // 8):
        out = out + (tl.where(finite, packed[i], 0),)
    return out, tl.where(better, byte_four, byte_six)


@triton.jit
def _generic_blocks(
    x, base, numbers_ptr, group, B: tl.constexpr, N: tl.constexpr, MAP: tl.constexpr, KIND: tl.constexpr,
    METRIC: tl.constexpr, ORDER: tl.constexpr, TOP: tl.constexpr, ELEMENT: tl.constexpr, SMALLEST: tl.constexpr,
    FOR_ZERO: tl.constexpr, FOR_ZERO_BYTE: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr,
    NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """Words of codes and byte by any contract's formulas, for any numbers."""
    codes_six, byte_six, error_six = _generic(
        x, base, numbers_ptr, group, N, KIND, METRIC, ORDER, TOP, ELEMENT, SMALLEST, FOR_ZERO, FOR_ZERO_BYTE,
        TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS,
    )  # fmt: skip
    codes_four, byte_four, error_four = _generic(
        x, base * 1.5, numbers_ptr, group, N, KIND, METRIC, ORDER, TOP, ELEMENT, SMALLEST, FOR_ZERO, FOR_ZERO_BYTE,
        TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS,
    )  # fmt: skip
    if MAP == TILES:
        error_six = add_rows(error_six, B)
        error_four = add_rows(error_four, B)
    better = error_four < error_six
    six_words = pack_codes(codes_six, N)
    four_words = pack_codes(codes_four, N)
    out = ()
    for i in tl.static_range(N // 8):
        out = out + (tl.where(better, four_words[i], six_words[i]),)
    return out, tl.where(better, byte_four, byte_six)


@triton.jit(do_not_specialize=["blocks", "columns", "row_quads", "group_blocks"])
def quantize_four_six(
    x_ptr, codes_ptr, scales_ptr, numbers_ptr, blocks, columns, row_quads, group_blocks,
    B: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, MAP: tl.constexpr, GROUP: tl.constexpr,
    SWIZZLED: tl.constexpr, SHORT: tl.constexpr, KIND: tl.constexpr, METRIC: tl.constexpr, ORDER: tl.constexpr,
    TOP: tl.constexpr, PRE: tl.constexpr, ELEMENT: tl.constexpr, STATISTICS: tl.constexpr, LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr, FOR_ZERO: tl.constexpr, FOR_ZERO_BYTE: tl.constexpr, TIE: tl.constexpr,
    SIGN: tl.constexpr, NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr, WRAPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Codes and scale bytes of the better of two scales, for blocks or for tiles."""
    W: tl.constexpr = N if DTYPE == FP32 else N // 2
    block, first, row, column, group, exists = place(x_ptr, columns, row_quads, group_blocks, blocks, B, W, MAP, GROUP)
    words = load_words(source(x_ptr, group, MAP) + first, exists, W)
    x = unpack(words, W, DTYPE)
    v = largest(x, N)
    if MAP == TILES:
        v = float_of(over_tile(bits_of(v), B))
    if SHORT:  # all blocks of this program share their numbers, so that they all take the same branch
        if number(numbers_ptr, group, NO_UNDERFLOW) > 0:
            out, byte = _short_blocks(words, x, v, numbers_ptr, group, B, N, W, DTYPE, MAP, KIND, METRIC, TOP, ASM)
        else:
            base = pre_scale(v, numbers_ptr, group, PRE, STATISTICS, LARGEST)
            out, byte = _generic_blocks(
                x, base, numbers_ptr, group, B, N, MAP, KIND, METRIC, ORDER, TOP, ELEMENT, SMALLEST, FOR_ZERO,
                FOR_ZERO_BYTE, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS,
            )  # fmt: skip
    else:
        base = pre_scale(v, numbers_ptr, group, PRE, STATISTICS, LARGEST)
        out, byte = _generic_blocks(
            x, base, numbers_ptr, group, B, N, MAP, KIND, METRIC, ORDER, TOP, ELEMENT, SMALLEST, FOR_ZERO,
            FOR_ZERO_BYTE, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS,
        )  # fmt: skip
    store_words(codes_ptr + block * (N // 8), out, exists, N // 8)
    tl.store(scales_ptr + scale_place(block, row, column, columns, SWIZZLED), byte.to(tl.uint8), mask=exists)
