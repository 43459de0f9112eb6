"""The random Hadamard transform by the compiled kernels. It runs before the tensor is quantized."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.library import native, over_ranges, pointer
from halfbyte.backends.numbering import DTYPE_NUMBERS
from halfbyte.contracts.hadamard import GROUP, rotation


def rotate_matrix(x: npt.NDArray[Any], dtype: str, random_signs: bool, threads: int | None = None) -> npt.NDArray[Any]:
    """`contracts.hadamard.rotate` for a (rows, K) matrix, rounded to its own dtype. K is a multiple of 16."""
    library, isa = native()
    source = np.require(x, requirements=["C", "A"])
    out, matrix = np.empty(source.shape, source.dtype), np.ascontiguousarray(rotation(random_signs))
    size = GROUP * source.dtype.itemsize

    def run(start: int, stop: int) -> None:
        library.hb_rotate(
            isa, pointer(source, start * size), ctypes.c_int64(stop - start), DTYPE_NUMBERS[dtype], pointer(matrix),
            pointer(out, start * size),
        )  # fmt: skip

    over_ranges(run, source.size // GROUP, size, threads)
    return out
