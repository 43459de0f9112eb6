"""Blocks of 4-bit codes against the values they stand for, by a kernel of its own if the library is installed.

It shares nothing with the kernels that quantize and decode, because `halfbyte verify` checks those with it.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.library import choose_isa, load_library, pointer
from halfbyte.backends.numbering import DTYPE_NUMBERS
from halfbyte.codec.bits import BFLOAT16, F32, U8

F64 = npt.NDArray[np.float64]


class Compared(NamedTuple):
    """What each block adds up to, in arrays [rows, blocks]; and the largest difference of all, without NaN."""

    amax: F32
    product: F32
    power: F32
    squares: F64
    off: F64
    wrong: npt.NDArray[np.bool_]
    largest: float


def compare_blocks(x: npt.NDArray[Any], codes: U8, factors: F32, tables: F32) -> Compared | None:
    """Compare rows of codes with rows of values; None if there is no kernel for them.

    x: (rows, columns) in float32 or bfloat16. codes: (rows, columns / 2), the even element in the low nibble.
    factors: (rows, blocks), what the codes of each block are multiplied by.
    tables: (3, 16): of each code, its value and the smallest and largest quotient |x| / |factor| that it is nearest to.
    """
    library = load_library()
    block = x.shape[1] // factors.shape[1] if factors.size else 0
    if library is None or x.dtype not in (np.float32, BFLOAT16) or block not in (16, 32):
        return None
    if not (x.flags.c_contiguous and codes.flags.c_contiguous and factors.flags.c_contiguous):
        return None
    shape = factors.shape
    amax, product, power = (np.empty(shape, np.float32) for _ in range(3))
    squares, off = np.empty(shape), np.empty(shape)
    wrong = np.empty(shape, np.bool_)
    dtype = DTYPE_NUMBERS["fp32" if x.dtype == np.float32 else "bf16"]
    largest = library.hb_compare_blocks(
        choose_isa(library), pointer(x), dtype, pointer(codes), pointer(factors), ctypes.c_int64(factors.size), block,
        pointer(tables), pointer(amax), pointer(product), pointer(power), pointer(squares), pointer(off),
        pointer(wrong),
    )  # fmt: skip
    return Compared(amax, product, power, squares, off, wrong, float(largest))
