"""One scale per block, from its amax: NVFP4 by the contract's formulas, MXFP4 and MXFP8 by a table of the contract.

TransformerEngine's formulas have a shorter way to the same codes where the tensor's numbers allow it (SHORT): signs
come from the input's own bits, and codes are packed without masking each one (pack_raw).
"""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.blocks import (
    bits_of,
    float_of,
    hardware_codes,
    hardware_e4m3,
    largest,
    load_words,
    over_tile,
    pack_codes,
    pack_raw,
    place,
    raw_code,
    round_e4m3,
    scale_place,
    sign_words,
    source,
    step_of,
    store_words,
    unpack,
    without_negative_zeros,
)
from halfbyte.backends.gpu.triton.numbers import (
    BELOW_ZERO,
    BF16,
    DOWN,
    FOLDED,
    FP4_ASSEMBLY,
    FP16,
    FP32,
    INVERSE,
    NO_UNDERFLOW,
    SIGN_BIT,
    TILES,
)
from halfbyte.backends.gpu.triton.scales import (
    element,
    element_constant,
    number,
    pre_scale,
    round_to,
    scale_byte,
    short_reciprocal,
)


@triton.jit
def _without_end(y):
    """Code bits and value on the E2M1 grid, which goes on beyond 6 in steps of 2. (contracts.rounding)"""
    near = tl.where(y < 2, (y + 4194304.0) - 4194304.0, (y + 8388608.0) - 8388608.0)
    far = tl.where(y < 8388608.0, (y + 16777216.0) - 16777216.0, (y * 0.5 + 8388608.0 - 8388608.0) * 2)
    far = tl.where(y < 16777216.0, far, y)
    value = tl.where(y < 4, near, far)
    cut = (((bits_of(value) >> 23) & 0xFF) - 126) * 2 + ((bits_of(value) >> 22) & 1)
    code = tl.where(value < 1, (value * 2).to(tl.int32), cut) & 0xF
    return code, value


@triton.jit
def round_element(
    x, y, TIE: tl.constexpr, SIGN: tl.constexpr, NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr, WRAPS: tl.constexpr
):
    """Slot 5: the code with its sign, and the magnitude that it stands for. (contracts.rounding.round_elements)"""
    nan = y != y
    magnitude = tl.where(nan, 0.0, tl.abs(y))
    if WRAPS:
        code, value = _without_end(magnitude)
    elif TIE == DOWN:
        code = (magnitude > 0.25).to(tl.int32) + (magnitude > 0.75).to(tl.int32) + (magnitude > 1.25).to(tl.int32)
        code = code + (magnitude > 1.75).to(tl.int32) + (magnitude > 2.5).to(tl.int32)
        code = code + (magnitude > 3.5).to(tl.int32) + (magnitude > 5.0).to(tl.int32)
        value = (
            float_of(code << 22) * 8.507059173023462e37
        )  # 2**126: the code's bits are those of a float with an exponent that is 126 too small
    else:
        inside = tl.minimum(magnitude, 6.0)
        step = step_of(inside)
        shifted = tl.fma(step, 524288.0, inside)
        code = (bits_of(shifted) + (bits_of(shifted) >> 22) - 298) & 7
        value = tl.fma(step, -524288.0, shifted)
    code = tl.where(nan, NAN_CODE, code)
    if ZERO_INPUT:
        code = tl.where((x == 0) | (x != x), 0, code)
        negative = x < 0
    elif SIGN == BELOW_ZERO:
        negative = y < 0
    elif SIGN == SIGN_BIT:
        negative = (bits_of(y) < 0) & (y == y)
    else:
        negative = (y > 0) == 0
    return code | tl.where(negative, 8, 0), value


@triton.jit
def generic_codes(
    x, constant, scale, N: tl.constexpr, ELEMENT: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr,
    NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """Words of codes by the contract's formulas, element by element."""
    codes = ()
    for i in tl.static_range(N):
        y = element(x[i], constant, scale, ELEMENT)
        code, value = round_element(x[i], y, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS)
        codes = codes + (code,)
    return pack_codes(codes, N)


@triton.jit
def _short_codes(words, x, multiplier, N: tl.constexpr, W: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Words of codes of y = x·multiplier, ties to even, sign by y < 0, where no y underflows to zero."""
    if ASM == FP4_ASSEMBLY:
        return hardware_words(x, multiplier, N)
    raw = ()
    for i in tl.static_range(N):
        raw = raw + (raw_code(tl.minimum(tl.abs(x[i]) * multiplier, 6.0)),)
    return pack_signed(raw, words, x, multiplier, N, W, DTYPE, ASM)


@triton.jit
def hardware_words(x, multiplier, N: tl.constexpr):
    """The same by the FP4 conversion. Meaningless where the multiplier is NaN; callers replace those codes."""
    y = ()
    for i in tl.static_range(N):
        y = y + (x[i] * multiplier,)
    out = ()
    for i in tl.static_range(N // 8):
        out = out + (hardware_codes(y, 8 * i),)
    return out


@triton.jit
def pack_signed(raw, words, x, multiplier, N: tl.constexpr, W: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Raw codes as words with the signs of y, taken from the input's bits, or from y itself for float32."""
    if DTYPE == FP32:
        signs = ()
        for i in tl.static_range(N):
            signs = signs + ((bits_of(x[i] * multiplier + 0.0) >> 28) & 8,)
        signs = pack_codes(signs, N)
    else:
        signs = sign_words(without_negative_zeros(words, W, DTYPE, ASM), W, ASM)
    out = ()
    for i in tl.static_range(N // 8):
        out = out + (pack_raw(raw, 8 * i) | signs[i],)
    return out


@triton.jit(do_not_specialize=["blocks", "columns", "row_quads", "group_blocks"])
def quantize_nvfp4(
    x_ptr, codes_ptr, scales_ptr, numbers_ptr, blocks, columns, row_quads, group_blocks,
    B: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, MAP: tl.constexpr, GROUP: tl.constexpr,
    SWIZZLED: tl.constexpr, SHORT: tl.constexpr, PRE: tl.constexpr, ELEMENT: tl.constexpr,
    STATISTICS: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, FOR_ZERO: tl.constexpr,
    FOR_ZERO_BYTE: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr, NAN_CODE: tl.constexpr,
    ZERO_INPUT: tl.constexpr, WRAPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Codes and scale bytes by the six slots of a contract."""
    W: tl.constexpr = N if DTYPE == FP32 else N // 2
    block, first, row, column, group, exists = place(x_ptr, columns, row_quads, group_blocks, blocks, B, W, MAP, GROUP)
    words = load_words(source(x_ptr, group, MAP) + first, exists, W)
    x = unpack(words, W, DTYPE)
    v = largest(x, N)
    if MAP == TILES:
        v = float_of(over_tile(bits_of(v), B))
    if SHORT:  # all blocks of this program share their numbers, so that they all take the same branch
        if number(numbers_ptr, group, NO_UNDERFLOW) > 0:
            byte, scale = round_e4m3(v * number(numbers_ptr, group, FOLDED))
            multiplier = short_reciprocal(scale * number(numbers_ptr, group, INVERSE), ASM)
            codes = _short_codes(words, x, multiplier, N, W, DTYPE, ASM)
            finite = v == v
            out = ()
            for i in tl.static_range(N // 8):
                out = out + (tl.where(finite, codes[i], 0),)
        else:
            byte, scale = scale_byte(
                pre_scale(v, numbers_ptr, group, PRE, STATISTICS, LARGEST), SMALLEST, FOR_ZERO, FOR_ZERO_BYTE
            )
            constant = element_constant(scale, numbers_ptr, group, ELEMENT)
            out = generic_codes(x, constant, scale, N, ELEMENT, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS)
    else:
        byte, scale = scale_byte(
            pre_scale(v, numbers_ptr, group, PRE, STATISTICS, LARGEST), SMALLEST, FOR_ZERO, FOR_ZERO_BYTE
        )
        constant = element_constant(scale, numbers_ptr, group, ELEMENT)
        out = generic_codes(x, constant, scale, N, ELEMENT, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS)
    store_words(codes_ptr + block * (N // 8), out, exists, N // 8)
    tl.store(scales_ptr + scale_place(block, row, column, columns, SWIZZLED), byte.to(tl.uint8), mask=exists)


# --- MX ---


@triton.jit
def _distance(x, half, CODE: tl.constexpr):
    """|(S/2)·k − x| for one code; k is 0, 1, 2, 3, 4, 6, 8 or 12."""
    over: tl.constexpr = CODE % 8 - 5
    magnitude: tl.constexpr = over + 5 if over < 0 else over * over + over + 6
    value: tl.constexpr = magnitude if CODE < 8 else -magnitude
    return tl.abs(half * (value * 1.0) - x)


@triton.jit
def first_nearest(x, scale):
    """First index of the smallest |(S/2)·k − x|, k twice a code's value. (contracts.peers.gguf)"""
    half = scale * 0.5
    best = tl.full(x.shape, float("inf"), tl.float32)
    code = tl.zeros(x.shape, tl.int32)
    for k in tl.static_range(16):
        distance = _distance(x, half, k)
        code = tl.where(distance < best, k, code)
        best = tl.minimum(best, distance)
    return code


@triton.jit
def encode_e4m3(y, NAN_CODE: tl.constexpr):
    """E4M3 element: nearest even, saturating, sign kept; NaN is the code for NaN."""
    magnitude = tl.minimum(tl.abs(y), 448.0)
    power = bits_of(tl.maximum(magnitude, 0.015625)) & 0x7F800000
    code = (bits_of(magnitude + float_of(power) * 1048576.0) & 31) + (power >> 20) - 968
    return tl.where(y != y, NAN_CODE, code | ((bits_of(y) >> 24) & 0x80))


@triton.jit
def mx_signs(
    words, x, constant, N: tl.constexpr, W: tl.constexpr, DTYPE: tl.constexpr, SIGN: tl.constexpr,
    ZERO_INPUT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Signs as bit 3 of each nibble: the sign bit, or that of y < 0 (x < 0 if zeros are told by x)."""
    if DTYPE == FP32:
        signs = ()
        for i in tl.static_range(N):
            if ZERO_INPUT:
                signed = x[i] + 0.0
            elif SIGN == SIGN_BIT:
                signed = x[i]
            else:
                signed = x[i] * constant + 0.0
            signs = signs + ((bits_of(signed) >> 28) & 8,)
        return pack_codes(signs, N)
    elif SIGN == SIGN_BIT and not ZERO_INPUT:
        return sign_words(words, W, ASM)
    else:
        return sign_words(without_negative_zeros(words, W, DTYPE, ASM), W, ASM)


@triton.jit
def short_mx_codes(
    words, x, constant, N: tl.constexpr, W: tl.constexpr, DTYPE: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr,
    ZERO_INPUT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Words of codes of y = x·constant, for |y| below 8 and no y of a 16-bit dtype that underflows to zero.

    From 7 on, y rounds to 8, which is code 8: one less is the code of 6. Where ties go down, the constant is a power of
    two and the dtype has 16 bits (choose.py): then products are exact, and a constant that is a little smaller moves
    ties down and nothing else across a threshold.
    """
    signs = mx_signs(words, x, constant, N, W, DTYPE, SIGN, ZERO_INPUT, ASM)
    if TIE == DOWN:
        constant = constant * (0.999755859375 if DTYPE == BF16 else 0.9998779296875)  # 1 - 2**-12, 1 - 2**-13
    raw = ()
    for i in tl.static_range(N):
        raw = raw + (raw_code(tl.abs(x[i]) * constant),)
    out = ()
    for i in tl.static_range(N // 8):
        packed = pack_raw(raw, 8 * i)
        out = out + ((packed - ((packed >> 3) & 0x11111111)) | signs[i],)
    return out


@triton.jit
def start_of_mx(v, exists, bytes_ptr, constants_ptr, split_ptr, DTYPE: tl.constexpr):
    """Byte and element constant of a block amax, from the contract's table (mx_tables.py)."""
    if DTYPE == BF16:
        entry = bits_of(v) >> 16
    elif DTYPE == FP16:
        entry = v.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    else:
        entry = (bits_of(v) >> 16) * 2
        entry = entry + (bits_of(v) >= tl.load(split_ptr + (bits_of(v) >> 16), mask=exists, other=0)).to(tl.int32)
        entry = tl.where(bits_of(v) < 65536, 65536 + bits_of(v), entry)
    byte = tl.load(bytes_ptr + entry, mask=exists, other=0)
    constant = tl.load(constants_ptr + entry, mask=exists, other=0.0)
    return byte, constant


@triton.jit(do_not_specialize=["blocks", "columns", "row_quads"])
def quantize_mx(
    x_ptr, codes_ptr, scales_ptr, bytes_ptr, constants_ptr, split_ptr, blocks, columns, row_quads,
    B: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, MAP: tl.constexpr, SWIZZLED: tl.constexpr,
    WIDE: tl.constexpr, NEAREST: tl.constexpr, ROUNDED: tl.constexpr, SHORT: tl.constexpr, TIE: tl.constexpr,
    SIGN: tl.constexpr, NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Power-of-two scales: a table gives byte and multiplier, by the top fifteen bits of the block's amax.

    For float32 there are two entries per bucket, one for amaxes below the bits in `split` and one for the others;
    amaxes below 2**-133 have entries of their own. WIDE: E4M3 elements instead of E2M1. SHORT: the codes of usual
    blocks have a shorter way (short_mx_codes); a program takes it if all its blocks can.
    """
    W: tl.constexpr = N if DTYPE == FP32 else N // 2
    block, first, row, column, group, exists = place(x_ptr, columns, row_quads, 1, blocks, B, W, MAP, 0)
    words = load_words(source(x_ptr, group, MAP) + first, exists, W)
    x = unpack(words, W, DTYPE)
    v = largest(x, N)
    byte, constant = start_of_mx(v, exists, bytes_ptr, constants_ptr, split_ptr, DTYPE)
    if WIDE:
        codes = ()
        for i in tl.static_range(N):
            y = x[i] * constant
            if ROUNDED:
                y = round_to(y, DTYPE)
            codes = codes + ((y if ASM else encode_e4m3(y, NAN_CODE)),)
        out = ()
        for i in tl.static_range(N // 4):
            if ASM:
                out = out + (hardware_e4m3(codes, 4 * i),)
            else:
                out = out + (four_bytes(codes, 4 * i),)
        store_words(codes_ptr + block * (N // 4), out, exists, N // 4)
    else:
        if SHORT:
            # A y that underflows would lose its sign. The smallest bfloat16 times 2**-16 does not; y that are rounded
            # to the dtype once more need a constant of 1.
            least: tl.constexpr = 1.0 if ROUNDED else 1.52587890625e-05
            regular = (v * constant < 8.0) & (constant >= least)
            if tl.min((regular | (exists == 0)).to(tl.int32), axis=0) > 0:
                out = short_mx_codes(words, x, constant, N, W, DTYPE, TIE, SIGN, ZERO_INPUT, ASM)
            else:
                out = mx_codes(x, constant, N, DTYPE, NEAREST, ROUNDED, TIE, SIGN, NAN_CODE, ZERO_INPUT)
        else:
            out = mx_codes(x, constant, N, DTYPE, NEAREST, ROUNDED, TIE, SIGN, NAN_CODE, ZERO_INPUT)
        store_words(codes_ptr + block * (N // 8), out, exists, N // 8)
    tl.store(scales_ptr + scale_place(block, row, column, columns, SWIZZLED), byte, mask=exists)


@triton.jit
def mx_codes(
    x, constant, N: tl.constexpr, DTYPE: tl.constexpr, NEAREST: tl.constexpr, ROUNDED: tl.constexpr, TIE: tl.constexpr,
    SIGN: tl.constexpr, NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr,
):  # fmt: skip
    """Words of codes by the contract's formulas, element by element."""
    codes = ()
    for i in tl.static_range(N):
        if NEAREST:
            codes = codes + (first_nearest(x[i], constant),)
        else:
            y = x[i] * constant
            if ROUNDED:
                y = round_to(y, DTYPE)
            code, value = round_element(x[i], y, TIE, SIGN, NAN_CODE, ZERO_INPUT, False)
            codes = codes + (code,)
    return pack_codes(codes, N)


@triton.jit
def four_bytes(codes, at):
    low = codes[at] | (codes[at + 1] << 8)
    return low | (codes[at + 2] << 16) | (codes[at + 3] << 24)
