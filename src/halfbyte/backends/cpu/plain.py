"""The plain method: tables give the scale bytes and codes; if each row has its own scale, arithmetic gives them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.call import Call, Listed, NVFP4Call
from halfbyte.backends.cpu.codes import emit_codes, row_codes, wrap_codes
from halfbyte.backends.cpu.library import native, over_ranges, pointer
from halfbyte.backends.cpu.ranges import in_range, own_amax_in_range
from halfbyte.backends.cpu.structs import Tables
from halfbyte.backends.cpu.tables_mx import magnitude_values
from halfbyte.backends.cpu.tables_nvfp4 import build_nvfp4_tables
from halfbyte.backends.numbering import DTYPE_NUMBERS
from halfbyte.codec.bits import F32
from halfbyte.contracts.arithmetic import scale_byte
from halfbyte.formats import E2M1


def tensor_amax(x: npt.NDArray[Any], dtype_name: str, by_row: bool = False, threads: int | None = None) -> F32:
    """Largest magnitude of a contiguous matrix, or of each row, as float32 of shape (1,) or (rows,). NaN wins."""
    library, isa = native()
    dtype, size, width = DTYPE_NUMBERS[dtype_name], x.dtype.itemsize, x.shape[-1]
    if by_row:
        bits = np.empty(x.shape[0], np.uint32)

        def rows(start: int, stop: int) -> None:
            library.hb_amax_rows(
                isa, pointer(x, start * width * size), ctypes.c_int64(stop - start), ctypes.c_int64(width), dtype,
                pointer(bits, start * 4),
            )  # fmt: skip

        over_ranges(rows, x.shape[0], width * size, threads)
    else:

        def part(start: int, stop: int) -> int:
            return int(library.hb_amax(isa, pointer(x, start * size), ctypes.c_int64(stop - start), dtype))

        bits = np.array([max(over_ranges(part, x.size, size, threads))], np.uint32)
    return magnitude_values(bits.astype(np.int64), dtype_name)


def run_tables(call: Call, tables: Tables) -> None:
    """Quantize every block by table, then blocks that no table describes by the reference. Also for MX formats."""
    call.patch_blocks(blocks_by_table(call, tables))


def blocks_by_table(call: Call, tables: Tables) -> Listed:
    """Quantize every block by table. Returns the indices of blocks that no table describes."""
    library, isa = native()
    irregular = np.empty(call.scales.size, np.int64)

    def run(start: int, stop: int) -> npt.NDArray[np.int64]:
        x, count = pointer(call.x, start * call.block_bytes), ctypes.c_int64(stop - start)
        outputs = (
            pointer(call.codes, start * call.code_bytes), pointer(call.scales, start), pointer(irregular, start * 8),
        )  # fmt: skip
        if call.request.format.element == E2M1:
            found = library.hb_plain(isa, x, count, call.block, call.dtype, ctypes.byref(tables), *outputs)
        else:
            found = library.hb_mxfp8(isa, x, count, call.dtype, ctypes.byref(tables), *outputs)
        return irregular[start : start + found] + start

    return np.concatenate(call.over_blocks(run))


def blocks(call: NVFP4Call) -> bool:
    """Plain NVFP4. Returns False if the tensor's numbers are not finite; then the reference must quantize."""
    tables = build_nvfp4_tables(call.rule, call.one_scale, call.request.dtype)
    if tables is not None:
        run_tables(call, tables)
    return tables is not None


def rows(call: NVFP4Call) -> bool:
    """One global scale per row."""
    if not own_amax_in_range(call):
        return False
    row_codes(call, fixed=False)
    return True


@np.errstate(all="ignore")
def tiles(call: NVFP4Call) -> bool:
    """Plain 16x16 tiles: the byte of a tile is repeated on its sixteen rows. The kernel finds the largest magnitude."""
    if call.largest is not None and not in_range(call.largest, call):
        return False
    tables = build_nvfp4_tables(call.rule, call.one_scale, call.request.dtype)
    if tables is None:
        return False
    library, isa = native()
    tile_rows, columns = call.x.shape[0] // 16, call.columns
    bits = np.empty((tile_rows, columns), np.uint32)

    def run(start: int, stop: int) -> int:
        irregular = library.hb_plain_tiles(
            isa, pointer(call.x, start * 16 * call.row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
            call.dtype, ctypes.byref(tables), pointer(bits, start * columns * 4),
            pointer(call.scales, start * 16 * columns), pointer(call.codes, start * 128 * columns),
        )  # fmt: skip
        return int(irregular)

    if sum(call.over_rows(run, 16)):  # some tiles are described by no table: use the formula
        amax = magnitude_values(bits.astype(np.int64), call.request.dtype)
        byte = scale_byte(call.rule.pre_scale(amax, call.one_scale), call.rule.scale_byte)
        call.scales.reshape(tile_rows, 16, columns)[:] = byte[:, None]
        emit_codes(call, tables)
    if call.rule.rounding.wraps:
        wrap_codes(call)
    return in_range(float(magnitude_values(bits.max().astype(np.int64).reshape(1), call.request.dtype)[0]), call)
