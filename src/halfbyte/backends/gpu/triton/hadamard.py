"""The random Hadamard transform of groups of sixteen, written to new memory. (contracts/hadamard.py)

    y_j = Σ_i x_i·(±1/4), added in index order, rounded once to the operand's dtype

A thread holds a group. The entries of the matrix are ±1/4: x_i/4 is rounded once and then added or subtracted, which
gives the same as a product with ±1/4. Rows may be the columns of a transpose, so elements are loaded one by one.
"""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.blocks import (
    bits_of,
    float_of,
    store_words,
)
from halfbyte.backends.gpu.triton.numbers import (
    BF16,
    FP16,
    FP32,
)

GROUP = tl.constexpr(16)


@triton.jit
def _value(bits, DTYPE: tl.constexpr):
    if DTYPE == BF16:
        return float_of(bits.to(tl.int32) << 16)
    elif DTYPE == FP16:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return float_of(bits)


@triton.jit
def _rounded(y, DTYPE: tl.constexpr):
    """Bits of y in a 16-bit dtype, nearest even; one NaN."""
    if DTYPE == FP16:
        return y.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    else:
        bits = bits_of(y)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
        return tl.where(y != y, 0x7FC0, rounded)


@triton.jit
def _with_term(total, quarter, ROW: tl.constexpr, J: tl.constexpr, SIGNS: tl.constexpr):
    """The sum with x_i·(±1/4) added: entry (i, j) is negative if i & j has an odd number of bits, or sign i is −1."""
    common: tl.constexpr = ROW & J
    minus: tl.constexpr = ((common ^ (common >> 1) ^ (common >> 2) ^ (common >> 3)) ^ (SIGNS >> ROW)) & 1
    if minus:
        return total - quarter
    else:
        return total + quarter


@triton.jit
def _transformed(quarters, J: tl.constexpr, SIGNS: tl.constexpr):
    """y_j from x_i/4; bit i of SIGNS is set where the sign vector has −1."""
    total = tl.zeros(quarters[0].shape, tl.float32)
    for i in tl.static_range(GROUP):
        total = _with_term(total, quarters[i], i, J, SIGNS)
    return total


@triton.jit(do_not_specialize=["rows", "groups", "row_stride", "element_stride"])
def rotate(
    x_ptr, out_ptr, rows, groups, row_stride, element_stride,
    B: tl.constexpr, DTYPE: tl.constexpr, SIGNS: tl.constexpr, ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    """Transform `groups` groups of every row. ROWS_FIRST: neighbouring lanes take neighbouring rows (a transpose)."""
    index = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    exists = index < rows * groups
    if ROWS_FIRST:
        group = index // rows
        row = index - group * rows
    else:
        row = index // groups
        group = index - row * groups
    at = x_ptr + row * row_stride + group * (GROUP * element_stride)
    quarters = ()
    for i in tl.static_range(GROUP):
        quarters = quarters + (_value(tl.load(at + i * element_stride, mask=exists, other=0), DTYPE) * 0.25,)
    words = ()
    if DTYPE == FP32:
        for j in tl.static_range(GROUP):
            words = words + (bits_of(_transformed(quarters, j, SIGNS)),)
    else:
        for j in tl.static_range(GROUP // 2):
            low = _rounded(_transformed(quarters, 2 * j, SIGNS), DTYPE)
            words = words + (low | (_rounded(_transformed(quarters, 2 * j + 1, SIGNS), DTYPE) << 16),)
    count: tl.constexpr = GROUP if DTYPE == FP32 else GROUP // 2
    store_words(out_ptr + (row * groups + group) * count, words, exists, count)
