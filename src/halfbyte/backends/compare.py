"""Rows of 4-bit codes against the values they stand for, by a kernel of its own if the library is installed.

It shares no arithmetic with the kernels that quantize and decode, because `halfbyte verify` checks those with it. The
rules of scales belong to verify, which hands their numbers over and reads the marks.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.library import choose_isa, load_library, pointer
from halfbyte.backends.cpu.structs import ScaleJudge, StoredRows, as_array
from halfbyte.backends.numbering import DTYPE_NUMBERS
from halfbyte.codec.bits import BFLOAT16, F32, U8

F64 = npt.NDArray[np.float64]


class ScaleMark(enum.IntFlag):
    """Which rules the scale of a block obeys; the bits of native/compare.h."""

    EXACTLY_SIX = 1
    LOOSELY_SIX = 2
    CLEARLY_SIX = 4
    EXACTLY_FOUR = 8
    LOOSELY_FOUR = 16
    CLEARLY_FOUR = 32
    LEAST_SQUARES = 64
    TOLD = 128


ROW_SUMS = np.dtype([("squares", np.float64), ("off", np.float64), ("wrong", np.int64)])


class Compared(NamedTuple):
    """What a comparison of rows gave."""

    squares: F64
    """Sum of the squared source, of each row."""
    off: F64
    """Sum of the squared differences, of each row."""
    wrong: npt.NDArray[np.int64]
    """Blocks with a code that is not the nearest, of each row."""
    marks: U8 | None
    """`ScaleMark` of each block, [rows, blocks]; None where scales have no rules."""
    factor_sums: F64
    """Sums of product, power, squares and squared difference of the first two, each block in units of its scale."""
    largest: float
    """The largest difference, without NaN."""
    blocks: int
    """Of one row."""


def compare_rows(
    x: npt.NDArray[Any], codes: U8, scale_bytes: U8, numbers: tuple[F32, float, F32], judge: Mapping[str, Any] | None
) -> Compared | None:
    """Compare rows of codes with rows of values; None if there is no kernel for them.

    x: (rows, columns) in float32 or bfloat16. codes: (rows, columns / 2), the even element in the low nibble.
    scale_bytes: (rows, blocks). numbers: the value of every scale byte, the tensor scale, and a (3, 16) table: of each
    code, its value and the smallest and largest quotient x / |factor| that it is nearest to.
    judge: the fields of ScaleJudge in native/compare.h; None where scales have no rules.
    """
    library = load_library()
    block = x.shape[1] // scale_bytes.shape[1] if scale_bytes.size else 0
    if library is None or x.dtype not in (np.float32, BFLOAT16) or block not in (16, 32):
        return None
    if not all(array.flags.c_contiguous for array in (x, codes, scale_bytes)):
        return None
    values, tensor_scale, tables = numbers
    rows, columns = scale_bytes.shape
    stored = StoredRows(rows, columns, block, tensor_scale, values.ctypes.data, tables.ctypes.data)
    marks = None if judge is None else np.empty((rows, columns), np.uint8)
    row_sums, sums = np.empty(rows, ROW_SUMS), np.zeros(4)
    largest = library.hb_compare_rows(
        choose_isa(library), pointer(x), DTYPE_NUMBERS["fp32" if x.dtype == np.float32 else "bf16"], pointer(codes),
        pointer(scale_bytes), ctypes.byref(stored), None if judge is None else ctypes.byref(_judge(judge)),
        pointer(row_sums), None if marks is None else pointer(marks), pointer(sums),
    )  # fmt: skip
    return Compared(row_sums["squares"], row_sums["off"], row_sums["wrong"], marks, sums, float(largest), columns)


def _judge(numbers: Mapping[str, Any]) -> ScaleJudge:
    judge = ScaleJudge()
    for name, value in numbers.items():
        if isinstance(value, float | np.floating):
            setattr(judge, name, float(value))
        else:
            as_array(getattr(judge, name), np.float32)[:] = value
    return judge
