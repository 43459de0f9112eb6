"""The compiled searches: 4over6, the exact scale, the Hessian, and rows with their own global scale.

A kernel picks the scale bytes; codes then come from the tables of the contract (or, for row scaling, by arithmetic).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.codes import emit_codes, row_codes, wrap_codes
from halfbyte.backends.cpu.general_search import nvfp4_search, prepared, scaled_weights
from halfbyte.backends.cpu.library import DTYPE_CODES, Tables, native, over_ranges, pointer
from halfbyte.backends.cpu.peer_searches import (
    ERRORS,
    four_six_bytes,
    four_six_error,
    four_six_numbers,
    has_static_search,
    ordered_reason,
    scale_search_reason,
    search_as_peer,
    static_bytes,
)
from halfbyte.backends.cpu.tables import (
    PRE_SCALES,
    build_nvfp4_tables,
    build_search_tables,
    first_byte,
    magnitude_values,
    one_scale,
)
from halfbyte.backends.protocol import Request
from halfbyte.backends.reference.quantize import scale_byte
from halfbyte.codec.bits import F32, U8
from halfbyte.contracts import NVFP4Rule, expressions
from halfbyte.contracts.spec import FourSixRule, TensorScale
from halfbyte.methods import Amax, FourSix, Hessian, Optimal

IN_RANGE = (2.0**-60, 2.0**60)
"""Amaxes for which no product of the searches under- or overflows, so that powers of two may be factored out."""

MULTIPLIERS = (2.0**-80, 2.0**60)
LARGEST_OVER_MULTIPLIER = 2.0**50
"""A caller's own amax or factor may not fit the tensor: beyond these, squared errors would overflow."""


def search_reason(request: Request, rule: NVFP4Rule) -> str | None:
    """Why the compiled kernels cannot serve an NVFP4 request; None if they can."""
    method = request.method
    if request.scaling == "row" and rule.element is not expressions.times_clamped_reciprocal:
        return "row scaling is compiled for TransformerEngine's formulas only"
    if rule.pre_scale not in PRE_SCALES:
        return "its scale formula has no compiled table"
    if has_static_search(rule, method):
        return None
    if isinstance(method, FourSix):
        return ordered_reason(rule, request)
    if isinstance(method, Optimal | Hessian):
        return None if rule.scale_search is None else scale_search_reason(rule.scale_search, method)
    return None if isinstance(method, Amax) else f"method {method.name} has no compiled kernel"


def _quickest(rule: NVFP4Rule, request: Request) -> bool:
    """Whether a search has a kernel of its own in this file, beside those that take what is left."""
    method = request.method
    if request.format.block != 16 or rule.rounding.wraps or has_static_search(rule, method):
        return False
    if isinstance(method, Optimal | Hessian):
        if request.scaling == "row" and (isinstance(method, Hessian) or method.channel_weights is not None):
            return False
        return rule.rounding.tie == "even" or request.dtype != "fp32"
    return True


def choose_bytes(
    x: npt.NDArray[Any],
    rule: NVFP4Rule,
    t: TensorScale,
    multiplier: F32,
    request: Request,
    codes: U8,
    scales: U8,
    largest: float | None,
) -> bool:
    """Fill codes and scales of a contiguous matrix; False where the numbers leave the compiled range.

    `largest`: the matrix's own largest magnitude, if it is known already.
    """
    if rule.scale_search is not None and isinstance(request.method, Optimal | Hessian):
        tables = build_nvfp4_tables(rule, one_scale(t), request.dtype)
        if tables is not None:
            search_as_peer(x, rule.scale_search, tables, tables, request, codes, scales)
        return tables is not None
    # The kernels of 4over6 and of plain tiles find the largest magnitude: its range is checked behind them.
    quickest = _quickest(rule, request)
    method_of_kernel = FourSix if request.tile[0] == 1 else Amax
    checked_behind = quickest and request.scaling == "tensor" and isinstance(request.method, method_of_kernel)
    if largest is None:
        largest = 0.0 if checked_behind else _largest(x, request)
    if not _in_range(largest, t, multiplier):
        return False
    if not quickest:
        return _choose_otherwise(x, rule, t, multiplier, request, codes, scales)
    if request.scaling == "row" and isinstance(request.method, Optimal):
        _exact_rows(x, rule, t, multiplier, request, codes, scales)
        return True
    if request.scaling == "row":
        if isinstance(request.method, FourSix) and rule.four_six is not None:
            _four_six(x, rule.four_six, request.method, t, request, scales)
        row_codes(x, t.factor, request, codes, scales, isinstance(request.method, FourSix))
        return True
    tables = build_nvfp4_tables(rule, one_scale(t), request.dtype)
    if tables is None:
        return False
    if isinstance(request.method, Amax):
        return _in_range(_plain_tiles(x, rule, t, tables, request, codes, scales), t, multiplier)
    elif isinstance(request.method, FourSix) and rule.four_six is not None:
        found = _four_six(x, rule.four_six, request.method, t, request, scales, tables, codes)
        if request.tile[0] == 16:
            emit_codes(x, tables, request, codes, scales)
        else:
            return _in_range(found, t, multiplier)
    else:
        return _exact(x, rule, t, multiplier, request, scales, tables, codes)
    return True


def _choose_otherwise(
    x: npt.NDArray[Any], rule: NVFP4Rule, t: TensorScale, multiplier: F32, request: Request, codes: U8, scales: U8
) -> bool:
    """The peers' own searches, blocks of 32, codes that wrap, and what else the quickest kernels leave."""
    method, by_row = request.method, request.scaling == "row"
    tables = None if by_row else build_nvfp4_tables(rule, one_scale(t), request.dtype)
    if not by_row and tables is None:
        return False
    search = None
    if has_static_search(rule, method):
        static_bytes(x, rule, t, request, scales)
    elif isinstance(method, FourSix):
        four_six_bytes(x, rule, t, request, scales)
    elif isinstance(method, Optimal | Hessian):
        search = nvfp4_search(rule, t, multiplier, request, x.shape[1])
        search.bytes_of(x, request, scales)
    elif tables is not None:
        _plain_tiles(x, rule, t, tables, request, codes, scales)
    if tables is None:
        row_codes(x, t.factor, request, codes, scales, not isinstance(method, Amax))
    else:
        if not isinstance(method, Amax):
            emit_codes(x, tables, request, codes, scales)
        if rule.rounding.wraps:
            wrap_codes(x, rule, t, request, codes, scales)
    if search is not None:
        search.descend(x, request, codes, scales)
    return True


def _largest(x: npt.NDArray[Any], request: Request) -> float:
    """Largest magnitude of the tensor itself, NaN and Inf included."""
    library, isa = native()
    size, dtype = x.dtype.itemsize, DTYPE_CODES[request.dtype]

    def part(start: int, stop: int) -> int:
        return int(library.hb_amax(isa, pointer(x, start * size), ctypes.c_int64(stop - start), dtype))

    bits = max(over_ranges(part, x.size, size, request.threads))
    return float(magnitude_values(np.array(bits, np.int64), request.dtype))


def _in_range(largest: float, t: TensorScale, multiplier: F32) -> bool:
    """Whether the kernels' shortcuts are exact for these numbers; NaN and Inf never are."""
    amaxes = (t.amax >= IN_RANGE[0]) & (t.amax <= IN_RANGE[1])
    multipliers = (multiplier >= MULTIPLIERS[0]) & (multiplier <= MULTIPLIERS[1])
    bounded = largest <= multiplier.astype(np.float64) * LARGEST_OVER_MULTIPLIER
    return bool(np.isfinite(largest) and amaxes.all() and multipliers.all() and bounded.all())


@np.errstate(all="ignore")
def _plain_tiles(
    x: npt.NDArray[Any], rule: NVFP4Rule, t: TensorScale, tables: Tables, request: Request, codes: U8, scales: U8
) -> float:
    """Plain 16x16 tiles: each tile's byte stands on its sixteen rows. Returns the largest magnitude; NaN wins."""
    library, isa = native()
    rows, columns = x.shape[0] // 16, x.shape[1] // 16
    row_bytes, dtype = x.shape[1] * x.dtype.itemsize, DTYPE_CODES[request.dtype]
    bits = np.empty((rows, columns), np.uint32)

    def run(start: int, stop: int) -> int:
        irregular = library.hb_plain_tiles(
            isa, pointer(x, start * 16 * row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns), dtype,
            ctypes.byref(tables), pointer(bits, start * columns * 4), pointer(scales, start * 16 * columns),
            pointer(codes, start * 128 * columns),
        )  # fmt: skip
        return int(irregular)

    if sum(over_ranges(run, rows, 16 * row_bytes, request.threads)):  # no table describes them: the formula does
        amax = magnitude_values(bits.astype(np.int64), request.dtype)
        scales.reshape(rows, 16, columns)[:] = scale_byte(rule.pre_scale(amax, one_scale(t)), rule.scale_byte)[:, None]
        emit_codes(x, tables, request, codes, scales)
    return float(magnitude_values(bits.max().astype(np.int64).reshape(1), request.dtype)[0])


def _four_six(
    x: npt.NDArray[Any],
    four_six: FourSixRule,
    method: FourSix,
    t: TensorScale,
    request: Request,
    scales: U8,
    tables: Tables | None = None,
    codes: U8 | None = None,
) -> float:
    """Scale bytes of 4over6: for blocks (with codes, where tables are given), tiles, or rows with their own scale.

    Returns the largest magnitude that the kernel met (0 for tiles, which the caller has checked).
    """
    library, isa = native()
    kind, squared = ERRORS.index(four_six_error(four_six, method, request)), int(method.error == "mse")
    numbers = four_six_numbers(t)
    rows, columns = scales.shape
    row_bytes, dtype = x.shape[1] * x.dtype.itemsize, DTYPE_CODES[request.dtype]
    per_row = request.scaling == "row"

    def blocks(start: int, stop: int) -> int:
        found = library.hb_four_six(
            isa, pointer(x, start * row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns), dtype, kind,
            squared, pointer(numbers, start * 16 if per_row else 0), int(per_row), pointer(scales, start * columns),
            None if tables is None else ctypes.byref(tables),
            None if codes is None else pointer(codes, start * columns * 8),
        )  # fmt: skip
        return int(found)

    def tiles(start: int, stop: int) -> None:
        library.hb_four_six_tiles(
            isa, pointer(x, start * 16 * row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns), dtype, kind,
            squared, pointer(numbers), pointer(scales, start * 16 * columns),
        )  # fmt: skip

    if request.tile[0] == 16:
        over_ranges(tiles, rows // 16, 16 * row_bytes, request.threads)
        return 0.0
    bits = max(over_ranges(blocks, rows, row_bytes, request.threads))
    return float(np.array(bits, np.uint32).view(np.float32))


def _exact_rows(
    x: npt.NDArray[Any], rule: NVFP4Rule, t: TensorScale, multiplier: F32, request: Request, codes: U8, scales: U8
) -> None:
    """The exact search of rows with their own global scale; each row's tables are made in the library."""
    library, isa = native()
    factors = np.ascontiguousarray(t.factor.reshape(-1), np.float32)
    multipliers = np.ascontiguousarray(multiplier.reshape(-1), np.float32)
    first, zero_byte = first_byte(rule), int(scale_byte(np.zeros(1, np.float32), rule.scale_byte)[0])
    columns, row_bytes = scales.shape[1], x.shape[1] * x.dtype.itemsize

    def run(start: int, stop: int) -> None:
        library.hb_search_rows(
            isa, pointer(x, start * row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
            DTYPE_CODES[request.dtype], pointer(factors, start * 4), pointer(multipliers, start * 4), first, zero_byte,
            pointer(scales, start * columns), pointer(codes, start * columns * 8),
        )  # fmt: skip

    over_ranges(run, scales.shape[0], row_bytes, request.threads)


def _exact(
    x: npt.NDArray[Any],
    rule: NVFP4Rule,
    t: TensorScale,
    multiplier: F32,
    request: Request,
    scales: U8,
    tables: Tables,
    codes: U8,
) -> bool:
    """Scale bytes and codes of least squared, weighted or Hessian error; zero blocks get the contract's own."""
    library, isa = native()
    search = build_search_tables(rule, one_scale(t), multiplier.reshape(()), tables, request.dtype)
    if search is None:
        return _choose_otherwise(x, rule, t, multiplier, request, codes, scales)
    rows, columns = scales.shape
    row_bytes, dtype = x.shape[1] * x.dtype.itemsize, DTYPE_CODES[request.dtype]
    method = request.method
    matrices = weights = bounds = None
    descends = int(isinstance(method, Hessian) and method.codes == "descent")
    if isinstance(method, Hessian):
        matrices, bounds = prepared(method)
    elif isinstance(method, Optimal) and method.channel_weights is not None:
        weights = scaled_weights(method.channel_weights, x.shape[1])

    def run(start: int, stop: int) -> None:
        inputs = pointer(x, start * row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns), dtype
        outputs = pointer(scales, start * columns), ctypes.byref(tables), pointer(codes, start * columns * 8)
        if matrices is not None and bounds is not None:
            library.hb_hessian(
                isa, *inputs, ctypes.byref(search), pointer(matrices), pointer(bounds), descends, *outputs
            )
        else:
            given = None if weights is None else pointer(weights)
            library.hb_search(isa, *inputs, ctypes.byref(search), given, *outputs)

    over_ranges(run, rows, row_bytes, request.threads)
    return True
