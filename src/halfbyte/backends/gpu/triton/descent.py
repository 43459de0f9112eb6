"""Codes moved by one step of the grid while rᵀHr falls. (backends/reference/search.py, descend)

The search has written nearest codes and bytes; this kernel reads them and moves codes in place. It visits the elements
in index order, tries the lower neighbour first, and measures the whole objective for every try. Passes go on until one
changes nothing. A code that moved and came back is written as the grid has it, so that a zero is code 0.
"""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.blocks import (
    decode_e4m3,
    float_of,
    largest,
    load_words,
    pack_codes,
    scale_place,
    store_words,
    unpack,
)
from halfbyte.backends.gpu.triton.hessian import quadratic
from halfbyte.backends.gpu.triton.mx_search import (
    by_exponent,
    exponent_of,
    place_column,
    power_of,
)
from halfbyte.backends.gpu.triton.numbers import (
    FLOAT32_MAX,
    FP32,
    ONE_GROUP,
    SEARCHED,
    UNIT,
)
from halfbyte.backends.gpu.triton.plain import four_bytes
from halfbyte.backends.gpu.triton.scales import number
from halfbyte.backends.gpu.triton.search import (
    any_lane,
    scaled_values,
    value_of_byte,
)


@triton.jit
def _magnitude(code, WIDE: tl.constexpr):
    if WIDE:
        return decode_e4m3(code)
    else:
        return float_of(code << 22) * 8.507059173023462e37  # 2**126


@triton.jit
def _difference(place, by_scale, scaled, WIDE: tl.constexpr):
    """r of an element at a signed place on the grid, 0 in its middle."""
    magnitude = _magnitude(tl.abs(place), WIDE)
    return tl.where(place < 0, -magnitude, magnitude) * by_scale - scaled


@triton.jit(do_not_specialize=["rows", "columns", "row_quads", "group_blocks"])
def descend(
    x_ptr, codes_ptr, scales_ptr, numbers_ptr, matrices_ptr, rows, columns, row_quads, group_blocks,
    B: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, GROUP: tl.constexpr, SWIZZLED: tl.constexpr,
    POWERS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Move the codes of every searched block. POWERS: E8M0 scales; WIDE: E4M3 elements."""
    W: tl.constexpr = N if DTYPE == FP32 else N // 2
    CODES: tl.constexpr = N // 4 if WIDE else N // 8  # words of codes
    PER_WORD: tl.constexpr = 4 if WIDE else 8
    BITS: tl.constexpr = 8 if WIDE else 4
    SIGN: tl.constexpr = 128 if WIDE else 8
    END: tl.constexpr = 126 if WIDE else 7
    block, first, row, column, exists = place_column(rows, columns, row_quads, B, W)
    x = unpack(load_words(x_ptr + first, exists, W), W, DTYPE)
    v = largest(x, N)
    searched = exists & (v > 0) & (v <= FLOAT32_MAX)
    byte = tl.load(scales_ptr + scale_place(block, row, column, columns, SWIZZLED), mask=exists, other=0).to(tl.int32)
    if POWERS:
        scaled, unit = by_exponent(x, tl.where(searched, exponent_of(v), 0), N)
        by_scale = tl.where(byte == 255, float("nan"), power_of(byte)) * unit
    else:
        if GROUP == ONE_GROUP:
            group = block * 0
        else:
            group = tl.where(exists, block // group_blocks, 0)
        searched = searched & (number(numbers_ptr, group, SEARCHED) > 0)
        scaled = scaled_values(x, numbers_ptr, group, N)
        by_scale = value_of_byte(byte) * number(numbers_ptr, group, UNIT)
    matrix_ptr = matrices_ptr + column * (N * (N + 1) // 2)
    codes = ()
    places = ()
    for i in tl.static_range(N):
        at = codes_ptr + block * CODES + i // PER_WORD
        code = (tl.load(at, mask=exists, other=0) >> (BITS * (i % PER_WORD))) & (2 * SIGN - 1)
        codes = codes + (code,)
        places = places + (tl.where((code & SIGN) != 0, -(code & (SIGN - 1)), code),)
    best = tl.zeros(v.shape, tl.float32)
    moved = tl.zeros(v.shape, tl.int32)
    one = tl.full(v.shape, 1, tl.int32)
    improved = searched & (searched == 0)
    alive = searched
    turn = tl.program_id(0) * 0 - 1  # turn −1 measures what the search has left
    going = any_lane(alive)
    while going:
        index = turn // 2
        step = (turn % 2) * 2 - 1
        tried = ()
        errors = ()
        for i in tl.static_range(N):
            to = tl.minimum(tl.maximum(places[i] + step, -END), END)
            to = tl.where((index == i) & (turn >= 0), to, places[i])
            tried = tried + (to,)
            errors = errors + (_difference(to, by_scale, scaled[i], WIDE),)
        error = quadratic(errors, matrix_ptr, N)
        better = alive & (error < best) & (turn >= 0)
        best = tl.where(better | (turn < 0), error, best)
        kept = ()
        for i in tl.static_range(N):
            kept = kept + (tl.where(better, tried[i], places[i]),)
        places = kept
        moved = tl.where(better, moved | (one << tl.maximum(index, 0)), moved)
        improved = improved | better
        last = turn == 2 * N - 1
        alive = alive & (improved | (last == 0))
        improved = improved & (last == 0)
        turn = tl.where(last, 0, turn + 1)
        going = any_lane(alive)
    out = ()
    for i in tl.static_range(N):
        on_grid = tl.where(places[i] < 0, SIGN - places[i], places[i])
        out = out + (tl.where(((moved >> i) & 1) != 0, on_grid, codes[i]),)
    if WIDE:
        words = ()
        for i in tl.static_range(CODES):
            words = words + (four_bytes(out, 4 * i),)
    else:
        words = pack_codes(out, N)
    store_words(codes_ptr + block * CODES, words, searched, CODES)
