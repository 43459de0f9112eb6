"""The exact searches over power-of-two scales: MXFP4 and MXFP8. (backends/reference/search.py)

    k = floor(log2 amax)     x' = x·2**-k     s' = 2**(byte−127)·2**-k     r = q·s' − x'
    error = Σ r·r, Σ w·(r·r), or rᵀHr, in index order

The plain kernel has already written codes and bytes; blocks for which a scale is found get new ones. A lane starts at
the largest scale that can win and goes down. Squared errors: the proof in docs/methods.md excludes scales above
2**(k−1) (E4M3 elements: 2**(k−7)), and once the clipped elements alone cost more than the best error, no smaller scale
can win. Hessian: where all codes are 0 all errors are equal, so the smallest such scale stands for all above it; the
way down ends at a norm bound, as in gpu/triton/hessian.py.
"""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.blocks import (
    bits_of,
    float_of,
    largest,
    load_words,
    pack_codes,
    place,
    round_e2m1,
    round_e4m3,
    scale_place,
    source,
    store_words,
    unpack,
)
from halfbyte.backends.gpu.triton.hessian import quadratic
from halfbyte.backends.gpu.triton.numbers import (
    FLOAT32_MAX,
    FP32,
    HESSIAN,
    UNIFORM,
    WEIGHTED,
)
from halfbyte.backends.gpu.triton.plain import (
    encode_e4m3,
    first_nearest,
    four_bytes,
    mx_codes,
    round_element,
    short_mx_codes,
    start_of_mx,
)
from halfbyte.backends.gpu.triton.scales import round_to
from halfbyte.backends.gpu.triton.search import (
    any_lane,
    value_of_code,
)


@triton.jit
def place_column(rows, columns, row_quads, B: tl.constexpr, W: tl.constexpr):
    """A program takes one column of blocks, one row per lane: index, first word, row, column, whether it exists."""
    pid = tl.program_id(0).to(tl.int64)
    column = pid % columns
    row = (pid // columns) * B + tl.arange(0, B)
    return row * columns + column, row * (row_quads * 4) + column * W, row, column, row < rows


@triton.jit
def power_of(byte):
    """2**(byte − 127); Inf for byte 255."""
    return tl.where(byte == 0, 5.877471754111438e-39, float_of(byte << 23))


@triton.jit
def exponent_of(v):
    """floor(log2 v) of a positive finite number."""
    small = v < 1.1754943508222875e-38
    exponent = ((bits_of(tl.where(small, v * 1.8446744073709552e19, v)) >> 23) & 0xFF) - 127
    return tl.where(small, exponent - 64, exponent)


@triton.jit
def by_exponent(x, exponent, N: tl.constexpr):
    """x' of a block, and 2**-k, which may be Inf. Above 1 it is applied as two factors, because it may be too large."""
    half = tl.where(exponent > 0, -exponent, (-exponent) // 2)
    first = power_of(half + 127)
    second = power_of(-exponent - half + 127)
    values = ()
    for i in tl.static_range(N):
        values = values + ((x[i] * first) * second,)
    return values, power_of(tl.minimum(127 - exponent, 255))


@triton.jit
def _quotient(x, byte, DTYPE: tl.constexpr, ROUNDED: tl.constexpr):
    """y: dividing by a power of two is multiplying by its reciprocal."""
    y = x * power_of(254 - byte)
    if ROUNDED:
        y = round_to(y, DTYPE)
    return y


@triton.jit
def _code(
    x, y, byte, WIDE: tl.constexpr, NEAREST: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr,
    NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr,
):  # fmt: skip
    if WIDE:
        return encode_e4m3(y, NAN_CODE)
    elif NEAREST:
        return first_nearest(x, power_of(byte))
    else:
        code, value = round_element(x, y, TIE, SIGN, NAN_CODE, ZERO_INPUT, False)
        return code


@triton.jit
def _value(code, y, WIDE: tl.constexpr):
    if WIDE:
        byte, magnitude = round_e4m3(tl.abs(y))
        return tl.where(y < 0, -magnitude, magnitude)
    else:
        return value_of_code(code)


@triton.jit
def _differences(
    x, scaled, byte, unit, N: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, NEAREST: tl.constexpr,
    ROUNDED: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr, NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr,
):  # fmt: skip
    """r of every element under one scale, and y."""
    by_scale = power_of(byte) * unit
    errors = ()
    quotients = ()
    for i in tl.static_range(N):
        y = _quotient(x[i], byte, DTYPE, ROUNDED)
        code = _code(x[i], y, byte, WIDE, NEAREST, TIE, SIGN, NAN_CODE, ZERO_INPUT)
        errors = errors + (_value(code, y, WIDE) * by_scale - scaled[i],)
        quotients = quotients + (y,)
    return errors, quotients


@triton.jit
def _sum(errors, quotients, weights_ptr, column, N: tl.constexpr, WIDE: tl.constexpr, OBJECTIVE: tl.constexpr):
    """Error of a block, and the part that comes from clipped elements: no smaller scale makes that part smaller."""
    most: tl.constexpr = 448.0 if WIDE else 6.0
    total = tl.zeros(errors[0].shape, tl.float32)
    clipped = tl.zeros(errors[0].shape, tl.float32)
    for i in tl.static_range(N):
        term = errors[i] * errors[i]
        if OBJECTIVE == WEIGHTED:
            term = tl.load(weights_ptr + column * N + i) * term
        clipped = clipped + tl.where(tl.abs(quotients[i]) >= most, term, 0.0)
        total = total + term
    return total, clipped


@triton.jit
def _least_squares(
    x, scaled, unit, exponent, searched, weights_ptr, column, N: tl.constexpr, DTYPE: tl.constexpr,
    OBJECTIVE: tl.constexpr, WIDE: tl.constexpr, NEAREST: tl.constexpr, ROUNDED: tl.constexpr, TIE: tl.constexpr,
    SIGN: tl.constexpr, NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr,
):  # fmt: skip
    """The byte of the least squared or weighted error, and that error: Inf where there is none."""
    most = largest(scaled, N)
    tried = tl.minimum(tl.maximum(exponent + (120 if WIDE else 126), 0), 254)
    best = tl.full(most.shape, float("inf"), tl.float32)
    best_byte = tried
    alive = searched
    going = any_lane(alive)
    while going:
        errors, quotients = _differences(
            x, scaled, tried, unit, N, DTYPE, WIDE, NEAREST, ROUNDED, TIE, SIGN, NAN_CODE, ZERO_INPUT
        )
        error, clipped = _sum(errors, quotients, weights_ptr, column, N, WIDE, OBJECTIVE)
        half = power_of(tl.maximum(tried - 1, 0)) * unit
        excluded = (tried > 0) & ((464.0 if WIDE else 7.0) * half >= most)
        better = alive & (excluded == 0) & (error <= best) & (error <= FLOAT32_MAX)
        best = tl.where(better, error, best)
        best_byte = tl.where(better, tried, best_byte)
        alive = alive & (tried > 0) & (clipped <= best)
        tried = tl.maximum(tried - 1, 0)
        going = any_lane(alive)
    return best_byte, best


@triton.jit(do_not_specialize=["bound_step", "rows", "columns", "row_quads"])
def improve_mx(
    x_ptr, codes_ptr, scales_ptr, matrices_ptr, bounds_ptr, bound_step, rows, columns, row_quads,
    B: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, SWIZZLED: tl.constexpr, OBJECTIVE: tl.constexpr,
    WIDE: tl.constexpr, NEAREST: tl.constexpr, ROUNDED: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr,
    NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr,
):  # fmt: skip
    """Codes and scale bytes of the least error, where there is one. `matrices_ptr`: triangles, or weights."""
    W: tl.constexpr = N if DTYPE == FP32 else N // 2
    block, first, row, column, exists = place_column(rows, columns, row_quads, B, W)
    x = unpack(load_words(x_ptr + first, exists, W), W, DTYPE)
    v = largest(x, N)
    searched = exists & (v > 0) & (v <= FLOAT32_MAX)
    exponent = tl.where(searched, exponent_of(v), 0)
    scaled, unit = by_exponent(x, exponent, N)
    if OBJECTIVE == HESSIAN:
        above: tl.constexpr = 138 if WIDE else 130  # y is at most half of the smallest element
        reach: tl.constexpr = (448.0 if WIDE else 6.0) * (4.0 if N == 16 else 5.66)  # ‖q‖ of a whole block
        matrix_ptr = matrices_ptr + column * (N * (N + 1) // 2)
        root = tl.load(bounds_ptr + bound_step * column) + tl.zeros(v.shape, tl.float32)
        slack = 8e-6 * tl.load(bounds_ptr + bound_step * column + 1)
        squares = tl.zeros(v.shape, tl.float32)
        for i in tl.static_range(N):
            squares = squares + scaled[i] * scaled[i]
        length = tl.sqrt(squares) * 1.0001
        norm = tl.zeros(v.shape, tl.float32)
        tried = tl.minimum(tl.maximum(exponent + above, 0), 254)
        best = tl.full(v.shape, float("inf"), tl.float32)
        best_byte = tried
        alive = searched
        going = any_lane(alive)
        while going:
            errors, quotients = _differences(
                x, scaled, tried, unit, N, DTYPE, WIDE, NEAREST, ROUNDED, TIE, SIGN, NAN_CODE, ZERO_INPUT
            )
            error = quadratic(errors, matrix_ptr, N)
            # The first scale leaves nothing but zeros, so that its error is that of x itself.
            squared = tl.maximum(error - slack * length * length, 0.0)
            norm = tl.where(tried == exponent + above, tl.sqrt(squared) * 0.9999, norm)
            better = alive & (error <= best) & (error <= FLOAT32_MAX)  # the smaller scale of equals
            best = tl.where(better, error, best)
            by_scale = power_of(tl.maximum(tried - 1, 0)) * unit
            least = tl.maximum(norm - (reach * root) * by_scale, 0.0)
            far = length + reach * by_scale
            hopeless = (root >= 0) & (least * least * 0.9999 > best + slack * far * far)
            best_byte = tl.where(better, tried, best_byte)
            alive = alive & (tried > 0) & (hopeless == 0)
            tried = tl.maximum(tried - 1, 0)
            going = any_lane(alive)
    else:
        best_byte, best = _least_squares(
            x, scaled, unit, exponent, searched, matrices_ptr, column, N, DTYPE, OBJECTIVE, WIDE, NEAREST, ROUNDED,
            TIE, SIGN, NAN_CODE, ZERO_INPUT,
        )  # fmt: skip
    found = searched & (best <= FLOAT32_MAX)
    codes = ()
    for i in tl.static_range(N):
        y = _quotient(x[i], best_byte, DTYPE, ROUNDED)
        codes = codes + (_code(x[i], y, best_byte, WIDE, NEAREST, TIE, SIGN, NAN_CODE, ZERO_INPUT),)
    if WIDE:
        out = ()
        for i in tl.static_range(N // 4):
            out = out + (four_bytes(codes, 4 * i),)
        store_words(codes_ptr + block * (N // 4), out, found, N // 4)
    else:
        store_words(codes_ptr + block * (N // 8), pack_codes(codes, N), found, N // 8)
    tl.store(scales_ptr + scale_place(block, row, column, columns, SWIZZLED), best_byte.to(tl.uint8), mask=found)


# --- least squared error of E2M1, for usual blocks ---


@triton.jit
def _squares_under(scaled, N: tl.constexpr, DTYPE: tl.constexpr, INVERSE: tl.constexpr):
    """Error of a block under the scale 2**k/INVERSE, by the reference's own sums.

    q·s' is exact, and so is r·r of 16-bit elements: r has no more bits than the element. So fusing changes no bit.
    """
    total = tl.zeros(scaled[0].shape, tl.float32)
    for i in tl.static_range(N):
        q = round_e2m1(scaled[i] * INVERSE)
        if INVERSE > 2.0:
            q = tl.minimum(q, 6.0)
        r = tl.fma(q, 1.0 / INVERSE, 0.0 - scaled[i])
        if DTYPE == FP32:
            total = total + r * r
        else:
            total = tl.fma(r, r, total)
    return total


@triton.jit(do_not_specialize=["blocks", "columns", "row_quads"])
def quantize_mx_optimal(
    x_ptr, codes_ptr, scales_ptr, bytes_ptr, constants_ptr, split_ptr, blocks, columns, row_quads,
    B: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, MAP: tl.constexpr, SWIZZLED: tl.constexpr,
    ROUNDED: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr, NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Codes and scale bytes of the least squared error: E2M1 elements whose codes have the short way (plain.py).

    Only three scales can win, in units of 2**k, k = floor(log2 amax): 1/2 if the amax M exceeds 1.75, 1/4 and 1/8. The
    proof of docs/methods.md excludes larger ones. For a smaller one, 2**-m/4 with m > 1, take 2**-m/4 as the unit: M is
    at least 4·2**m and clipped to 6, which costs at least (4·2**m − 6)² more than under 1/4. The other elements gain at
    most half a step of 1/4, squared, each: 31·4**(m−2) together. That is less: 31 against 100, 124 against 676 …

    A program with a block for which numbers could under- or overflow, or with NaN or Inf, tries scale by scale.
    """
    W: tl.constexpr = N if DTYPE == FP32 else N // 2
    block, first, row, column, group, exists = place(x_ptr, columns, row_quads, 1, blocks, B, W, MAP, 0)
    words = load_words(source(x_ptr, group, MAP) + first, exists, W)
    x = unpack(words, W, DTYPE)
    v = largest(x, N)
    byte, constant = start_of_mx(v, exists, bytes_ptr, constants_ptr, split_ptr, DTYPE)
    byte = byte.to(tl.int32)
    zero = v == 0
    usual = (v >= 8.077935669463161e-28) & (v <= (4.0 if ROUNDED else 32768.0))  # 2**-90
    usual = usual | (zero & (constant >= 1.0) & (constant <= FLOAT32_MAX)) | (exists == 0)
    if tl.min(usual.to(tl.int32), axis=0) > 0:
        power = bits_of(v) & 0x7F800000
        unit = float_of(0x7F000000 - tl.maximum(power, 0x00800000))  # 2**-k
        scaled = ()
        for i in tl.static_range(N):
            scaled = scaled + (tl.abs(x[i]) * unit,)
        best = _squares_under(scaled, N, DTYPE, 4.0)
        small = _squares_under(scaled, N, DTYPE, 8.0)
        large = _squares_under(scaled, N, DTYPE, 2.0)
        less = tl.where((v * unit > 1.75) & (large < best), 1, 2)  # the smaller scale of equals
        best = tl.where(less == 1, large, best)
        less = tl.where(small <= best, 3, less)
        found = (power >> 23) - less
        byte = tl.where(zero, byte, found)
        constant = tl.where(zero, constant, float_of((254 - found) << 23))
        out = short_mx_codes(words, x, constant, N, W, DTYPE, TIE, SIGN, ZERO_INPUT, ASM)
    else:
        searched = exists & (v > 0) & (v <= FLOAT32_MAX)
        exponent = tl.where(searched, exponent_of(v), 0)
        scaled, unit = by_exponent(x, exponent, N)
        found, best = _least_squares(
            x, scaled, unit, exponent, searched, constants_ptr, column, N, DTYPE, UNIFORM, False, False, ROUNDED, TIE,
            SIGN, NAN_CODE, ZERO_INPUT,
        )  # fmt: skip
        better = searched & (best <= FLOAT32_MAX)
        byte = tl.where(better, found, byte)
        constant = tl.where(better, power_of(254 - found), constant)
        out = mx_codes(x, constant, N, DTYPE, False, ROUNDED, TIE, SIGN, NAN_CODE, ZERO_INPUT)
    store_words(codes_ptr + block * (N // 8), out, exists, N // 8)
    tl.store(scales_ptr + scale_place(block, row, column, columns, SWIZZLED), byte.to(tl.uint8), mask=exists)
