"""The exact searches of NVFP4: the scale of the format with the least squared, weighted or Hessian error."""

from __future__ import annotations

import ctypes

import numpy as np

from halfbyte.backends.cpu.call import NVFP4Call
from halfbyte.backends.cpu.codes import emit_codes, row_codes, wrap_codes
from halfbyte.backends.cpu.general_search import nvfp4_search
from halfbyte.backends.cpu.library import native, pointer
from halfbyte.backends.cpu.ranges import own_amax_in_range
from halfbyte.backends.cpu.tables_nvfp4 import build_nvfp4_tables, build_search_tables
from halfbyte.backends.derived import quadratics, scaled_weights
from halfbyte.contracts.arithmetic import first_scale_byte, scale_byte
from halfbyte.methods import Hessian, Optimal


def blocks(call: NVFP4Call) -> bool:
    """Blocks of 16. Zero blocks get the contract's own byte. Rules without a table take the general search."""
    tables = build_nvfp4_tables(call.rule, call.one_scale, call.request.dtype)
    if tables is None or not own_amax_in_range(call):
        return False
    search = build_search_tables(call.rule, call.one_scale, call.multiplier.reshape(()), tables, call.request.dtype)
    if search is None:
        return general(call)
    library, isa = native()
    method, columns = call.request.method, call.columns
    matrices = quadratics(method) if isinstance(method, Hessian) else None
    weights = scaled_weights(method, call.x.shape[1]) if isinstance(method, Optimal) else None
    descends = int(isinstance(method, Hessian) and method.codes == "descent")

    def run(start: int, stop: int) -> None:
        inputs = (
            pointer(call.x, start * call.row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns), call.dtype,
        )  # fmt: skip
        outputs = pointer(call.scales, start * columns), ctypes.byref(tables), pointer(call.codes, start * columns * 8)
        if matrices is not None:
            triangles, bounds = pointer(matrices.triangles), pointer(matrices.bounds)
            library.hb_hessian(isa, *inputs, ctypes.byref(search), triangles, bounds, descends, *outputs)
        else:
            given = None if weights is None else pointer(weights)
            library.hb_search(isa, *inputs, ctypes.byref(search), given, *outputs)

    call.over_rows(run)
    return True


def rows(call: NVFP4Call) -> bool:
    """Blocks of 16 with one global scale per row. The library builds the tables of each row."""
    if not own_amax_in_range(call):
        return False
    library, isa = native()
    factors = np.ascontiguousarray(call.t.factor.reshape(-1), np.float32)
    multipliers = np.ascontiguousarray(call.multiplier.reshape(-1), np.float32)
    first, columns = first_scale_byte(call.rule), call.columns
    zero_byte = int(scale_byte(np.zeros(1, np.float32), call.rule.scale_byte)[0])

    def run(start: int, stop: int) -> None:
        library.hb_search_rows(
            isa, pointer(call.x, start * call.row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
            call.dtype, pointer(factors, start * 4), pointer(multipliers, start * 4), first, zero_byte,
            pointer(call.scales, start * columns), pointer(call.codes, start * columns * 8),
        )  # fmt: skip

    call.over_rows(run)
    return True


def general(call: NVFP4Call) -> bool:
    """All other block lengths, roundings and objectives, with the general kernel."""
    if not own_amax_in_range(call):
        return False
    tables = None if call.by_row else build_nvfp4_tables(call.rule, call.one_scale, call.request.dtype)
    if tables is None and not call.by_row:
        return False
    search = nvfp4_search(call)
    search.fill_bytes(call)
    if tables is None:
        row_codes(call, fixed=True)
    else:
        emit_codes(call, tables)
        if call.rule.rounding.wraps:
            wrap_codes(call)
    search.descend(call)
    return True
