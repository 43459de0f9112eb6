"""MXFP4 and MXFP8 on the compiled kernels: the contract's exponent by table, or the exact search among all of them."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.codes import emit_codes
from halfbyte.backends.cpu.general_search import mx_search, scaled_weights
from halfbyte.backends.cpu.library import DTYPE_CODES, Tables, as_array, native, over_ranges, pointer
from halfbyte.backends.cpu.peer_searches import patch_rows, scale_search_reason, search_as_peer
from halfbyte.backends.cpu.tables import IRREGULAR, build_mx_tables, mx_thresholds
from halfbyte.backends.protocol import Request
from halfbyte.backends.reference.quantize import Reference
from halfbyte.codec.bits import U8
from halfbyte.contracts import MXRule, exponents
from halfbyte.contracts.spec import Rounding
from halfbyte.formats import E2M1, E8M0
from halfbyte.formats.spec import ElementFormat
from halfbyte.methods import Amax, Hessian, Optimal

REFERENCE = Reference()

ELEMENTS = {
    "even": MXRule(
        scale=exponents.ocp_floor, element=exponents.over, rounding=Rounding(), decode=exponents.decode_e8m0
    ),
    "down": MXRule(
        scale=exponents.ocp_floor, element=exponents.over, rounding=Rounding(tie="down"), decode=exponents.decode_e8m0
    ),
}
"""The ways to an E2M1 magnitude that the search kernel has, in the order of native/kernels.h: x over a power of two, to
the nearest code, saturating. E4M3 comes after them."""


def mx_reason(request: Request, rule: MXRule) -> str | None:
    """Why the compiled kernels cannot serve an MX request; None if they can."""
    if isinstance(request.method, Amax):
        return None
    if rule.scale_search is not None and isinstance(request.method, Optimal | Hessian):
        return scale_search_reason(rule.scale_search, request.method)
    if element_number(rule, request.format.element, request.dtype) is None:
        return f"the exact search of {request.format.name} is compiled for contracts that round to the nearest code"
    return None


@functools.lru_cache(maxsize=64)
def element_number(rule: MXRule, element: ElementFormat, dtype: str) -> int | None:
    """Which of the kernel's ways is the contract's, for every scale and every x; None if none is."""
    if rule.rounding.wraps:
        return None
    if element != E2M1:
        return len(ELEMENTS) if rule.rounding.tie == "even" else None
    # gguf's distances overflow under the largest scales, which the kernel never chooses (native/mx_search.inc).
    bytes_ = slice(252 if rule.nearest is not None else 255)
    wanted = _magnitude_thresholds(rule, dtype)[bytes_]
    same = [np.array_equal(_magnitude_thresholds(known, dtype)[bytes_], wanted) for known in ELEMENTS.values()]
    return same.index(True) if True in same else None


def _magnitude_thresholds(rule: MXRule, dtype: str) -> npt.NDArray[np.int32]:
    return as_array(search_tables(rule, E2M1, dtype).threshold, np.int32).reshape(256, 8)[:255, :7]


@functools.lru_cache(maxsize=64)
@np.errstate(all="ignore")
def search_tables(rule: MXRule, element: ElementFormat, dtype: str) -> Tables:
    """Where codes begin under every E8M0 scale, whether or not the contract's own exponent rule leads to it."""
    statistics = dtype if rule.statistics == "input" else "fp32"
    scale = np.where(np.isfinite(E8M0.values), E8M0.values, 1).astype(np.float32)
    tables = Tables()
    as_array(tables.scale, np.float32)[:] = scale
    if element == E2M1:
        mx_thresholds(tables, rule, element, scale, statistics, dtype)
    return tables


def quantize_mx(x: npt.NDArray[Any], rule: MXRule, request: Request, codes: U8, scales: U8) -> None:
    """Fill codes and scales of a contiguous matrix of whole blocks."""
    element, dtype = request.format.element, request.dtype
    if rule.scale_search is not None and isinstance(request.method, Optimal | Hessian):
        naive, tables = build_mx_tables(rule, element, dtype), search_tables(rule, element, dtype)
        search_as_peer(x, rule.scale_search, naive, tables, request, codes, scales)
    elif isinstance(request.method, Hessian):
        _through_hessians(x, rule, request, codes, scales)
    elif isinstance(request.method, Optimal):
        _search(x, rule, request, codes, scales)
    else:
        run_tables(x, build_mx_tables(rule, element, dtype), request, codes, scales)


def run_tables(x: npt.NDArray[Any], tables: Tables, request: Request, codes: U8, scales: U8) -> None:
    """Every block by table; then the blocks that no table describes by the reference. NVFP4 comes here too."""
    library, isa = native()
    block, dtype = request.format.block, DTYPE_CODES[request.dtype]
    size, code_bytes = block * x.dtype.itemsize, block // request.format.codes_per_byte
    irregular = np.empty(scales.size, np.int64)

    def run(start: int, stop: int) -> npt.NDArray[np.int64]:
        count = ctypes.c_int64(stop - start)
        outputs = pointer(codes, start * code_bytes), pointer(scales, start), pointer(irregular, start * 8)
        if request.format.element == E2M1:
            found = library.hb_plain(isa, pointer(x, start * size), count, block, dtype, ctypes.byref(tables), *outputs)
        else:
            found = library.hb_mxfp8(isa, pointer(x, start * size), count, dtype, ctypes.byref(tables), *outputs)
        return irregular[start : start + found] + start

    listed = np.concatenate(over_ranges(run, scales.size, size, request.threads))
    _patch_blocks(x, listed, request, codes, scales)


def _patch_blocks(x: npt.NDArray[Any], listed: npt.NDArray[np.int64], request: Request, codes: U8, scales: U8) -> None:
    """The listed blocks by the reference."""
    if listed.size == 0:
        return
    block = request.format.block
    patch = dataclasses.replace(request, tile=(1, block), out=None)
    parts = REFERENCE.quantize(x.reshape(-1, block)[listed], patch)
    codes.reshape(-1, parts.codes.shape[1])[listed] = parts.codes
    scales.reshape(-1)[listed] = parts.scales[:, 0]


def _search(x: npt.NDArray[Any], rule: MXRule, request: Request, codes: U8, scales: U8) -> None:
    """The exact search; blocks at the ends of the range by the reference."""
    library, isa = native()
    block, element, dtype = request.format.block, request.format.element, request.dtype
    tables, number = search_tables(rule, element, dtype), element_number(rule, element, dtype)
    statistics = dtype if rule.statistics == "input" else "fp32"
    with np.errstate(all="ignore"):
        zero, _ = rule.scale(np.zeros(1, np.float32), statistics, element)
    # An all-zero block keeps the contract's own byte and codes; a byte of NaN has no entry in the tables.
    zero_byte = -1 if zero[0] == IRREGULAR else int(zero[0])
    weights = None
    if isinstance(request.method, Optimal) and request.method.channel_weights is not None:
        weights = scaled_weights(request.method.channel_weights, x.shape[1])
    rows, columns = scales.shape
    row_bytes, code_bytes = x.shape[1] * x.dtype.itemsize, codes.shape[1]
    irregular = np.empty(scales.size, np.int64)

    def run(start: int, stop: int) -> npt.NDArray[np.int64]:
        at = start * columns
        found = library.hb_mx_search(
            isa, pointer(x, start * row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns), block,
            DTYPE_CODES[dtype], number, None if weights is None else pointer(weights), zero_byte, pointer(scales, at),
            ctypes.byref(tables), pointer(codes, start * code_bytes), pointer(irregular, at * 8),
        )  # fmt: skip
        return np.asarray(irregular[at : at + int(found)] + at)

    listed = np.concatenate(over_ranges(run, rows, row_bytes, request.threads))
    if weights is None:
        _patch_blocks(x, listed, request, codes, scales)
    else:
        patch_rows(x, listed, request, codes, scales)


def _through_hessians(x: npt.NDArray[Any], rule: MXRule, request: Request, codes: U8, scales: U8) -> None:
    """The search through Hessians, and the descent of the codes; blocks at the ends of the range by the reference."""
    library, isa = native()
    element, dtype = request.format.element, request.dtype
    tables, number = search_tables(rule, element, dtype), element_number(rule, element, dtype)
    if number is None:
        raise TypeError(f"{request.contract} has no compiled search")
    name = "first nearest" if rule.nearest is not None else [*ELEMENTS, "e4m3"][number]
    search = mx_search(rule, name, request, x.shape[1])
    listed = search.bytes_of(x, request, scales)
    if element == E2M1:
        emit_codes(x, tables, request, codes, scales)
    else:
        block = request.format.block
        size = block * x.dtype.itemsize

        def emit(start: int, stop: int) -> None:
            library.hb_mxfp8_emit(
                isa, pointer(x, start * size), ctypes.c_int64(stop - start), block, DTYPE_CODES[dtype],
                ctypes.byref(tables), pointer(codes, start * block), pointer(scales, start),
            )  # fmt: skip

        over_ranges(emit, scales.size, size, request.threads)
    search.descend(x, request, codes, scales)
    patch_rows(x, listed, request, codes, scales)
