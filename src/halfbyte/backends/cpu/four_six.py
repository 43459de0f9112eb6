"""4over6: a kernel picks scale bytes by the errors of both scales. It also writes the codes, or the tables do."""

from __future__ import annotations

import ctypes

import numpy as np

from halfbyte.backends.cpu.call import NVFP4Call
from halfbyte.backends.cpu.codes import emit_codes, row_codes, wrap_codes
from halfbyte.backends.cpu.library import native, pointer
from halfbyte.backends.cpu.ranges import in_range, own_amax_in_range
from halfbyte.backends.cpu.structs import Tables
from halfbyte.backends.cpu.tables_nvfp4 import build_nvfp4_tables
from halfbyte.backends.numbering import ERRORS, METRICS
from halfbyte.codec.bits import F32
from halfbyte.contracts.arithmetic import four_six_error
from halfbyte.methods import FourSix


def blocks(call: NVFP4Call) -> bool:
    """Blocks of 16. The kernel finds the largest magnitude as it goes, so the range is checked afterwards."""
    if call.largest is not None and not in_range(call.largest, call):
        return False
    tables = build_nvfp4_tables(call.rule, call.one_scale, call.request.dtype)
    return tables is not None and in_range(_chosen_bytes(call, tables), call)


def rows(call: NVFP4Call) -> bool:
    """Blocks of 16 with one global scale per row."""
    if not own_amax_in_range(call):
        return False
    _chosen_bytes(call, None)
    row_codes(call, fixed=True)
    return True


def tiles(call: NVFP4Call) -> bool:
    """Tiles of 16x16. The errors of each row are added first."""
    tables = build_nvfp4_tables(call.rule, call.one_scale, call.request.dtype)
    if tables is None or not own_amax_in_range(call):
        return False
    library, isa = native()
    kind, metric = _error_and_metric(call)
    numbers, columns = _numbers(call), call.columns

    def run(start: int, stop: int) -> None:
        library.hb_four_six_tiles(
            isa, pointer(call.x, start * 16 * call.row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
            call.dtype, kind, metric, pointer(numbers), pointer(call.scales, start * 16 * columns),
        )  # fmt: skip

    call.over_rows(run, 16)
    emit_codes(call, tables)
    return True


def ordered(call: NVFP4Call) -> bool:
    """Blocks of 16 or 32, or tiles of fouroversix, with errors added in the contract's own order."""
    tables = None if call.by_row else build_nvfp4_tables(call.rule, call.one_scale, call.request.dtype)
    if (tables is None and not call.by_row) or not own_amax_in_range(call):
        return False
    library, isa = native()
    kind, metric = _error_and_metric(call)
    wraps, numbers, columns = int(call.rule.rounding.wraps), _numbers(call), call.columns

    def by_block(start: int, stop: int) -> None:
        library.hb_four_six_ordered(
            isa, pointer(call.x, start * call.row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
            call.block, call.dtype, kind, metric, wraps, pointer(numbers, start * 16 if call.by_row else 0),
            int(call.by_row), pointer(call.scales, start * columns),
        )  # fmt: skip

    def by_tile(start: int, stop: int) -> None:
        library.hb_four_six_ordered_tiles(
            isa, pointer(call.x, start * 16 * call.row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
            call.dtype, metric, pointer(numbers), pointer(call.scales, start * 16 * columns),
        )  # fmt: skip

    if call.request.tile[0] == 16:
        call.over_rows(by_tile, 16)
    else:
        call.over_rows(by_block)
    if tables is None:
        row_codes(call, fixed=True)
        return True
    emit_codes(call, tables)
    if wraps:
        wrap_codes(call)
    return True


def _chosen_bytes(call: NVFP4Call, tables: Tables | None) -> float:
    """Write the scale bytes of blocks of 16, and the codes if tables are given. Returns the largest magnitude."""
    library, isa = native()
    kind, metric = _error_and_metric(call)
    numbers, columns = _numbers(call), call.columns

    def run(start: int, stop: int) -> int:
        found = library.hb_four_six(
            isa, pointer(call.x, start * call.row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
            call.dtype, kind, metric, pointer(numbers, start * 16 if call.by_row else 0), int(call.by_row),
            pointer(call.scales, start * columns), None if tables is None else ctypes.byref(tables),
            None if tables is None else pointer(call.codes, start * columns * 8),
        )  # fmt: skip
        return int(found)

    return float(np.array(max(call.over_rows(run)), np.uint32).view(np.float32))


def _error_and_metric(call: NVFP4Call) -> tuple[int, int]:
    """The kernel's numbers of the error formula and of the measure that is added (absolute or squared)."""
    four_six, method = call.rule.four_six, call.request.method
    if four_six is None or not isinstance(method, FourSix):
        raise TypeError(f"{call.request.contract} has no 4over6")
    error = four_six_error(four_six, method, call.request.scaling)
    return ERRORS.index(error), METRICS.index(method.error)


def _numbers(call: NVFP4Call) -> F32:
    """native/kernels.h: FourSixScale, one for the tensor or one per row."""
    factor = call.t.factor.reshape(-1)
    numbers = [factor, np.float32(1) / factor, call.t.amax.reshape(-1), np.full_like(factor, call.t.top)]
    return np.stack(numbers, axis=-1).astype(np.float32)
