"""MXFP4 and MXFP8: the contract's exponent by table, or an exact search among all exponents."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.call import MXCall
from halfbyte.backends.cpu.codes import emit_codes
from halfbyte.backends.cpu.general_search import mx_search
from halfbyte.backends.cpu.library import native, pointer
from halfbyte.backends.cpu.peer_searches import search_as_qwantize
from halfbyte.backends.cpu.plain import run_tables
from halfbyte.backends.cpu.tables_mx import ELEMENTS, build_mx_tables, element_number, search_tables, zero_block_byte
from halfbyte.backends.derived import scaled_weights
from halfbyte.contracts.searches.qwantize import search_e8m0
from halfbyte.formats import E2M1
from halfbyte.methods import Optimal


def blocks(call: MXCall) -> None:
    """The contract's own exponents."""
    run_tables(call, build_mx_tables(call.rule, call.request.format.element, call.request.dtype))


def by_qwantize(call: MXCall) -> None:
    """qwantize's search of E8M0 scales."""
    element, dtype = call.request.format.element, call.request.dtype
    naive, tables = build_mx_tables(call.rule, element, dtype), search_tables(call.rule, element, dtype)
    search_as_qwantize(call, search_e8m0, naive, tables)


def exact(call: MXCall) -> None:
    """Search for the least squared or weighted error. The reference quantizes blocks at the ends of the range."""
    library, isa = native()
    element, dtype, method = call.request.format.element, call.request.dtype, call.request.method
    tables, number = search_tables(call.rule, element, dtype), element_number(call.rule, element, dtype)
    zero_byte = zero_block_byte(call.rule, element, dtype)  # −1: the reference serves zero blocks
    weights = scaled_weights(method, call.x.shape[1]) if isinstance(method, Optimal) else None
    columns, code_bytes = call.columns, call.codes.shape[1]
    irregular = np.empty(call.scales.size, np.int64)

    def run(start: int, stop: int) -> npt.NDArray[np.int64]:
        at = start * columns
        found = library.hb_mx_search(
            isa, pointer(call.x, start * call.row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
            call.block, call.dtype, number, None if weights is None else pointer(weights), zero_byte,
            pointer(call.scales, at), ctypes.byref(tables), pointer(call.codes, start * code_bytes),
            pointer(irregular, at * 8),
        )  # fmt: skip
        return np.asarray(irregular[at : at + int(found)] + at)

    listed = np.concatenate(call.over_rows(run))
    if weights is None:
        call.patch_blocks(listed)
    else:
        call.patch_rows(listed)


def through_hessians(call: MXCall) -> None:
    """Search for the least rᵀHr, then descend on the codes. The reference quantizes blocks at the ends of the range."""
    library, isa = native()
    element, dtype = call.request.format.element, call.request.dtype
    tables, number = search_tables(call.rule, element, dtype), element_number(call.rule, element, dtype)
    if number is None:
        raise TypeError(f"{call.request.contract} has no compiled search")
    name = "first nearest" if call.rule.nearest is not None else [*ELEMENTS, "e4m3"][number]
    search = mx_search(call, name)
    listed = search.fill_bytes(call)
    if element == E2M1:
        emit_codes(call, tables)
    else:

        def emit(start: int, stop: int) -> None:
            library.hb_mxfp8_emit(
                isa, pointer(call.x, start * call.block_bytes), ctypes.c_int64(stop - start), call.block, call.dtype,
                ctypes.byref(tables), pointer(call.codes, start * call.block), pointer(call.scales, start),
            )  # fmt: skip

        call.over_blocks(emit)
    search.descend(call)
    call.patch_rows(listed)
