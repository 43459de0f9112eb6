"""Codes for scale bytes that a search has chosen: by the contract's tables, or by arithmetic where rows differ."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.library import DTYPE_CODES, Tables, native, over_ranges, pointer
from halfbyte.backends.cpu.tables import element_constants, one_scale
from halfbyte.backends.protocol import Request
from halfbyte.codec.bits import F32, U8
from halfbyte.contracts import NVFP4Rule
from halfbyte.contracts.spec import TensorScale


def emit_codes(x: npt.NDArray[Any], tables: Tables, request: Request, codes: U8, scales: U8) -> None:
    """E2M1 codes by the tables of the contract and the tensor."""
    library, isa = native()
    block, dtype = request.format.block, DTYPE_CODES[request.dtype]
    size = block * x.dtype.itemsize

    def emit(start: int, stop: int) -> None:
        library.hb_emit(
            isa, pointer(x, start * size), ctypes.c_int64(stop - start), block, dtype, ctypes.byref(tables),
            pointer(codes, start * block // 2), pointer(scales, start),
        )  # fmt: skip

    over_ranges(emit, scales.size, size, request.threads)


def wrap_codes(
    x: npt.NDArray[Any], rule: NVFP4Rule, t: TensorScale, request: Request, codes: U8, scales: U8
) -> None:  # fmt: skip
    """The codes of a contract whose rounding wraps, where an element lies beyond 7 under the chosen scale."""
    library, isa = native()
    block, dtype = request.format.block, DTYPE_CODES[request.dtype]
    size = block * x.dtype.itemsize
    constants = np.zeros(256, np.float32)
    constants[:127] = element_constants(rule, one_scale(t))[1]

    def wrap(start: int, stop: int) -> None:
        library.hb_wrap(
            isa, pointer(x, start * size), ctypes.c_int64(stop - start), block, dtype, pointer(constants),
            pointer(codes, start * block // 2), pointer(scales, start),
        )  # fmt: skip

    over_ranges(wrap, scales.size, size, request.threads)


def row_codes(x: npt.NDArray[Any], factors: F32, request: Request, codes: U8, scales: U8, fixed: bool) -> None:
    """Codes of rows with their own global scale; scale bytes too, unless they are there already (`fixed`).

    The kernel takes blocks of 16. A block of 32 is two of them: its byte is the larger of theirs, because bytes never
    fall as the amax grows.
    """
    halves = request.format.block // 16
    if halves == 1:
        _direct_rows(x, factors, request, codes, scales, fixed)
        return
    small = np.repeat(scales, halves, axis=1) if fixed else np.empty((x.shape[0], x.shape[1] // 16), np.uint8)
    if not fixed:
        _direct_rows(x, factors, request, codes, small, False)
        scales[:] = small.reshape(*scales.shape, halves).max(axis=2)
        small = np.repeat(scales, halves, axis=1)
    _direct_rows(x, factors, request, codes, small, True)


def _direct_rows(x: npt.NDArray[Any], factors: F32, request: Request, codes: U8, scales: U8, fixed: bool) -> None:
    library, isa = native()
    given = np.ascontiguousarray(factors.reshape(-1), np.float32)
    columns, row_bytes = scales.shape[1], x.shape[1] * x.dtype.itemsize

    def run(start: int, stop: int) -> None:
        library.hb_direct_rows(
            isa, pointer(x, start * row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
            DTYPE_CODES[request.dtype], int(fixed), pointer(given, start * 4), pointer(codes, start * columns * 8),
            pointer(scales, start * columns),
        )  # fmt: skip

    over_ranges(run, scales.shape[0], row_bytes, request.threads)
