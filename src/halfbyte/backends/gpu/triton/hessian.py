"""The search through a Hessian: rᵀHr over every scale. (backends/reference/search.py, native/searches/nvfp4_exact.inc)

    error = Σ_i r_i·(h_ii·r_i + Σ_{j>i} (2·h_ij)·r_j), both sums in index order

A program takes one column of blocks, one row per lane, so that all lanes read the same matrix. Scales are skipped only
where they cannot win:
- Above a scale under which every code is 0, all errors are equal, and the smaller scale wins.
- The best case of a scale is ‖x‖_H − root·‖q‖·s' with ‖q‖ ≤ 6·√N. Below a scale whose best case exceeds the best error
  found, by more than float32 sums can be off, the others are worse still.
"""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.blocks import (
    decode_e4m3,
    largest,
    load_words,
    round_e4m3,
    unpack,
)
from halfbyte.backends.gpu.triton.numbers import (
    FLOAT32_MAX,
    FP32,
    ONE_GROUP,
    SEARCHED,
    UNIT,
)
from halfbyte.backends.gpu.triton.scales import (
    number,
    pre_scale,
    scale_byte,
)
from halfbyte.backends.gpu.triton.search import (
    any_lane,
    differences,
    finish,
    scaled_values,
)


@triton.jit
def quadratic(r, matrix_ptr, N: tl.constexpr):
    """rᵀHr by the upper triangle, row by row, doubled off the diagonal."""
    total = tl.zeros(r[0].shape, tl.float32)
    for i in tl.static_range(N):
        at = i * N - i * (i - 1) // 2
        inner = tl.load(matrix_ptr + at) * r[i]
        for j in tl.static_range(i + 1, N):
            inner = inner + tl.load(matrix_ptr + at + j - i) * r[j]
        total = total + r[i] * inner
    return total


@triton.jit(do_not_specialize=["bound_step", "rows", "columns", "row_quads", "group_blocks"])
def quantize_hessian(
    x_ptr, codes_ptr, scales_ptr, numbers_ptr, matrices_ptr, bounds_ptr, bound_step, rows, columns, row_quads,
    group_blocks,
    B: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, GROUP: tl.constexpr, SWIZZLED: tl.constexpr,
    FIRST: tl.constexpr, PRE: tl.constexpr, ELEMENT: tl.constexpr, STATISTICS: tl.constexpr, LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr, FOR_ZERO: tl.constexpr, FOR_ZERO_BYTE: tl.constexpr, TIE: tl.constexpr,
    SIGN: tl.constexpr, NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr, WRAPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Codes and scale bytes of least rᵀHr."""
    W: tl.constexpr = N if DTYPE == FP32 else N // 2
    pid = tl.program_id(0).to(tl.int64)
    column = pid % columns
    row = (pid // columns) * B + tl.arange(0, B)
    exists = row < rows
    block = row * columns + column
    if GROUP == ONE_GROUP:
        group = pid * 0
    else:
        group = tl.where(exists, block // group_blocks, 0)
    words = load_words(x_ptr + row * (row_quads * 4) + column * W, exists, W)
    x = unpack(words, W, DTYPE)
    v = largest(x, N)
    byte, scale = scale_byte(
        pre_scale(v, numbers_ptr, group, PRE, STATISTICS, LARGEST), SMALLEST, FOR_ZERO, FOR_ZERO_BYTE
    )
    searched = exists & (v * number(numbers_ptr, group, SEARCHED) > 0) & (v <= FLOAT32_MAX)
    unit = number(numbers_ptr, group, UNIT)
    scaled = scaled_values(x, numbers_ptr, group, N)
    most = largest(scaled, N)
    matrix_ptr = matrices_ptr + column * (N * (N + 1) // 2)
    root = tl.load(bounds_ptr + bound_step * column) + tl.zeros(v.shape, tl.float32)
    reach: tl.constexpr = 24.0 if N == 16 else 33.95  # 6·√N: ‖q‖ of a whole block
    slack = (4e-6 if N == 16 else 8e-6) * tl.load(bounds_ptr + bound_step * column + 1)
    squares = tl.zeros(v.shape, tl.float32)
    for i in tl.static_range(N):
        squares = squares + scaled[i] * scaled[i]
    length = tl.sqrt(squares) * 1.0001
    norm = tl.zeros(v.shape, tl.float32)
    nearest, value = round_e4m3(tl.where(searched, most / (unit * 6.0), 1.0))
    nearest = tl.maximum(nearest, FIRST)
    best = tl.full(v.shape, float("inf"), tl.float32)
    best_byte = nearest
    # One loop for all three steps (x itself, up from the nearest, down), because each copy of the form compiles slowly.
    direction = tl.program_id(0) * 0 + 1
    offset = direction - 2
    alive = searched
    going = any_lane(alive)
    while going:
        tried = tl.minimum(tl.maximum(nearest + direction * offset, FIRST), 126)
        r, y = differences(
            x, scaled, tried, numbers_ptr, group, N, False, ELEMENT, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS
        )
        measured = ()
        for i in tl.static_range(N):
            measured = measured + (tl.where(offset < 0, scaled[i], r[i]),)
        error = quadratic(measured, matrix_ptr, N)
        norm = tl.where(offset < 0, tl.sqrt(tl.maximum(error - slack * length * length, 0.0)) * 0.9999, norm)
        wins = (error < best) | ((direction < 0) & (error == best))  # the smaller scale of equals
        better = alive & (offset >= 0) & wins & (error <= FLOAT32_MAX)
        best = tl.where(better, error, best)
        best_byte = tl.where(better, tried, best_byte)
        following = nearest + direction * (offset + 1)
        by_scale = decode_e4m3(tl.maximum(following, FIRST)) * unit
        least = tl.maximum(norm - (reach * root) * by_scale, 0.0)
        far = length + reach * by_scale
        hopeless = (root >= 0) & (least * least * 0.9999 > best + slack * far * far)
        above = (following > 126) | (largest(y, N) <= 0.25)
        below = (following < FIRST) | hopeless
        ends = ((direction > 0) & above) | ((direction < 0) & below)
        alive = alive & ((ends == 0) | (offset < 0))
        turns = (direction > 0) & (any_lane(alive) == 0)
        alive = (alive & (turns == 0)) | (searched & turns & (nearest - 1 >= FIRST))
        offset = tl.where(turns, 1, offset + 1)
        direction = tl.where(turns, -1, direction)
        going = any_lane(alive)
    byte = tl.where(searched & (best <= FLOAT32_MAX), best_byte, byte)  # where no error is finite the amax's byte stays
    finish(
        codes_ptr, scales_ptr, numbers_ptr, words, x, byte, block, row, column, columns, group, exists,
        N, W, DTYPE, SWIZZLED, False, ELEMENT, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS, ASM,
    )  # fmt: skip
