"""Equality of bits: the only comparison in halfbyte's tests, conformance runs and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.arrays import Array, to_numpy


@dataclass(frozen=True)
class Difference:
    """The difference between two arrays, and where it is first."""

    reason: str
    count: int = 0
    """The number of elements that differ; 0 if the shape or dtype differs."""
    index: tuple[int, ...] = ()
    """The first element that differs."""


def find_difference(got: Array, expected: Array, *, any_nan: bool = False, e4m3: bool = False) -> Difference | None:
    """None if dtype, shape and all bits are equal, else the first difference.

    -0.0 and +0.0 differ. `any_nan`: NaNs with different bits count as equal. `e4m3`: the bytes are E4M3, where 0x7F and
    0xFF are both NaN.
    """
    a, b = to_numpy(got), to_numpy(expected)
    if a.dtype != b.dtype:
        return Difference(f"dtype {a.dtype} where {b.dtype} is expected")
    if a.shape != b.shape:
        return Difference(f"shape {a.shape} where {b.shape} is expected")
    different = _bits(a) != _bits(b)
    if any_nan and a.dtype.kind in "fV":  # ml_dtypes report kind V
        with np.errstate(invalid="ignore"):
            different &= ~(np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64)))
    if e4m3:
        different &= (a & 0x7F != 0x7F) | (b & 0x7F != 0x7F)
    if not different.any():
        return None
    where = np.argwhere(different)[0]
    index = tuple(int(i) for i in where)
    values = f"{_hex(a[index])} where {_hex(b[index])} is expected"
    count = int(different.sum())
    return Difference(f"{count} of {different.size} elements differ, first at {index}: {values}", count, index)


def assert_same_bits(
    got: Array, expected: Array, *, inputs: Array | None = None, any_nan: bool = False, e4m3: bool = False
) -> None:
    """Raise AssertionError unless two arrays have the same dtype, shape and bits.

    `inputs`: the tensor that both arrays were computed from. The inputs of the first difference are printed in hex.
    """
    difference = find_difference(got, expected, any_nan=any_nan, e4m3=e4m3)
    if difference is None:
        return
    message = difference.reason
    if inputs is not None and difference.index:
        message += "\n" + _inputs_there(to_numpy(inputs), difference.index, to_numpy(expected).shape)
    raise AssertionError(message)


def _inputs_there(inputs: npt.NDArray[Any], index: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """The 32 inputs around the position of one element of a result (results may be narrower than inputs)."""
    *leading, column = index
    row = int(np.ravel_multi_index(leading, shape[:-1])) if leading else 0
    matrix = inputs.reshape(-1, inputs.shape[-1])
    start = column * matrix.shape[1] // shape[-1] // 32 * 32
    there = matrix[row % matrix.shape[0], start : start + 32]
    return f"inputs of row {row} from {start} on: " + hex_rows(there)


def _bits(a: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if a.dtype == np.bool_:
        return a
    return np.ascontiguousarray(a).reshape(a.shape).view(np.dtype(f"u{a.dtype.itemsize}"))


def _hex(value: np.generic) -> str:
    """Bits of one number in hex, e.g. 0x3f800000."""
    return f"0x{int.from_bytes(value.tobytes()[::-1], 'big'):0{2 * value.dtype.itemsize}x}"


def hex_rows(values: npt.NDArray[Any]) -> str:
    """A flat array in hex, for messages."""
    return " ".join(_hex(value) for value in values.reshape(-1))
