"""One block of error feedback: codes and errors of its columns, one row per lane. (backends/reference/feedback.py)"""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.plain import round_element
from halfbyte.backends.gpu.triton.search import value_of_code


@triton.jit
def decide_block(
    x_ptr, aim_ptr, bytes_ptr, constant_ptr, scale_ptr, factor_ptr, codes_ptr, error_ptr, rows, x_stride, aim_stride,
    factor_stride, code_stride, error_stride,
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
        x = x + (tl.load(x_ptr + row * x_stride + i, mask=exists, other=0.0),)
    low = byte
    for j in tl.static_range(N):
        if DIVIDES:
            y = tl.div_rn(x[j], constant)
        else:
            y = x[j] * constant
        code, value = round_element(x[j], y, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS)
        goal = tl.load(aim_ptr + row * aim_stride + j, mask=exists, other=0.0)
        wrong = (value_of_code(code) * scale + 0.0) - goal
        tl.store(error_ptr + row * error_stride + j, wrong, mask=exists)
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
