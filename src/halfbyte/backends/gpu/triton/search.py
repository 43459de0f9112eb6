"""The exact searches of NVFP4: the scale of least squared or weighted error. (backends/reference/search.py)

    x' = x·2**-k        s' = S·(g·2**-k)        r = q·s' − x'        error = Σ r·r or Σ w·(r·r), in index order

A lane starts at the scale nearest to amax/6. It goes up until the proof in docs/methods.md excludes the scales, then
down until clipped elements alone cost more than the best error found. Programs are small, because all lanes of a
program run as long as the slowest one.
"""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.blocks import (
    decode_e4m3,
    float_of,
    largest,
    load_words,
    magnitudes,
    place,
    raw_code,
    round_e2m1,
    round_e4m3,
    scale_place,
    source,
    store_words,
    unpack,
)
from halfbyte.backends.gpu.triton.estimate import estimate_best
from halfbyte.backends.gpu.triton.numbers import (
    FLOAT32_MAX,
    FP32,
    NO_UNDERFLOW,
    PRESCALE,
    PRESCALE_AGAIN,
    REGULAR,
    SEARCHED,
    UNIFORM,
    UNIT,
    WEIGHTED,
)
from halfbyte.backends.gpu.triton.plain import (
    generic_codes,
    pack_signed,
    round_element,
)
from halfbyte.backends.gpu.triton.scales import (
    element,
    element_constant,
    number,
    pre_scale,
    scale_byte,
)


@triton.jit
def any_lane(condition):
    """Whether it holds for some lane of the program."""
    return tl.max(condition.to(tl.int32), axis=0) > 0


@triton.jit
def value_of_byte(byte):
    """E4M3 value of a byte below 128, NaN included."""
    return tl.where(byte == 127, float("nan"), decode_e4m3(byte))


@triton.jit
def value_of_code(code):
    """E2M1 value of a code: its bits as those of a float, times 2**126."""
    magnitude = float_of((code & 7) << 22) * 8.507059173023462e37  # 2**126
    return tl.where((code & 8) != 0, -magnitude, magnitude)


@triton.jit
def scaled_values(x, numbers_ptr, group, N: tl.constexpr):
    """x' of a block. 2**-k comes as two factors, because it may be too large for one float."""
    first = number(numbers_ptr, group, PRESCALE)
    second = number(numbers_ptr, group, PRESCALE_AGAIN)
    values = ()
    for i in tl.static_range(N):
        values = values + ((x[i] * first) * second,)
    return values


@triton.jit
def differences(
    x, scaled, byte, numbers_ptr, group, N: tl.constexpr, SHORT: tl.constexpr, ELEMENT: tl.constexpr, TIE: tl.constexpr,
    SIGN: tl.constexpr, NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """r of every element under one scale, and y; SHORT: of magnitudes, up to sign."""
    scale = decode_e4m3(byte)
    by_scale = scale * number(numbers_ptr, group, UNIT)
    constant = element_constant(scale, numbers_ptr, group, ELEMENT)
    errors = ()
    quotients = ()
    for i in tl.static_range(N):
        if SHORT:
            y = tl.abs(x[i]) * constant
            errors = errors + (round_e2m1(tl.minimum(y, 6.0)) * by_scale - tl.abs(scaled[i]),)
        else:
            y = element(x[i], constant, scale, ELEMENT)
            code, value = round_element(x[i], y, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS)
            errors = errors + (value_of_code(code) * by_scale - scaled[i],)
        quotients = quotients + (y,)
    return errors, quotients


@triton.jit
def _objective(errors, scaled, by_scale, weights, N: tl.constexpr, KIND: tl.constexpr):
    """Error of a block; with weights also what elements beyond 6·s' cost at least, whatever their codes are.

    A smaller scale makes that cost larger.
    """
    total = tl.zeros(errors[0].shape, tl.float32)
    clipped = tl.zeros(errors[0].shape, tl.float32)
    for i in tl.static_range(N):
        term = errors[i] * errors[i]
        if KIND == WEIGHTED:
            term = weights[i] * term
            beyond = tl.maximum(tl.abs(scaled[i]) - 6.0 * by_scale, 0.0)
            clipped = clipped + weights[i] * (beyond * beyond)
        total = total + term
    return total, clipped


@triton.jit
def quarters_of(scaled, N: tl.constexpr):
    """The largest magnitude of each quarter of a block."""
    out = ()
    for i in tl.static_range(4):
        most = tl.abs(scaled[i * (N // 4)])
        for j in tl.static_range(1, N // 4):
            most = tl.maximum(most, tl.abs(scaled[i * (N // 4) + j]))
        out = out + (most,)
    return out


@triton.jit
def _clipping(quarters, by_scale):
    """A lower bound on the cost of four clipped elements; a little below the computed one, to be safe from rounding."""
    bound = tl.zeros(by_scale.shape, tl.float32)
    for i in tl.static_range(4):
        beyond = tl.maximum(quarters[i] - 6.0 * by_scale, 0.0)
        bound = bound + beyond * beyond
    return bound * 0.99999


@triton.jit
def excluded(byte, most, unit):
    """True if half the scale is a scale too (odd bytes below 16 have no half) and 7 times that half reaches the amax.

    Then the half is no worse (docs/methods.md).
    """
    has_half = (byte > 15) | ((byte & 1) == 0)
    return has_half & (7.0 * ((decode_e4m3(byte) * 0.5) * unit) >= most)


@triton.jit
def exact_search(
    x, scaled, quarters, weights, byte, most, unit, nearest, last, searched, numbers_ptr, group,
    N: tl.constexpr, SHORT: tl.constexpr, OBJECTIVE: tl.constexpr, FIRST: tl.constexpr, ELEMENT: tl.constexpr,
    TIE: tl.constexpr, SIGN: tl.constexpr, NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """The best byte and its error, by the reference's own sums; `byte` and Inf where there is nothing to search."""
    best = tl.full(most.shape, float("inf"), tl.float32)
    best_byte = nearest
    steps = tl.max(tl.where(searched, last - nearest + 1, 0), axis=0)
    for up in range(0, steps):
        tried = tl.minimum(nearest + up, 126)
        allowed = searched & (nearest + up <= 126) & (excluded(tried, most, unit) == 0)
        errors, quotients = differences(
            x, scaled, tried, numbers_ptr, group, N, SHORT, ELEMENT, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS
        )
        error, clipped = _objective(errors, scaled, decode_e4m3(tried) * unit, weights, N, OBJECTIVE)
        better = allowed & (error < best)
        best = tl.where(better, error, best)
        best_byte = tl.where(better, tried, best_byte)
    # Down to where clipping the largest element alone costs more than the best error; with weights, to the first byte.
    if OBJECTIVE == UNIFORM:
        usable = searched & (best < FLOAT32_MAX) & (best > 1e-30)  # squares that underflow bound nothing
        # Where every code is zero the root exceeds the largest element; the rounding takes no negative numbers.
        least, value = round_e4m3(tl.where(usable, tl.maximum(most - tl.sqrt(best), 0.0) / (unit * 6.0), 0.0))
        least = tl.maximum(least - 1, FIRST)
    else:
        least = nearest * 0 + FIRST
    steps = tl.max(tl.where(searched, nearest - least, 0), axis=0)
    alive = searched
    for down in range(1, steps + 1):
        tried = tl.maximum(nearest - down, FIRST)
        alive = alive & (nearest - down >= FIRST)
        if OBJECTIVE == UNIFORM:
            alive = alive & (_clipping(quarters, decode_e4m3(tried) * unit) <= best)
        if any_lane(alive):
            errors, quotients = differences(
                x, scaled, tried, numbers_ptr, group, N, SHORT, ELEMENT, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS
            )
            error, clipped = _objective(errors, scaled, decode_e4m3(tried) * unit, weights, N, OBJECTIVE)
            better = alive & (excluded(tried, most, unit) == 0)
            better = better & (error <= best) & (error <= FLOAT32_MAX)  # the smaller scale of equals
            best = tl.where(better, error, best)
            best_byte = tl.where(better, tried, best_byte)
            if OBJECTIVE == WEIGHTED:
                alive = alive & (clipped * 0.99999 <= best)
    return tl.where(searched & (best <= FLOAT32_MAX), best_byte, byte), best  # no finite error: the amax's byte stays


@triton.jit(do_not_specialize=["blocks", "columns", "row_quads", "group_blocks"])
def quantize_optimal(
    x_ptr, codes_ptr, scales_ptr, numbers_ptr, weights_ptr, blocks, columns, row_quads, group_blocks,
    B: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, MAP: tl.constexpr, GROUP: tl.constexpr,
    SWIZZLED: tl.constexpr, SHORT: tl.constexpr, OBJECTIVE: tl.constexpr, FIRST: tl.constexpr, PRE: tl.constexpr,
    ELEMENT: tl.constexpr, STATISTICS: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    FOR_ZERO: tl.constexpr, FOR_ZERO_BYTE: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr,
    NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr, WRAPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Codes and scale bytes of least squared or weighted error."""
    W: tl.constexpr = N if DTYPE == FP32 else N // 2
    block, first, row, column, group, exists = place(x_ptr, columns, row_quads, group_blocks, blocks, B, W, MAP, GROUP)
    words = load_words(source(x_ptr, group, MAP) + first, exists, W)
    x = unpack(words, W, DTYPE)
    v = largest(x, N)
    byte, scale = scale_byte(
        pre_scale(v, numbers_ptr, group, PRE, STATISTICS, LARGEST), SMALLEST, FOR_ZERO, FOR_ZERO_BYTE
    )
    searched = exists & (v * number(numbers_ptr, group, SEARCHED) > 0) & (v <= FLOAT32_MAX)
    unit = number(numbers_ptr, group, UNIT)
    scaled = scaled_values(x, numbers_ptr, group, N)
    quarters = quarters_of(scaled, N)
    most = tl.maximum(tl.maximum(quarters[0], quarters[1]), tl.maximum(quarters[2], quarters[3]))
    weights = ()
    if OBJECTIVE == WEIGHTED:
        for i in tl.static_range(N):
            weights = weights + (tl.load(weights_ptr + column * N + i, mask=exists, other=0.0),)
    nearest, value = round_e4m3(tl.where(searched, most / (unit * 6.0), 1.0))
    nearest = tl.maximum(nearest, FIRST)
    # Up to the last scale below 2·amax/7. Among the subnormal scales an odd byte further up may be allowed again.
    last, value = round_e4m3(tl.where(searched, most / (unit * 3.5), 1.0))
    if SHORT and OBJECTIVE == UNIFORM and N == 16:
        # Estimates assume y = x'/s', which fails where the contract's factor is clamped or loses precision.
        inside = (nearest >= 32) & (most <= 2688.0 * unit) & (most * number(numbers_ptr, group, REGULAR) > 0)
        if any_lane(searched & (inside == 0)):
            last = tl.minimum(tl.maximum(last, 16), 126)
            byte, error = exact_search(
                x, scaled, quarters, weights, byte, most, unit, nearest, last, searched, numbers_ptr, group, N, SHORT,
                OBJECTIVE, FIRST, ELEMENT, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS,
            )  # fmt: skip
        else:
            found, unclear = estimate_best(
                magnitudes(scaled, N), quarters, most, unit, nearest, last, searched, N, 24, ASM
            )
            if any_lane(unclear):
                byte, error = exact_search(
                    x, scaled, quarters, weights, byte, most, unit, nearest, last, searched, numbers_ptr, group, N,
                    SHORT, OBJECTIVE, FIRST, ELEMENT, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS,
                )  # fmt: skip
            else:
                byte = tl.where(searched, found, byte)
    else:
        last = tl.minimum(tl.maximum(last, 16), 126)
        byte, error = exact_search(
            x, scaled, quarters, weights, byte, most, unit, nearest, last, searched, numbers_ptr, group, N, SHORT,
            OBJECTIVE, FIRST, ELEMENT, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS,
        )  # fmt: skip
    finish(
        codes_ptr, scales_ptr, numbers_ptr, words, x, byte, block, row, column, columns, group, exists,
        N, W, DTYPE, SWIZZLED, SHORT, ELEMENT, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS, ASM,
    )  # fmt: skip


@triton.jit
def finish(
    codes_ptr, scales_ptr, numbers_ptr, words, x, byte, block, row, column, columns, group, exists,
    N: tl.constexpr, W: tl.constexpr, DTYPE: tl.constexpr, SWIZZLED: tl.constexpr, SHORT: tl.constexpr,
    ELEMENT: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr, NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr,
    WRAPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Codes of the chosen bytes."""
    scale = value_of_byte(byte)
    constant = element_constant(scale, numbers_ptr, group, ELEMENT)
    if SHORT:
        raw = ()
        for i in tl.static_range(N):
            raw = raw + (raw_code(tl.minimum(tl.abs(x[i]) * constant, 6.0)),)
        if number(numbers_ptr, group, NO_UNDERFLOW) > 0:
            packed = pack_signed(raw, words, x, constant, N, W, DTYPE, ASM)
        else:
            packed = pack_signed(raw, words, x, constant, N, W, FP32, ASM)  # signs of y, which may be zero
        out = ()
        for i in tl.static_range(N // 8):
            out = out + (tl.where(byte == 127, 0, packed[i]),)
    else:
        out = generic_codes(x, constant, scale, N, ELEMENT, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS)
    store_words(codes_ptr + block * (N // 8), out, exists, N // 8)
    tl.store(scales_ptr + scale_place(block, row, column, columns, SWIZZLED), byte.to(tl.uint8), mask=exists)
