"""The peers' own searches on compiled kernels: fouroversix, Model-Optimizer's static weights, qwantize."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.codes import emit_codes
from halfbyte.backends.cpu.library import (
    DTYPE_CODES,
    PeerSearch,
    SweepTables,
    Tables,
    as_array,
    native,
    over_ranges,
    pointer,
)
from halfbyte.backends.protocol import Request
from halfbyte.backends.reference.quantize import Reference, scale_byte
from halfbyte.codec.bits import F32, U8
from halfbyte.contracts import NVFP4Rule, expressions, reductions
from halfbyte.contracts.searches.qwantize import search_e4m3, search_e8m0
from halfbyte.contracts.searches.static import copy_factor, search_block_amax, searched_scale, sweep_amaxes
from halfbyte.contracts.spec import FourSixRule, ScaleSearch, TensorScale
from halfbyte.formats import E4M3, E8M0
from halfbyte.formats.spec import ElementFormat
from halfbyte.methods import FourSix, Hessian, Method, Optimal, Sweep

REFERENCE = Reference()

ERRORS: list[Callable[[F32, F32, F32, TensorScale], F32]] = [
    expressions.error_by_amax,
    expressions.error_by_reciprocal,
    expressions.error_scaled,
]
"""Error formulas of 4over6 by the number that the kernels know them by."""

MEASURES = ["mae", "mse", "abs_max"]
"""In the order of native/searches.h."""

SCALE_SEARCHES: dict[ScaleSearch, tuple[ElementFormat, int]] = {search_e4m3: (E4M3, 1), search_e8m0: (E8M0, 2)}
"""qwantize's searches: the format of their scales, and which limit clipping has with a Hessian (native/searches.h)."""

UNITS_OFF = 4 * 2.0**-24
"""How far the sweep's scales may be from E4M3 values times one number for its quick kernel to be exact."""


def four_six_error(
    four_six: FourSixRule, method: FourSix, request: Request
) -> Callable[[F32, F32, F32, TensorScale], F32]:
    """The error formula that a 4over6 request asks for."""
    if method.fast_error and four_six.fast_error is not None:
        return four_six.fast_error
    if request.scaling == "row" and four_six.exact_row_error is not None:
        return four_six.exact_row_error
    return four_six.exact_error


def four_six_numbers(t: TensorScale) -> F32:
    """kernels.h: FourSixScale, one for the tensor or one a row."""
    factor = t.factor.reshape(-1)
    numbers = [factor, np.float32(1) / factor, t.amax.reshape(-1), np.full_like(factor, t.top)]
    return np.stack(numbers, axis=-1).astype(np.float32)


def four_six_bytes(x: npt.NDArray[Any], rule: NVFP4Rule, t: TensorScale, request: Request, scales: U8) -> None:
    """Scale bytes of 4over6 in blocks of 16 or 32, or tiles of fouroversix, errors added as the contract adds them."""
    library, isa = native()
    four_six, method = rule.four_six, request.method
    if four_six is None or not isinstance(method, FourSix):
        raise TypeError(f"{request.contract} has no 4over6")
    kind, measure = ERRORS.index(four_six_error(four_six, method, request)), MEASURES.index(method.error)
    peer, per_row, numbers = rule.rounding.wraps, request.scaling == "row", four_six_numbers(t)
    rows, columns = scales.shape
    row_bytes, dtype = x.shape[1] * x.dtype.itemsize, DTYPE_CODES[request.dtype]

    def blocks(start: int, stop: int) -> None:
        library.hb_four_six_ordered(
            isa, pointer(x, start * row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
            request.format.block, dtype, kind, measure, int(peer), pointer(numbers, start * 16 if per_row else 0),
            int(per_row), pointer(scales, start * columns),
        )  # fmt: skip

    def tiles(start: int, stop: int) -> None:
        library.hb_four_six_ordered_tiles(
            isa, pointer(x, start * 16 * row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns), dtype,
            measure, pointer(numbers), pointer(scales, start * 16 * columns),
        )  # fmt: skip

    if request.tile[0] == 16:
        over_ranges(tiles, rows // 16, 16 * row_bytes, request.threads)
    else:
        over_ranges(blocks, rows, row_bytes, request.threads)


def ordered_reason(rule: NVFP4Rule, request: Request) -> str | None:
    """Why a 4over6 request has no kernel here; None if it has."""
    four_six = rule.four_six
    if four_six is None:
        return "this contract has no 4over6"
    peer = rule.rounding.wraps
    wanted = reductions.eight_lanes if peer else reductions.sequential
    if four_six.block_sum is not wanted or (peer and four_six.exact_error is not expressions.error_by_amax):
        return "4over6 is compiled for errors added in index order or in eight lanes"
    return None


# --- Model-Optimizer's static weights ---


def has_static_search(rule: NVFP4Rule, method: Method) -> bool:
    """Whether a method is one of Model-Optimizer's searches under this rule."""
    return rule.block_search is search_block_amax and method in rule.searches


@np.errstate(all="ignore")
def static_bytes(x: npt.NDArray[Any], rule: NVFP4Rule, t: TensorScale, request: Request, scales: U8) -> None:
    """Scale bytes of the static 4over6 or of the sweep."""
    library, isa = native()
    block, dtype = request.format.block, DTYPE_CODES[request.dtype]
    size = block * x.dtype.itemsize
    one = TensorScale(t.amax.reshape(1), t.factor.reshape(1), t.largest, t.top, t.statistics)
    sweep = sweep_tables(rule, one, request.method) if isinstance(request.method, Sweep) else None
    factor = copy_factor(one)
    numbers = np.array(
        [factor[0], np.float32(1) / factor[0], t.top / np.float32(6), one.amax[0] / np.float32(6),
         rule.scale_byte.smallest], np.float32,
    )  # fmt: skip

    def run(start: int, stop: int) -> None:
        inputs = pointer(x, start * size), ctypes.c_int64(stop - start), block, dtype
        if sweep is None:
            library.hb_static_four_six(isa, *inputs, pointer(numbers), pointer(scales, start))
        else:
            library.hb_sweep(isa, *inputs, ctypes.byref(sweep), pointer(scales, start))

    over_ranges(run, scales.size, size, request.threads)


@np.errstate(all="ignore")
def sweep_tables(rule: NVFP4Rule, t: TensorScale, method: Sweep) -> SweepTables:
    """The sweep's 126 scales, the same for every block of the tensor, and the bytes that stand for them."""
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


def scale_search_reason(search: ScaleSearch, method: Method) -> str | None:
    """Why a peer's own scale search has no kernel; None if it has."""
    if search not in SCALE_SEARCHES:
        return "this contract's own search has no compiled kernel"
    if isinstance(method, Optimal) and method.weights is not None:
        return "qwantize's search knows no weights"
    if isinstance(method, Hessian) and method.codes != "nearest":
        return f"qwantize's search has no codes={method.codes!r}"
    return None


def search_as_peer(
    x: npt.NDArray[Any],
    search: ScaleSearch,
    naive: Tables,
    tables: Tables,
    request: Request,
    codes: U8,
    scales: U8,
) -> None:
    """qwantize's search from the bytes of its naive scales. Blocks that no table describes go to the reference.

    naive: tables of the contract's own bytes. tables: thresholds under every byte that the search may choose.
    """
    library, isa = native()
    format, limit = SCALE_SEARCHES[search]
    block, dtype = request.format.block, DTYPE_CODES[request.dtype]
    method = request.method
    own = PeerSearch(block=block, dtype=dtype, last=format.magnitudes.size - 1)
    as_array(own.value, np.float32)[: format.magnitudes.size] = format.magnitudes
    if isinstance(method, Hessian):
        matrices = np.ascontiguousarray(method.matrices)
        own.limit, own.h = limit, matrices.ctypes.data
    rows, columns = scales.shape
    row_bytes, size = x.shape[1] * x.dtype.itemsize, block * x.dtype.itemsize
    irregular = np.empty(scales.size, np.int64)

    def run(start: int, stop: int) -> npt.NDArray[np.int64]:
        at = start * columns
        found = library.hb_plain(
            isa, pointer(x, at * size), ctypes.c_int64((stop - start) * columns), block, dtype, ctypes.byref(naive),
            pointer(codes, at * block // 2), pointer(scales, at), pointer(irregular, at * 8),
        )  # fmt: skip
        library.hb_peer_search(
            isa, pointer(x, start * row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
            ctypes.byref(own), pointer(scales, at),
        )  # fmt: skip
        return np.asarray(irregular[at : at + int(found)] + at)

    listed = np.concatenate(over_ranges(run, rows, row_bytes, request.threads))
    emit_codes(x, tables, request, codes, scales)
    patch_rows(x, listed, request, codes, scales)


def patch_rows(x: npt.NDArray[Any], listed: npt.NDArray[np.int64], request: Request, codes: U8, scales: U8) -> None:
    """Rows with listed blocks by the reference: weights and Hessians belong to columns, so whole rows go."""
    if listed.size:
        touched = np.unique(listed // scales.shape[1])
        parts = REFERENCE.quantize(x[touched], dataclasses.replace(request, out=None))
        codes[touched], scales[touched] = parts.codes, parts.scales
