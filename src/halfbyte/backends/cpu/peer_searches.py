"""Searches that belong to one peer: Model-Optimizer's for static weights, and qwantize's."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.call import Call, NVFP4Call
from halfbyte.backends.cpu.codes import emit_codes
from halfbyte.backends.cpu.library import native, pointer
from halfbyte.backends.cpu.ranges import own_amax_in_range
from halfbyte.backends.cpu.structs import PeerSearch, SweepTables, Tables, as_array
from halfbyte.backends.cpu.tables_nvfp4 import build_nvfp4_tables
from halfbyte.codec.bits import F32
from halfbyte.contracts import NVFP4Rule
from halfbyte.contracts.arithmetic import scale_byte
from halfbyte.contracts.searches.qwantize import search_e4m3, search_e8m0
from halfbyte.contracts.searches.static import copy_factor, searched_scale, sweep_amaxes
from halfbyte.contracts.spec import ScaleSearch, TensorScale
from halfbyte.formats import E4M3, E8M0
from halfbyte.formats.spec import ElementFormat
from halfbyte.methods import Hessian, Sweep

SCALE_SEARCHES: dict[ScaleSearch, tuple[ElementFormat, int]] = {search_e4m3: (E4M3, 1), search_e8m0: (E8M0, 2)}
"""qwantize's searches: the format of their scales, and which limit clipping has with a Hessian (native/searches.h)."""

UNITS_OFF = 4 * 2.0**-24
"""The quick kernel is exact while the sweep's scales are within this of E4M3 values times one number (relative)."""


# --- Model-Optimizer's static weights ---


@np.errstate(all="ignore")
def static(call: NVFP4Call) -> bool:
    """The static 4over6, or the sweep over 126 scales."""
    tables = build_nvfp4_tables(call.rule, call.one_scale, call.request.dtype)
    if tables is None or not own_amax_in_range(call):
        return False
    library, isa = native()
    method, t = call.request.method, call.t
    one = TensorScale(t.amax.reshape(1), t.factor.reshape(1), t.largest, t.top, t.statistics)
    sweep = sweep_tables(call.rule, one, method) if isinstance(method, Sweep) else None
    factor = copy_factor(one)
    numbers = np.array(
        [factor[0], np.float32(1) / factor[0], t.top / np.float32(6), one.amax[0] / np.float32(6),
         call.rule.scale_byte.smallest], np.float32,
    )  # fmt: skip

    def run(start: int, stop: int) -> None:
        inputs = pointer(call.x, start * call.block_bytes), ctypes.c_int64(stop - start), call.block, call.dtype
        if sweep is None:
            library.hb_static_four_six(isa, *inputs, pointer(numbers), pointer(call.scales, start))
        else:
            library.hb_sweep(isa, *inputs, ctypes.byref(sweep), pointer(call.scales, start))

    call.over_blocks(run)
    emit_codes(call, tables)
    return True


@np.errstate(all="ignore")
def sweep_tables(rule: NVFP4Rule, t: TensorScale, method: Sweep) -> SweepTables:
    """The 126 scales of the sweep, which are the same for every block of the tensor, and their bytes."""
    amaxes = np.concatenate(sweep_amaxes(t))
    scale: F32 = amaxes / np.float32(6) if method.fused else searched_scale(amaxes, t)
    tables = SweepTables(ascending=int((scale > 0).all() and (np.diff(scale) >= 0).all() and np.isfinite(scale).all()))
    as_array(tables.scale, np.float32)[:] = scale
    as_array(tables.byte, np.uint8)[:126] = scale_byte(rule.pre_scale(amaxes, t), rule.scale_byte)
    values = E4M3.magnitudes[1:]
    unit = np.float32(scale[63] / values[63])
    off = np.abs(scale.astype(np.float64) / (values.astype(np.float64) * float(unit)) - 1)
    tables.unit, tables.regular = float(unit), int(tables.ascending and off.max() <= UNITS_OFF)
    return tables


# --- qwantize ---


def nvfp4_by_qwantize(call: NVFP4Call) -> bool:
    """qwantize's search of E4M3 scales."""
    tables = build_nvfp4_tables(call.rule, call.one_scale, call.request.dtype)
    if tables is not None:
        search_as_qwantize(call, search_e4m3, tables, tables)
    return tables is not None


def search_as_qwantize(call: Call, search: ScaleSearch, naive: Tables, tables: Tables) -> None:
    """qwantize's search, which starts from the naive bytes. The reference quantizes blocks that no table describes.

    naive: tables for the naive bytes. tables: thresholds of the codes under every byte that the search may choose.
    """
    library, isa = native()
    format, limit = SCALE_SEARCHES[search]
    method, columns = call.request.method, call.columns
    own = PeerSearch(block=call.block, dtype=call.dtype, last=format.magnitudes.size - 1)
    as_array(own.value, np.float32)[: format.magnitudes.size] = format.magnitudes
    if isinstance(method, Hessian):
        matrices = np.ascontiguousarray(method.matrices)
        own.limit, own.h = limit, matrices.ctypes.data
    irregular = np.empty(call.scales.size, np.int64)

    def run(start: int, stop: int) -> npt.NDArray[np.int64]:
        at, rows = start * columns, ctypes.c_int64(stop - start)
        x = pointer(call.x, start * call.row_bytes)
        found = library.hb_plain(
            isa, x, ctypes.c_int64((stop - start) * columns), call.block, call.dtype, ctypes.byref(naive),
            pointer(call.codes, at * call.code_bytes), pointer(call.scales, at), pointer(irregular, at * 8),
        )  # fmt: skip
        library.hb_peer_search(
            isa, x, rows, ctypes.c_int64(columns), ctypes.byref(own), pointer(call.scales, at)
        )  # fmt: skip
        return np.asarray(irregular[at : at + int(found)] + at)

    listed = np.concatenate(call.over_rows(run))
    emit_codes(call, tables)
    call.patch_rows(listed)
