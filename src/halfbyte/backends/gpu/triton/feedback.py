"""Error feedback in columns of rows: every number takes its terms one after the other, each operation rounded once.

Matrices lie as (columns, rows), so that lanes, one row each, read neighbours. (backends/reference/feedback.py)
"""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.plain import round_element
from halfbyte.backends.gpu.triton.search import value_of_code


@triton.jit
def subtract_products(
    start_ptr, out_ptr, left_ptr, right_ptr, columns, rows, terms, left_stride,
    C: tl.constexpr, R: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """out[c, r] = start[c, r] − left[0, c]·right[0, r] − left[1, c]·right[1, r] − …; U divides the number of terms."""
    c = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    r = tl.program_id(1).to(tl.int64) * R + tl.arange(0, R)
    has_c, has_r = c < columns, r < rows
    place, exists = c[:, None] * rows + r[None, :], has_c[:, None] & has_r[None, :]
    found = tl.load(start_ptr + place, mask=exists, other=0.0)
    left, right = left_ptr + c, right_ptr + r
    for _ in range(0, terms, U):
        for i in tl.static_range(U):
            a = tl.load(left + i * left_stride, mask=has_c, other=0.0)
            b = tl.load(right + i * rows, mask=has_r, other=0.0)
            found = found - a[:, None] * b[None, :]
        left += U * left_stride
        right += U * rows
    tl.store(out_ptr + place, found, mask=exists)


@triton.jit
def column_of(x, columns, j):
    """Column j of x (rows, N), bit for bit: a sum of floats would lose the sign of a zero."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.sum(tl.where(columns[None, :] == j, bits, 0), axis=1).to(tl.float32, bitcast=True)


@triton.jit
def bring_block(
    x_ptr, aim_ptr, error_ptr, factor_ptr, whole_ptr, rows, terms, factor_stride, B: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Take the errors of the batch's earlier columns into a block, and find it as it would be if none of it were
    rounded: (rows, N).

    x, aim: at the block. error: at the first of the `terms` earlier columns. factor: at the row of that column and the
    column of the block. Loops over columns run, and are not unrolled: that would compile for minutes.
    """
    row = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    exists, columns = row < rows, tl.arange(0, N)
    place = columns[None, :] * rows + row[:, None]
    x = tl.load(x_ptr + place, mask=exists[:, None], other=0.0)
    for j in range(terms):
        wrong = tl.load(error_ptr + j * rows + row, mask=exists, other=0.0)
        x = x - wrong[:, None] * tl.load(factor_ptr + j * factor_stride + columns)[None, :]
    tl.store(x_ptr + place, x, mask=exists[:, None])
    own = factor_ptr + terms * factor_stride
    for j in range(N):
        moved = column_of(x, columns, j) - tl.load(aim_ptr + j * rows + row, mask=exists, other=0.0)
        later = x - moved[:, None] * tl.load(own + j * factor_stride + columns)[None, :]
        x = tl.where(columns[None, :] > j, later, x)
    tl.store(whole_ptr + row[:, None] * N + columns[None, :], x, mask=exists[:, None])


@triton.jit
def decide_block(
    x_ptr, aim_ptr, bytes_ptr, constant_ptr, scale_ptr, factor_ptr, codes_ptr, error_ptr, rows, factor_stride,
    code_stride,
    B: tl.constexpr, N: tl.constexpr, DIVIDES: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr,
    NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """Round the columns of a block in turn; each error is made good by the columns after it."""
    row = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    exists, columns = row < rows, tl.arange(0, N)
    byte = tl.load(bytes_ptr + row, mask=exists, other=0).to(tl.int32)
    constant = tl.load(constant_ptr + byte)
    scale = tl.load(scale_ptr + byte)
    x = tl.load(x_ptr + columns[None, :] * rows + row[:, None], mask=exists[:, None], other=0.0)
    low = byte
    for j in range(N):
        own = column_of(x, columns, j)
        if DIVIDES:
            y = tl.div_rn(own, constant)
        else:
            y = own * constant
        code, value = round_element(own, y, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS)
        goal = tl.load(aim_ptr + j * rows + row, mask=exists, other=0.0)
        wrong = (value_of_code(code) * scale + 0.0) - goal
        tl.store(error_ptr + j * rows + row, wrong, mask=exists)
        later = x - wrong[:, None] * tl.load(factor_ptr + j * factor_stride + columns)[None, :]
        x = tl.where(columns[None, :] > j, later, x)
        odd = j % 2 == 1
        packed = (low | (code << 4)).to(tl.uint8)
        tl.store(codes_ptr + row * code_stride + j // 2, packed, mask=exists & odd)
        low = code
