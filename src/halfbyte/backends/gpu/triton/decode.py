"""Codes to values; and MXFP4 to NVFP4 with every code kept.

The three magnitude bits of a code, moved to where a float has its exponent and mantissa, are the code's value times
2**-126: one exact multiplication decodes it.
"""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.blocks import (
    bits_of,
    decode_e4m3,
    float_of,
    load_words,
    place,
)
from halfbyte.backends.gpu.triton.four_six import _over_top
from halfbyte.backends.gpu.triton.numbers import (
    BF16,
    DECODE_BY_AMAX,
    DECODE_BY_DIVISOR,
    DECODE_BY_MULTIPLIER,
    DECODE_BY_POWER,
    DECODE_BY_RECIPROCAL,
    DECODE_BY_TABLE,
    DECODE_SINGLE_LEVEL,
    FP16,
    FP32,
    GROUP_OF_BLOCK,
)


@triton.jit
def _pair(low, high, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Two values rounded to 16 bits, side by side in a word."""
    if ASM and DTYPE == BF16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=tl.int32, is_pure=True, pack=1
        )
    elif ASM:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (_sixteen_bits(low, DTYPE) & 0xFFFF) | (_sixteen_bits(high, DTYPE) << 16)


@triton.jit
def _sixteen_bits(x, DTYPE: tl.constexpr):
    if DTYPE == FP16:
        return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    else:
        bits = bits_of(x)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0 | ((bits >> 16) & 0x8000), rounded)


@triton.jit
def _store_values(pointers, values, exists, N: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Values of a lane side by side, sixteen bytes at a time."""
    words = ()
    if DTYPE == FP32:
        for i in tl.static_range(N):
            words = words + (bits_of(values[i]),)
    else:
        for i in tl.static_range(N // 2):
            words = words + (_pair(values[2 * i], values[2 * i + 1], DTYPE, ASM),)
    count: tl.constexpr = N if DTYPE == FP32 else N // 2
    for i in tl.static_range(count // 4):
        even = tl.join(words[4 * i], words[4 * i + 2])
        odd = tl.join(words[4 * i + 1], words[4 * i + 3])
        four = tl.reshape(tl.join(even, odd), (values[0].shape[0], 4))
        tl.store(pointers[:, None] + (tl.arange(0, 4)[None, :] + 4 * i), four, mask=exists[:, None])


@triton.jit
def _value(word, AT: tl.constexpr, WIDE: tl.constexpr, NEGATIVE_ZERO: tl.constexpr):
    """The element at a place of a word: a nibble, or a byte (WIDE)."""
    if WIDE:
        byte = (word >> (8 * AT)) & 0xFF
        magnitude = tl.where((byte & 127) == 127, float("nan"), decode_e4m3(byte & 127))
        value = float_of(bits_of(magnitude) | ((byte & 128) << 24))
    else:
        top = (word << (28 - 4 * AT)) >> 6  # bits 31 to 25 become copies of the sign, the next three are the code's
        value = float_of(top & -2118123520) * 8.507059173023462e37  # 2**126
    if NEGATIVE_ZERO:
        return value
    else:
        return value + 0.0


@triton.jit
def _by_amax(values, stored, N: tl.constexpr, TOP: tl.constexpr, SHORT: tl.constexpr):
    """(q·S)·A over c."""
    out = ()
    for i in tl.static_range(N):
        out = out + (_over_top(values[i] * stored, TOP, SHORT),)
    return out


@triton.jit(do_not_specialize=["blocks", "columns", "out_quads", "group_blocks"])
def dequantize(
    codes_ptr, scales_ptr, stored_ptr, table_ptr, out_ptr, blocks, columns, out_quads, group_blocks,
    B: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr, DTYPE: tl.constexpr, MAP: tl.constexpr, GROUP: tl.constexpr,
    DECODE: tl.constexpr, TOP: tl.constexpr, WIDE: tl.constexpr, NEGATIVE_ZERO: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Values in the order of the contract's roundings, rounded once more to another dtype.

    A lane decodes N values. A block of the format may be PIECES lanes long, and is as many blocks to this kernel: lanes
    that write more than 32 bytes each share the sectors of memory with too many others.
    """
    W: tl.constexpr = N if DTYPE == FP32 else N // 2
    C: tl.constexpr = N // 4 if WIDE else N // 8
    block, first, row, column, group, exists = place(
        out_ptr, columns, out_quads, group_blocks, blocks, B, W, MAP, GROUP
    )
    if C == 2:
        pair = tl.load((codes_ptr + block * 2)[:, None] + tl.arange(0, 2)[None, :], mask=exists[:, None], other=0)
        words = tl.split(pair)
    elif C == 1:
        words = (tl.load(codes_ptr + block, mask=exists, other=0),)
    else:
        words = load_words(codes_ptr + block * C, exists, C)
    byte = tl.load(scales_ptr + block // PIECES, mask=exists, other=0).to(tl.int32)
    per_word: tl.constexpr = 4 if WIDE else 8
    if DECODE == DECODE_BY_TABLE:
        factor = tl.load(table_ptr + byte)
    elif DECODE == DECODE_BY_POWER:  # 2**(byte − 128); the first two are subnormal
        power = tl.where(byte >= 2, (byte - 1) << 23, 0x200000 << (byte & 1))
        factor = float_of(tl.where(byte == 255, 0x7FC00000, power))
    else:
        magnitude = tl.where((byte & 127) == 127, float("nan"), decode_e4m3(byte & 127))
        scale = float_of(bits_of(magnitude) | ((byte & 128) << 24))
        if DECODE == DECODE_SINGLE_LEVEL:
            factor = scale
            stored = scale
        else:
            stored = tl.load(stored_ptr + group)
            if DECODE == DECODE_BY_MULTIPLIER:
                factor = scale * stored
            elif DECODE == DECODE_BY_DIVISOR:
                factor = tl.div_rn(scale, stored)
            elif DECODE == DECODE_BY_RECIPROCAL:
                factor = scale * tl.div_rn(1.0, stored)
            else:
                factor = scale
    values = ()
    for i in tl.static_range(N):
        q = _value(words[i // per_word], i % per_word, WIDE, NEGATIVE_ZERO)
        if (DECODE == DECODE_BY_TABLE) | (DECODE == DECODE_BY_POWER):  # halves, so that none overflows
            values = values + ((q * 2.0) * factor,)
        else:
            values = values + (q * factor,)
    if DECODE == DECODE_BY_AMAX:
        if ASM and GROUP != GROUP_OF_BLOCK:
            if (stored >= 8.673617379884035e-19) & (stored <= 1.152921504606847e18):
                out = _by_amax(values, stored, N, TOP, True)
            else:
                out = _by_amax(values, stored, N, TOP, False)
        else:
            out = _by_amax(values, stored, N, TOP, False)
        _store_values(out_ptr + first, out, exists, N, DTYPE, ASM)
    else:
        _store_values(out_ptr + first, values, exists, N, DTYPE, ASM)


@triton.jit(do_not_specialize=["anchor", "blocks"])
def cast_mxfp4_to_nvfp4(
    codes_ptr, scales_ptr, out_codes_ptr, out_scales_ptr, outside_ptr, anchor, blocks,
    B: tl.constexpr, HINTS: tl.constexpr,
):  # fmt: skip
    """Copy the codes; write E8M0 byte k as the E4M3 byte of 2**(k − anchor), twice: a block of 32 becomes two of 16.

    A scale that E4M3 does not hold counts in outside[0] (too large, written as 448) or outside[1] (too small, as 0).
    """
    first = tl.program_id(0).to(tl.int64) * B
    block = first + tl.arange(0, B)
    exists = block < blocks
    exponent = tl.load(scales_ptr + block, mask=exists, other=0).to(tl.int32) - anchor
    if HINTS:  # nothing is read twice, so the cache need not keep it
        at = first * 4 + tl.arange(0, 4 * B)
        inside = at < blocks * 4
        words = tl.load(codes_ptr + at, mask=inside, other=0, eviction_policy="evict_first")
        tl.store(out_codes_ptr + at, words, mask=inside, cache_modifier=".cs")
    else:
        each = block[:, None] * 4 + tl.arange(0, 4)[None, :]
        tl.store(out_codes_ptr + each, tl.load(codes_ptr + each, mask=exists[:, None], other=0), mask=exists[:, None])
    normal = (exponent + 7) << 3
    subnormal = 1 << tl.maximum(tl.minimum(exponent + 9, 3), 0)
    byte = tl.where(exponent >= -6, normal, subnormal)
    byte = tl.where(exponent > 8, 0x7E, tl.where(exponent < -9, 0, byte))
    tl.store(out_scales_ptr + block, (byte * 257).to(tl.int16), mask=exists)
    too_large = tl.sum((exists & (exponent > 8)).to(tl.int32), axis=0)
    too_small = tl.sum((exists & (exponent < -9)).to(tl.int32), axis=0)
    if too_large > 0:
        tl.atomic_add(outside_ptr, too_large)
    if too_small > 0:
        tl.atomic_add(outside_ptr + 1, too_small)
