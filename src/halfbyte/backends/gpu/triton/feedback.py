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
def bring_block(
    x_ptr, aim_ptr, error_ptr, factor_ptr, whole_ptr, rows, terms, factor_stride, B: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Take the errors of the batch's earlier columns into a block, and find it as it would be if none of it were
    rounded: (rows, N).

    x, aim: at the block. error: at the first of the `terms` earlier columns. factor: at the row of that column and the
    column of the block.
    """
    row = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    exists = row < rows
    x = ()
    for k in tl.static_range(N):
        x = x + (tl.load(x_ptr + k * rows + row, mask=exists, other=0.0),)
    for j in range(terms):
        wrong = tl.load(error_ptr + j * rows + row, mask=exists, other=0.0)
        updated = ()
        for k in tl.static_range(N):
            updated = updated + (x[k] - wrong * tl.load(factor_ptr + j * factor_stride + k),)
        x = updated
    own = factor_ptr + terms * factor_stride
    for j in tl.static_range(N):
        tl.store(x_ptr + j * rows + row, x[j], mask=exists)
    for j in tl.static_range(N):
        moved = x[j] - tl.load(aim_ptr + j * rows + row, mask=exists, other=0.0)
        rest = ()
        for k in tl.static_range(N):
            if k > j:
                rest = rest + (x[k] - moved * tl.load(own + j * factor_stride + k),)
            else:
                rest = rest + (x[k],)
        x = rest
    for k in tl.static_range(N):
        tl.store(whole_ptr + row * N + k, x[k], mask=exists)


@triton.jit
def decide_block(
    x_ptr, aim_ptr, bytes_ptr, constant_ptr, scale_ptr, factor_ptr, codes_ptr, error_ptr, rows, factor_stride,
    code_stride,
    B: tl.constexpr, N: tl.constexpr, DIVIDES: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr,
    NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """Round the columns of a block in turn; each error is made good by the columns after it."""
    row = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    exists = row < rows
    byte = tl.load(bytes_ptr + row, mask=exists, other=0).to(tl.int32)
    constant = tl.load(constant_ptr + byte)
    scale = tl.load(scale_ptr + byte)
    x = ()
    for i in tl.static_range(N):
        x = x + (tl.load(x_ptr + i * rows + row, mask=exists, other=0.0),)
    low = byte
    for j in tl.static_range(N):
        if DIVIDES:
            y = tl.div_rn(x[j], constant)
        else:
            y = x[j] * constant
        code, value = round_element(x[j], y, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS)
        goal = tl.load(aim_ptr + j * rows + row, mask=exists, other=0.0)
        wrong = (value_of_code(code) * scale + 0.0) - goal
        tl.store(error_ptr + j * rows + row, wrong, mask=exists)
        rest = ()
        for k in tl.static_range(N):
            if k > j:
                rest = rest + (x[k] - wrong * tl.load(factor_ptr + j * factor_stride + k),)
            else:
                rest = rest + (x[k],)
        x = rest
        if j % 2 == 0:
            low = code
        else:
            tl.store(codes_ptr + row * code_stride + j // 2, (low | (code << 4)).to(tl.uint8), mask=exists)
