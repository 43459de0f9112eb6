"""Tensor-level numbers and block scales: amax, what contracts make of it, block scale bytes, element constants.

The formulas are those of contracts/expressions.py, known by their names (triton/numbers.py). All divisions are
correctly rounded (`tl.div_rn`); minima and maxima keep NaN where numpy's do.
"""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.blocks import (
    bits_of,
    decode_e4m3,
    float_of,
    round_e4m3,
)
from halfbyte.backends.gpu.triton.numbers import (
    AMAX,
    AMAX_GIVEN,
    AMAX_OF_PARTS,
    AMAX_OVER_TOP,
    AS_STORED,
    BF16,
    CLAMPED_RATIO,
    DIVIDED,
    DIVIDED_FLOORED,
    DIVIDED_THEN_FACTOR_OR_ZERO,
    DIVIDED_TWICE,
    FACTOR,
    FACTOR_TIMES_DIVIDED,
    FLOAT32_MAX,
    FOLDED,
    FOLDED_SIXTH,
    FP16,
    FP32,
    INVERSE,
    MOST_PARTS,
    NO_FACTOR,
    NO_UNDERFLOW,
    NOT_STORED,
    NUMBERS,
    OVER_PRODUCT,
    OVER_SCALE,
    OVER_SCALE_PRODUCT,
    OVER_SCALE_QUOTIENT,
    PRESCALE,
    PRESCALE_AGAIN,
    QUOTIENT,
    RATIO,
    RECIPROCAL_OF_STORED,
    RECIPROCAL_PRODUCT,
    RECIPROCAL_PRODUCT_IN_STATISTICS,
    RECIPROCAL_PRODUCT_OR_MAX,
    REGULAR,
    SEARCHED,
    SHARE_OF_AMAX,
    SHARE_OF_TOP,
    SIXTH,
    SIXTH_THEN_FACTOR,
    STATIC_SCALE,
    STORE_AMAX,
    STORE_FACTOR,
    STORE_RECIPROCAL,
    TIMES_CLAMPED_RECIPROCAL,
    TIMES_RECIPROCAL_OF_SCALE,
    TIMES_RECIPROCAL_OR_ZERO,
    TIMES_RECIPROCAL_OVER_SCALE,
    TIMES_RECIPROCAL_SHRUNK,
    TIMES_RECIPROCAL_ZEROED,
    UNIT,
)

# --- amax ---


@triton.jit
def largest_bits(word, DTYPE: tl.constexpr):
    """Magnitude bits of the larger half of a word (16-bit dtypes), or of the word."""
    if DTYPE == FP32:
        return word & 0x7FFFFFFF
    else:
        return tl.maximum((word >> 16) & 0x7FFF, word & 0x7FFF)


@triton.jit
def as_float32_bits(bits, DTYPE: tl.constexpr):
    if DTYPE == BF16:
        return bits << 16
    elif DTYPE == FP16:
        return bits_of(bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))
    else:
        return bits


@triton.jit(do_not_specialize=["span_quads", "stride_quads", "spans", "chunks", "programs"])
def amax_partials(
    x_ptr,
    out_ptr,
    span_quads,
    stride_quads,
    spans,
    chunks,
    programs,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Largest magnitudes of parts of each group as float32 bits: `programs` of them per group, one after the other.

    A group is one span of words, or `spans` spans (ROWS); the length of a span and its distance from the next are
    counted in four words, and a span has `chunks` chunks. Program p of a group takes chunks p, p + programs, and so on.
    Integers order like magnitudes, with NaN above Inf. `prepare` takes the largest of a group's parts.
    """
    pid = tl.program_id(0).to(tl.int64)
    base = x_ptr + (pid // programs) * (spans * (stride_quads * 4))
    span = span_quads * 4
    lane = tl.arange(0, CHUNK)
    most = tl.zeros((CHUNK,), tl.int32)
    for chunk in range(pid % programs, spans * chunks, programs):
        if ROWS:
            row = chunk // chunks
            row_ptr = base + row * (stride_quads * 4)
            start = (chunk - row * chunks) * (CHUNK * DEPTH)
        else:
            row_ptr = base
            start = chunk * (CHUNK * DEPTH)
        for i in tl.static_range(DEPTH):
            at = start + i * CHUNK + lane
            word = tl.load(row_ptr + at, mask=at < span, other=0)
            most = tl.maximum(most, largest_bits(word, DTYPE))
    tl.store(out_ptr + pid, as_float32_bits(tl.max(most, axis=0), DTYPE))


@triton.jit(do_not_specialize=["programs"])
def amax_listed(table_ptr, out_ptr, programs, DTYPE: tl.constexpr, CHUNK: tl.constexpr, DEPTH: tl.constexpr):
    """The same for separate tensors: the table holds (address, number of words divided by four) of each."""
    pid = tl.program_id(0).to(tl.int64)
    which = pid // programs
    base = tl.load(table_ptr + 2 * which).to(tl.pointer_type(tl.int32))
    base = tl.multiple_of(base, 16)
    span = tl.load(table_ptr + 2 * which + 1) * 4
    lane = tl.arange(0, CHUNK)
    most = tl.zeros((CHUNK,), tl.int32)
    for start in range((pid % programs) * (CHUNK * DEPTH), span, programs * (CHUNK * DEPTH)):
        for i in tl.static_range(DEPTH):
            at = start + i * CHUNK + lane
            word = tl.load(base + at, mask=at < span, other=0)
            most = tl.maximum(most, largest_bits(word, DTYPE))
    tl.store(out_ptr + pid, as_float32_bits(tl.max(most, axis=0), DTYPE))


# --- the tensor-level number ---


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Round to the dtype, nearest even, and widen again."""
    if DTYPE == FP16:
        return x.to(tl.float16).to(tl.float32)
    elif DTYPE == BF16:
        bits = bits_of(x)
        rounded = float_of((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536)
        return tl.where(x != x, x, rounded)
    else:
        return x


@triton.jit
def _factor(amax, TOP: tl.constexpr, KIND: tl.constexpr, STATISTICS: tl.constexpr, CONSTANT: tl.constexpr):
    """Slot 1."""
    if KIND == CLAMPED_RATIO:
        ratio = tl.div_rn(TOP, amax)
        ratio = tl.where(ratio > FLOAT32_MAX, FLOAT32_MAX, ratio)
        return tl.where(ratio == 0, 1.0, ratio)
    elif KIND == RATIO:
        return tl.div_rn(TOP, amax)
    elif KIND == RECIPROCAL_PRODUCT:
        return tl.div_rn(1.0, amax) * TOP
    elif KIND == RECIPROCAL_PRODUCT_OR_MAX:
        return tl.where(amax == 0, FLOAT32_MAX, tl.div_rn(1.0, amax) * TOP)
    elif KIND == RECIPROCAL_PRODUCT_IN_STATISTICS:
        tiny: tl.constexpr = 6.103515625e-05 if STATISTICS == FP16 else 1.1754943508222875e-38
        floored = tl.maximum(round_to(amax, STATISTICS), tiny, propagate_nan=tl.PropagateNan.ALL)
        factor = round_to(round_to(tl.div_rn(1.0, floored), STATISTICS) * TOP, STATISTICS)
        return tl.where(tl.abs(factor) <= FLOAT32_MAX, factor, 1.0)
    elif KIND == QUOTIENT:
        return tl.div_rn(amax, TOP)
    elif KIND == NO_FACTOR:
        return tl.full(amax.shape, 1.0, tl.float32)
    else:  # CONSTANT_FACTOR
        return tl.full(amax.shape, CONSTANT, tl.float32)


@triton.jit
def usable_amax(bits, REPAIRS: tl.constexpr):
    """The amax of its bits: one NaN, whatever its payload was.

    REPAIRS: zero and tiny amaxes are raised to the next usable one. (checkpoint/execute/repair.py)
    """
    bits = tl.where(bits > 0x7F800000, 0x7FC00000, bits)
    if REPAIRS:
        bits = tl.where(bits == 0, 0x45280000, tl.maximum(bits, 0x06280000))  # 2688, 2688·2**-126
    return float_of(bits)


@triton.jit(do_not_specialize=["groups", "parts", "share", "given"])
def prepare(
    amax_ptr, numbers_ptr, stored_ptr, multiplier_ptr, groups, parts, share, given,
    TOP: tl.constexpr, KIND: tl.constexpr, STATISTICS: tl.constexpr, CONSTANT: tl.constexpr, STORED: tl.constexpr,
    MULTIPLIER: tl.constexpr, DTYPE: tl.constexpr, LANES: tl.constexpr, SOURCE: tl.constexpr,
    REPAIRS: tl.constexpr,
):  # fmt: skip
    """For each group's amax: the numbers that kernels need, and what is stored with the blocks.

    SOURCE: one amax per group at amax_ptr; `parts` partial ones for every `share` groups, of which a program takes the
    largest for its group; or the bits `given`, for all groups.
    """
    if SOURCE == AMAX_OF_PARTS:
        group = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
        exists = group < groups
        part = tl.arange(0, MOST_PARTS)
        shared = tl.program_id(0).to(tl.int64) // share
        found = tl.load(amax_ptr + shared * parts + part, mask=part < parts, other=0)
        bits = tl.full((1,), 0, tl.int32) + tl.max(found, axis=0)
    else:
        group = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
        exists = group < groups
        if SOURCE == AMAX_GIVEN:
            bits = tl.full((LANES,), 0, tl.int32) + given.to(tl.int32)
        else:
            bits = tl.load(amax_ptr + group, mask=exists, other=0)
    amax = usable_amax(bits, REPAIRS)
    write_numbers(
        amax, group, exists, numbers_ptr, stored_ptr, multiplier_ptr,
        TOP, KIND, STATISTICS, CONSTANT, STORED, MULTIPLIER, DTYPE,
    )  # fmt: skip


@triton.jit
def write_numbers(
    amax, group, exists, numbers_ptr, stored_ptr, multiplier_ptr,
    TOP: tl.constexpr, KIND: tl.constexpr, STATISTICS: tl.constexpr, CONSTANT: tl.constexpr, STORED: tl.constexpr,
    MULTIPLIER: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The numbers that kernels need of amaxes, the stored scales and the multipliers."""
    factor = _factor(amax, TOP, KIND, STATISTICS, CONSTANT)
    inverse = tl.div_rn(1.0, factor)
    if STORED == STORE_AMAX:
        stored = amax
    elif STORED == STORE_FACTOR:
        stored = factor
    elif STORED == STORE_RECIPROCAL:
        stored = inverse
    else:  # STORE_RECIPROCAL_OR_ZERO, or NOT_STORED
        stored = tl.where(amax == 0, 0.0, inverse)
    if MULTIPLIER == AMAX_OVER_TOP:
        multiplier = tl.div_rn(stored, TOP)
    elif MULTIPLIER == AS_STORED:
        multiplier = stored
    elif MULTIPLIER == RECIPROCAL_OF_STORED:
        multiplier = tl.div_rn(1.0, stored)
    else:  # ONE_LEVEL
        multiplier = tl.full(amax.shape, 1.0, tl.float32)
    if STORED != NOT_STORED:
        tl.store(stored_ptr + group, stored, mask=exists)
    tl.store(multiplier_ptr + group, multiplier, mask=exists)
    at = numbers_ptr + group * NUMBERS
    tl.store(at + AMAX, amax, mask=exists)
    tl.store(at + FACTOR, factor, mask=exists)
    tl.store(at + INVERSE, inverse, mask=exists)
    tl.store(at + FOLDED, factor * SIXTH, mask=exists)
    # Within these limits no product of the short formulas under- or overflows.
    regular = (amax >= 8.673617379884035e-19) & (amax <= 1.152921504606847e18)
    tl.store(at + REGULAR, tl.where(regular, 1.0, 0.0), mask=exists)
    # The smallest element times the smallest multiplier (6/A) is not zero, so the element's sign bit says whether y <
    # 0. For float32 that need not hold: there the sign is taken from y.
    bound: tl.constexpr = 131072.0 if DTYPE == BF16 else 1e38
    tl.store(at + NO_UNDERFLOW, tl.where(regular & (amax <= bound), 1.0, 0.0), mask=exists)
    tl.store(at + SHARE_OF_TOP, tl.div_rn(tl.full(amax.shape, TOP, tl.float32), 6.0), mask=exists)
    tl.store(at + SHARE_OF_AMAX, tl.div_rn(amax, 6.0), mask=exists)
    # 2**-k, which brings the multiplier into [1, 2), as two factors. Only the first is used where 2**-k is below 1.
    searched = (multiplier > 0) & (multiplier <= FLOAT32_MAX)
    normal = tl.where(multiplier < 1.1754943508222875e-38, multiplier * 1.8446744073709552e19, multiplier)
    exponent = ((bits_of(normal) >> 23) & 0xFF) - 127
    exponent = tl.where(multiplier < 1.1754943508222875e-38, exponent - 64, exponent)
    exponent = tl.where(searched, exponent, 0)
    first = tl.where(exponent > 0, -exponent, (-exponent) // 2)
    second = -exponent - first
    # 2**-127 is subnormal: half of 2**-126.
    first_factor = tl.where(first == -127, 5.877471754111438e-39, float_of((tl.maximum(first, -126) + 127) << 23))
    second_factor = float_of((second + 127) << 23)
    tl.store(at + PRESCALE, first_factor, mask=exists)
    tl.store(at + PRESCALE_AGAIN, second_factor, mask=exists)
    tl.store(at + UNIT, (multiplier * first_factor) * second_factor, mask=exists)
    tl.store(at + SEARCHED, tl.where(searched, 1.0, 0.0), mask=exists)


@triton.jit
def short_sixth(v, ASM: tl.constexpr):
    """v/6 as a product with 1/6 in two parts. Correctly rounded where v/6 is a normal number."""
    if ASM:
        return tl.fma(v, 0.1666666567325592, v * 9.934107758624577e-09)
    else:
        return tl.div_rn(v, 6.0)


@triton.jit
def short_reciprocal(x, ASM: tl.constexpr):
    """1/x of a normal number, correctly rounded: the hardware's estimate and one Newton step.

    tests/backends/gpu/card/checks.py tries every significand.

    Zero gives the largest float32, to which TransformerEngine clamps.
    """
    if ASM:
        estimate = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        refined = tl.fma(tl.fma(x, -estimate, 1.0), estimate, estimate)
        return tl.where(x == 0, FLOAT32_MAX, refined)
    else:
        return tl.minimum(tl.div_rn(1.0, x), FLOAT32_MAX)


@triton.jit
def number(numbers_ptr, group, WHICH: tl.constexpr):
    return tl.load(numbers_ptr + group * NUMBERS + WHICH)


# --- block scales ---


@triton.jit
def pre_scale(v, numbers_ptr, group, PRE: tl.constexpr, STATISTICS: tl.constexpr, LARGEST: tl.constexpr):
    """Slot 2."""
    if PRE == FOLDED_SIXTH:
        return v * number(numbers_ptr, group, FOLDED)
    elif PRE == SIXTH_THEN_FACTOR:
        return number(numbers_ptr, group, FACTOR) * (v * SIXTH)
    elif PRE == DIVIDED_THEN_FACTOR_OR_ZERO:
        scaled = tl.div_rn(v, LARGEST) * number(numbers_ptr, group, FACTOR)
        return tl.where(number(numbers_ptr, group, AMAX) == 0, 0.0, scaled)
    elif PRE == OVER_PRODUCT:
        return tl.div_rn(v, number(numbers_ptr, group, FACTOR) * 6.0)
    elif PRE == FACTOR_TIMES_DIVIDED:
        return number(numbers_ptr, group, FACTOR) * round_to(tl.div_rn(v, 6.0), STATISTICS)
    elif PRE == DIVIDED_TWICE:
        return tl.div_rn(tl.div_rn(v, 6.0), number(numbers_ptr, group, FACTOR))
    elif PRE == DIVIDED:
        return tl.div_rn(v, 6.0)
    elif PRE == DIVIDED_FLOORED:
        return tl.maximum(tl.div_rn(v, 6.0), 9.999999960041972e-13, propagate_nan=tl.PropagateNan.ALL)
    elif PRE == STATIC_SCALE:
        share = tl.div_rn(v, 6.0)
        share = tl.where(share == 0, 1.0, share) * number(numbers_ptr, group, SHARE_OF_TOP)
        return tl.div_rn(share, number(numbers_ptr, group, SHARE_OF_AMAX))
    else:  # DIVIDED_THEN_FACTOR
        return tl.div_rn(v, 6.0) * number(numbers_ptr, group, FACTOR)


@triton.jit
def scale_byte(pre, SMALLEST: tl.constexpr, FOR_ZERO: tl.constexpr, FOR_ZERO_BYTE: tl.constexpr):
    """Slot 3: byte and value; the options are negative where a contract has none."""
    if FOR_ZERO >= 0:
        pre = tl.where(pre == 0, FOR_ZERO, pre)
    if SMALLEST > 0:
        pre = tl.maximum(pre, SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    byte, scale = round_e4m3(pre)
    if FOR_ZERO_BYTE >= 0:
        for_zero = tl.full(byte.shape, FOR_ZERO_BYTE, tl.int32)
        scale = tl.where(byte == 0, decode_e4m3(for_zero), scale)
        byte = tl.where(byte == 0, for_zero, byte)
    return byte, scale


@triton.jit
def element_constant(scale, numbers_ptr, group, ELEMENT: tl.constexpr):
    """Slot 4: what an element is multiplied or divided by."""
    if ELEMENT == TIMES_CLAMPED_RECIPROCAL:
        product = scale * number(numbers_ptr, group, INVERSE)
        return tl.minimum(tl.div_rn(1.0, product), FLOAT32_MAX, propagate_nan=tl.PropagateNan.ALL)
    elif ELEMENT == TIMES_RECIPROCAL_OR_ZERO:
        return tl.div_rn(1.0, number(numbers_ptr, group, INVERSE) * scale)
    elif ELEMENT == TIMES_RECIPROCAL_OVER_SCALE:
        return tl.div_rn(number(numbers_ptr, group, INVERSE), scale)
    elif ELEMENT == TIMES_RECIPROCAL_OF_SCALE:
        return tl.div_rn(1.0, scale)
    elif ELEMENT == TIMES_RECIPROCAL_ZEROED:
        combined = scale * number(numbers_ptr, group, INVERSE)
        return tl.where(combined == 0, 0.0, tl.div_rn(1.0, combined))
    elif ELEMENT == TIMES_RECIPROCAL_SHRUNK:
        combined = scale * number(numbers_ptr, group, INVERSE)
        return tl.div_rn(1.0, tl.where(combined == 0, 1e8, combined))
    elif ELEMENT == OVER_SCALE_PRODUCT:
        return scale * number(numbers_ptr, group, FACTOR)
    elif ELEMENT == OVER_SCALE_QUOTIENT:
        return tl.div_rn(scale, number(numbers_ptr, group, FACTOR))
    else:  # OVER_SCALE
        return scale


@triton.jit
def element(x, constant, scale, ELEMENT: tl.constexpr):
    """y of one element."""
    if ELEMENT == OVER_SCALE_PRODUCT or ELEMENT == OVER_SCALE_QUOTIENT or ELEMENT == OVER_SCALE:  # noqa: SIM109 (Triton has no `in`)
        return tl.div_rn(x, constant)
    elif ELEMENT == TIMES_RECIPROCAL_OR_ZERO:
        return tl.where(scale == 0, 0.0, x * constant)
    else:
        return x * constant
