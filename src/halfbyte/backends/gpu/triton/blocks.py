"""Device functions on blocks. A thread holds a whole block: N values are a tuple of N one-dimensional tensors.

So every formula below is scalar code, in the order of the reference's roundings. Block maxima and error sums need no
exchange between threads, and sums run in index order. Kernels are launched with `enable_fp_fusion=False`. `tl.fma` is
used only where the product is exact, so that fusing changes no bit; Triton's interpreter, which rounds twice, then
computes the same.

Rounding to E2M1, ties to even, for y in [0, 7): U = y·y + 12.5 lies in [8, 16) for y below 1.87, in [16, 32) below
4.41, and in [32, 64) above, so its exponent alone gives P in {8, 16, 32}. The last place of M = P·2^19 is the grid step
of y (0.5, 1, 2): y + M rounds y to the grid. The two thresholds may lie anywhere within 1.75…2.25 and 3.5…4.5, because
both steps round alike there. The code is n + 2e, n the low bits of y + M and e in {0, 1, 2} the step's
exponent, which is also in its exponent field.
"""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.numbers import (
    BF16,
    FP16,
    GROUP_OF_BLOCK,
    GROUP_OF_PROGRAM,
    LISTED,
    ROWS,
    TILES,
)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


# --- where blocks lie ---


@triton.jit
def place(
    x_ptr,
    columns,
    row_quads,
    group_blocks,
    blocks,
    B: tl.constexpr,
    W: tl.constexpr,
    MAP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """For each lane's block: its index, first word of the input, row, column, group, and whether it exists.

    Rows are `row_quads` times sixteen bytes apart: so the compiler knows that all loads are aligned. LISTED: `x_ptr` is
    a table of (address, blocks, blocks before) for tensors anywhere in memory, with `blocks` programs each.
    """
    pid = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, B)
    if MAP == TILES:  # sixteen rows, neighbouring tiles side by side, so that a row is read in one piece
        width: tl.constexpr = B // 16
        chunks = (columns + width - 1) // width
        row = (pid // chunks) * 16 + lane // width
        column = (pid % chunks) * width + lane % width
        block = row * columns + column
        words = row * (row_quads * 4) + column * W
        exists = column < columns
    elif MAP == LISTED:
        listed = pid // blocks
        local = (pid % blocks) * B + lane
        exists = local < tl.load(x_ptr + 3 * listed + 1)
        block = tl.load(x_ptr + 3 * listed + 2) + local
        row = block
        column = block
        words = local * W
    else:
        block = pid * B + lane
        exists = block < blocks
        if MAP == ROWS:
            row = block // columns
            column = block - row * columns
            words = row * (row_quads * 4) + column * W
        else:
            row = block
            column = block
            words = block * W
    if MAP == LISTED:
        group = pid // blocks
    elif GROUP == GROUP_OF_PROGRAM:
        group = pid * B // group_blocks
    elif GROUP == GROUP_OF_BLOCK:
        group = tl.where(exists, block // group_blocks, 0)
    else:
        group = pid * 0
    return block, words, row, column, group, exists


@triton.jit
def source(x_ptr, group, MAP: tl.constexpr):
    """The address at which the operand starts."""
    if MAP == LISTED:
        return tl.multiple_of(tl.load(x_ptr + 3 * group).to(tl.pointer_type(tl.int32)), 16)
    else:
        return x_ptr


@triton.jit
def scale_place(block, row, column, columns, SWIZZLED: tl.constexpr):
    """Where a block's scale byte goes: row by row, or in tiles of 128 rows and 4 columns."""
    if SWIZZLED:
        tile = (row // 128) * ((columns + 3) // 4) + column // 4
        return tile * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + column % 4
    else:
        return block


# --- loading ---


@triton.jit
def _four_words(pointers, at, exists):
    """Sixteen bytes per lane, split into four words."""
    loaded = tl.load(pointers[:, None] + (tl.arange(0, 4)[None, :] + at), mask=exists[:, None], other=0)
    even, odd = tl.split(tl.reshape(loaded, (loaded.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return (first, second, third, fourth)


@triton.jit
def load_words(pointers, exists, W: tl.constexpr):
    """The W words of each lane's block."""
    words = _four_words(pointers, 0, exists)
    for i in tl.static_range(1, W // 4):
        words = words + _four_words(pointers, 4 * i, exists)
    return words


@triton.jit
def _half(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def unpack(words, W: tl.constexpr, DTYPE: tl.constexpr):
    """The values of a block as float32, exactly, in index order."""
    values = ()
    for i in tl.static_range(W):
        if DTYPE == BF16:
            values = values + (float_of(words[i] << 16), float_of(words[i] & -65536))
        elif DTYPE == FP16:
            values = values + (_half(words[i] & 0xFFFF), _half(words[i] >> 16))
        else:
            values = values + (float_of(words[i]),)
    return values


@triton.jit
def magnitudes(x, N: tl.constexpr):
    values = ()
    for i in tl.static_range(N):
        values = values + (tl.abs(x[i]),)
    return values


@triton.jit
def largest(x, N: tl.constexpr):
    """Largest magnitude; NaN wins."""
    most = tl.abs(x[0])
    for i in tl.static_range(1, N):
        most = tl.maximum(most, tl.abs(x[i]), propagate_nan=tl.PropagateNan.ALL)
    return most


@triton.jit
def over_tile(values, B: tl.constexpr):
    """For each row of a tile the largest value of its sixteen rows. Integers, so the order does not matter."""
    width: tl.constexpr = B // 16
    most = tl.max(tl.reshape(values, (16, width)), axis=0)
    return tl.reshape(tl.broadcast_to(most[None, :], (16, width)), (B,))


@triton.jit
def add_rows(values, B: tl.constexpr):
    """For each row of a tile the sum over its rows: r + (r+8), then 4, 2, 1. (contracts.reductions.rows_then_tree)"""
    width: tl.constexpr = B // 16
    a, b = tl.split(tl.permute(tl.reshape(values, (2, 8, width)), (1, 2, 0)))
    a, b = tl.split(tl.permute(tl.reshape(a + b, (2, 4, width)), (1, 2, 0)))
    a, b = tl.split(tl.permute(tl.reshape(a + b, (2, 2, width)), (1, 2, 0)))
    a, b = tl.split(tl.permute(tl.reshape(a + b, (2, 1, width)), (1, 2, 0)))
    return tl.reshape(tl.broadcast_to(a + b, (16, width)), (B,))


# --- E4M3 ---


@triton.jit
def round_e4m3(scale):
    """Byte and value of a non-negative number: nearest even, saturating at 448; NaN is 0x7F."""
    inside = tl.minimum(scale, 448.0)
    power = bits_of(tl.maximum(inside, 0.015625)) & 0x7F800000
    magic = float_of(power) * 1048576.0  # its last place is the step of this binade
    shifted = inside + magic
    byte = (bits_of(shifted) & 31) + (power >> 20) - 968
    nan = scale != scale
    return tl.where(nan, 127, byte), tl.where(nan, scale, shifted - magic)


@triton.jit
def decode_e4m3(byte):
    """Value of a byte below 127."""
    return tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, float_of((byte + 960) << 20))


# --- E2M1 ---


@triton.jit
def step_of(y):
    """P of the module's comment: 8, 16 or 32."""
    return float_of(bits_of(tl.fma(y, y, 12.5)) & 0x7F800000)


@triton.jit
def round_e2m1(y):
    """Value of y in [0, 7) on the grid."""
    step = step_of(y)
    return tl.fma(step, -524288.0, tl.fma(step, 524288.0, y))


@triton.jit
def raw_code(y):
    """An integer whose low bits are the code of y in [0, 7), plus 298; higher bits are noise."""
    shifted = bits_of(tl.fma(step_of(y), 524288.0, y))
    return shifted + (shifted >> 22)


@triton.jit
def pack_raw(raw, at):
    """Eight raw codes as a word, the first in the low nibble. Noise is shifted out, offsets are subtracted at once."""
    low = raw[at + 3]
    high = raw[at + 7]
    for i in tl.static_range(3):
        low = low * 16 + raw[at + 2 - i]
        high = high * 16 + raw[at + 6 - i]
    return ((low - 56778) & 0xFFFF) | ((high - 56778) << 16)


@triton.jit
def pack_codes(codes, N: tl.constexpr):
    """Words of eight clean codes each, the first in the low nibble."""
    words = ()
    for i in tl.static_range(N // 8):
        word = codes[8 * i]
        for j in tl.static_range(1, 8):
            word = word | (codes[8 * i + j] << (4 * j))
        words = words + (word,)
    return words


@triton.jit
def hardware_codes(y, at):
    """Eight codes by the FP4 conversion of Blackwell: nearest even, saturating; the added zero makes -0.0 code 0."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b8 a, b, c, d;
        cvt.rn.satfinite.e2m1x2.f32 a, $2, $1;
        cvt.rn.satfinite.e2m1x2.f32 b, $4, $3;
        cvt.rn.satfinite.e2m1x2.f32 c, $6, $5;
        cvt.rn.satfinite.e2m1x2.f32 d, $8, $7;
        mov.b32 $0, {a, b, c, d};
        }""",
        "=r,f,f,f,f,f,f,f,f",
        [
            y[at] + 0.0, y[at + 1] + 0.0, y[at + 2] + 0.0, y[at + 3] + 0.0,
            y[at + 4] + 0.0, y[at + 5] + 0.0, y[at + 6] + 0.0, y[at + 7] + 0.0,
        ],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def hardware_e4m3(y, at):
    """Four E4M3 codes by the hardware: nearest even, saturating, NaN 0x7F."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 a, b;
        cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;
        mov.b32 $0, {a, b};
        }""",
        "=r,f,f,f,f",
        [y[at], y[at + 1], y[at + 2], y[at + 3]],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _gather_bytes(a, b, SELECT: tl.constexpr, ASM: tl.constexpr):
    """Four of the eight bytes of two words; each digit of SELECT names one."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, SELECT], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        out = a * 0
        for i in tl.static_range(4):
            digit: tl.constexpr = (SELECT >> (4 * i)) & 7
            source = a if digit < 4 else b
            out = out | (((source >> (8 * (digit % 4))) & 0xFF) << (8 * i))
        return out


@triton.jit
def sign_words(words, W: tl.constexpr, ASM: tl.constexpr):
    """Sign bits of 16-bit values as bit 3 of each nibble, one word for every eight values."""
    signs = ()
    for i in tl.static_range(W // 4):
        first = _gather_bytes(words[4 * i], words[4 * i + 1], 0x7531, ASM)  # the bytes that hold the signs
        second = _gather_bytes(words[4 * i + 2], words[4 * i + 3], 0x7531, ASM)
        even = _gather_bytes(first, second, 0x6420, ASM)
        odd = _gather_bytes(first, second, 0x7531, ASM)
        signs = signs + (((even >> 4) & 0x08080808) | (odd & -2139062144),)
    return signs


@triton.jit
def without_negative_zeros(words, W: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The same 16-bit values with +0.0 in place of -0.0: x·1 + 0."""
    out = ()
    for i in tl.static_range(W):
        if ASM and DTYPE == BF16:
            clean = tl.inline_asm_elementwise(
                "fma.rn.bf16x2 $0, $1, $2, $3;",
                "=r,r,r,r",
                [words[i], 0x3F803F80, 0],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        elif ASM:
            clean = tl.inline_asm_elementwise(
                "fma.rn.f16x2 $0, $1, $2, $3;",
                "=r,r,r,r",
                [words[i], 0x3C003C00, 0],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        else:
            low = tl.where((words[i] & 0xFFFF) == 0x8000, 0, words[i] & 0xFFFF)
            high = tl.where((words[i] & -65536) == -2147483648, 0, words[i] & -65536)
            clean = low | high
        out = out + (clean,)
    return out


@triton.jit
def store_words(pointers, words, exists, COUNT: tl.constexpr):
    """Words of a lane side by side, sixteen bytes at a time where there are as many."""
    if COUNT % 4 == 0:
        for i in tl.static_range(COUNT // 4):
            even = tl.join(words[4 * i], words[4 * i + 2])
            odd = tl.join(words[4 * i + 1], words[4 * i + 3])
            quad = tl.reshape(tl.join(even, odd), (even.shape[0], 4))
            tl.store(pointers[:, None] + (tl.arange(0, 4)[None, :] + 4 * i), quad, mask=exists[:, None])
    else:
        for i in tl.static_range(COUNT // 2):
            pair = tl.join(words[2 * i], words[2 * i + 1])
            tl.store(pointers[:, None] + (tl.arange(0, 2)[None, :] + 2 * i), pair, mask=exists[:, None])
