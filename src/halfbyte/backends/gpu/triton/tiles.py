"""4over6 on tiles of 16x16 whose errors are added element by element over the whole tile. (fouroversix)

    vectors of eight, row by row; vector i goes to sum i mod 4; the four sums are added in order, then the eight lanes

A row holds vectors 2·row and 2·row + 1, so even rows feed the first two sums and odd rows the other two. A thread takes
a whole tile and reads its rows three times: for the amax, for both errors, and for the codes.
"""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.blocks import (
    largest,
    load_words,
    scale_place,
    store_words,
    unpack,
)
from halfbyte.backends.gpu.triton.four_six import (
    _error,
    _size,
)
from halfbyte.backends.gpu.triton.numbers import (
    ABS_MAX,
    FP32,
)
from halfbyte.backends.gpu.triton.plain import (
    generic_codes,
    round_element,
)
from halfbyte.backends.gpu.triton.scales import (
    element,
    element_constant,
    pre_scale,
    scale_byte,
)

N = tl.constexpr(16)


@triton.jit
def _add_row(
    sums, x, constant, scale, numbers_ptr, group, KIND: tl.constexpr, METRIC: tl.constexpr, TOP: tl.constexpr,
    ELEMENT: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr, NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr,
    WRAPS: tl.constexpr,
):  # fmt: skip
    """Sixteen sums with one element's error added to each; or the larger of the two."""
    out = ()
    for i in tl.static_range(N):
        y = element(x[i], constant, scale, ELEMENT)
        code, value = round_element(x[i], y, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS)
        size = _size(_error(tl.abs(x[i]), value, scale, numbers_ptr, group, KIND, TOP), METRIC)
        if METRIC == ABS_MAX:
            out = out + (tl.maximum(sums[i], size, propagate_nan=tl.PropagateNan.ALL),)
        else:
            out = out + (sums[i] + size,)
    return out


@triton.jit
def _total(even, odd, METRIC: tl.constexpr):
    """The sums of even and odd rows as one number."""
    total = tl.zeros(even[0].shape, tl.float32)
    if METRIC == ABS_MAX:
        for i in tl.static_range(N):
            total = tl.maximum(total, even[i], propagate_nan=tl.PropagateNan.ALL)
            total = tl.maximum(total, odd[i], propagate_nan=tl.PropagateNan.ALL)
    else:
        for i in tl.static_range(8):
            total = total + (((even[i] + even[i + 8]) + odd[i]) + odd[i + 8])
    return total


@triton.jit
def _zeros(like):
    zeros = ()
    for _ in tl.static_range(N):
        zeros = zeros + (like * 0,)
    return zeros


@triton.jit
def _tile_error(
    start_ptr, row_words, exists, scale, numbers_ptr, group, W: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr,
    METRIC: tl.constexpr, TOP: tl.constexpr, ELEMENT: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr,
    NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """Error of one scale over all rows of a tile."""
    constant = element_constant(scale, numbers_ptr, group, ELEMENT)
    even = _zeros(tl.zeros(scale.shape, tl.float32))
    odd = even
    for pair in range(8):
        x = unpack(load_words(start_ptr + (2 * pair) * row_words, exists, W), W, DTYPE)
        even = _add_row(
            even, x, constant, scale, numbers_ptr, group, KIND, METRIC, TOP, ELEMENT, TIE, SIGN, NAN_CODE, ZERO_INPUT,
            WRAPS,
        )  # fmt: skip
        x = unpack(load_words(start_ptr + (2 * pair + 1) * row_words, exists, W), W, DTYPE)
        odd = _add_row(
            odd, x, constant, scale, numbers_ptr, group, KIND, METRIC, TOP, ELEMENT, TIE, SIGN, NAN_CODE, ZERO_INPUT,
            WRAPS,
        )  # fmt: skip
    return _total(even, odd, METRIC)


@triton.jit(do_not_specialize=["tiles", "columns", "row_quads"])
def quantize_tiles(
    x_ptr, codes_ptr, scales_ptr, numbers_ptr, tiles, columns, row_quads,
    B: tl.constexpr, DTYPE: tl.constexpr, SWIZZLED: tl.constexpr, KIND: tl.constexpr, METRIC: tl.constexpr,
    TOP: tl.constexpr, PRE: tl.constexpr, ELEMENT: tl.constexpr, STATISTICS: tl.constexpr, LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr, FOR_ZERO: tl.constexpr, FOR_ZERO_BYTE: tl.constexpr, TIE: tl.constexpr,
    SIGN: tl.constexpr, NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """Codes and scale bytes of the better of two scales for every tile of one tensor."""
    W: tl.constexpr = N if DTYPE == FP32 else N // 2
    tile = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    exists = tile < tiles
    group = tl.program_id(0) * 0
    row = (tile // columns) * 16
    column = tile % columns
    row_words = row_quads * 4
    start_ptr = x_ptr + row * row_words + column * W
    v = tl.zeros((B,), tl.float32)
    for i in range(16):
        most = largest(unpack(load_words(start_ptr + i * row_words, exists, W), W, DTYPE), N)
        v = tl.maximum(v, most, propagate_nan=tl.PropagateNan.ALL)
    base = pre_scale(v, numbers_ptr, group, PRE, STATISTICS, LARGEST)
    byte_six, six = scale_byte(base, SMALLEST, FOR_ZERO, FOR_ZERO_BYTE)
    byte_four, four = scale_byte(base * 1.5, SMALLEST, FOR_ZERO, FOR_ZERO_BYTE)
    error_six = _tile_error(
        start_ptr, row_words, exists, six, numbers_ptr, group, W, DTYPE, KIND, METRIC, TOP, ELEMENT, TIE, SIGN,
        NAN_CODE, ZERO_INPUT, WRAPS,
    )  # fmt: skip
    error_four = _tile_error(
        start_ptr, row_words, exists, four, numbers_ptr, group, W, DTYPE, KIND, METRIC, TOP, ELEMENT, TIE, SIGN,
        NAN_CODE, ZERO_INPUT, WRAPS,
    )  # fmt: skip
    better = error_four < error_six
    byte = tl.where(better, byte_four, byte_six)
    scale = tl.where(better, four, six)
    constant = element_constant(scale, numbers_ptr, group, ELEMENT)
    for i in range(16):
        x = unpack(load_words(start_ptr + i * row_words, exists, W), W, DTYPE)
        out = generic_codes(x, constant, scale, N, ELEMENT, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS)
        block = (row + i) * columns + column
        store_words(codes_ptr + block * (N // 8), out, exists, N // 8)
        tl.store(scales_ptr + scale_place(block, row + i, column, columns, SWIZZLED), byte.to(tl.uint8), mask=exists)
