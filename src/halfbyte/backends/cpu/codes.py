"""Codes for the scale bytes that a search chose: by the contract's tables, or by arithmetic if each row has a scale."""

from __future__ import annotations

import ctypes

import numpy as np

from halfbyte.backends.cpu.call import Call, NVFP4Call
from halfbyte.backends.cpu.library import native, pointer
from halfbyte.backends.cpu.structs import Tables
from halfbyte.backends.cpu.tables_nvfp4 import element_constants
from halfbyte.codec.bits import F32, U8


def emit_codes(call: Call, tables: Tables) -> None:
    """Write E2M1 codes with the tables of the contract and the tensor."""
    library, isa = native()

    def emit(start: int, stop: int) -> None:
        library.hb_emit(
            isa, pointer(call.x, start * call.block_bytes), ctypes.c_int64(stop - start), call.block, call.dtype,
            ctypes.byref(tables), pointer(call.codes, start * call.code_bytes), pointer(call.scales, start),
        )  # fmt: skip

    call.over_blocks(emit)


def wrap_codes(call: NVFP4Call) -> None:
    """Write the codes of elements beyond 7 under the chosen scale, for a contract whose rounding wraps."""
    library, isa = native()
    constants = np.zeros(256, np.float32)
    constants[:127] = element_constants(call.rule, call.one_scale)[1]

    def wrap(start: int, stop: int) -> None:
        library.hb_wrap(
            isa, pointer(call.x, start * call.block_bytes), ctypes.c_int64(stop - start), call.block, call.dtype,
            pointer(constants), pointer(call.codes, start * call.code_bytes), pointer(call.scales, start),
        )  # fmt: skip

    call.over_blocks(wrap)


def row_codes(call: NVFP4Call, fixed: bool) -> None:
    """Write the codes of rows with one global scale per row, and their scale bytes unless they are `fixed`.

    The kernel takes blocks of 16. A block of 32 counts as two of them. Its byte is the larger of the two bytes, because
    a larger amax never gives a smaller byte.
    """
    halves = call.block // 16
    if halves == 1:
        _direct_rows(call, call.scales, fixed)
        return
    if not fixed:
        small = np.empty((call.x.shape[0], call.x.shape[1] // 16), np.uint8)
        _direct_rows(call, small, False)
        call.scales[:] = small.reshape(*call.scales.shape, halves).max(axis=2)
    _direct_rows(call, np.repeat(call.scales, halves, axis=1), True)


def _direct_rows(call: NVFP4Call, scales: U8, fixed: bool) -> None:
    library, isa = native()
    factors: F32 = np.ascontiguousarray(call.t.factor.reshape(-1), np.float32)
    columns = scales.shape[1]

    def run(start: int, stop: int) -> None:
        library.hb_direct_rows(
            isa, pointer(call.x, start * call.row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
            call.dtype, int(fixed), pointer(factors, start * 4), pointer(call.codes, start * columns * 8),
            pointer(scales, start * columns),
        )  # fmt: skip

    call.over_rows(run)
