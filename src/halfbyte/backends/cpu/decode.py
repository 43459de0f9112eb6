"""Decoding: the contract fills a table with the value of every scale byte and code, and the kernel looks them up."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.library import native, over_ranges, pointer
from halfbyte.codec.bits import F32, U8
from halfbyte.codec.element import decode
from halfbyte.contracts import Contract, MXRule
from halfbyte.contracts.spec import DecodeRule
from halfbyte.formats import E2M1, E4M3, BlockFormat
from halfbyte.request import Request

ALL_BYTES = np.arange(256, dtype=np.uint8)


@np.errstate(all="ignore")
def decode_table(
    contract: Contract, format: BlockFormat, stored: F32 | None, top: np.float32, dtype: np.dtype[np.generic]
) -> npt.NDArray[np.generic]:
    """Values of every (scale byte, code) by the contract's formula, rounded to the output dtype; 256 rows."""
    rule = contract.rule(format)
    q = decode(np.arange(1 << format.element.bits, dtype=np.uint8), format.element)[None, :]
    if not rule.negative_zero:
        q = np.where(q == 0, np.float32(0), q).astype(np.float32)
    byte = ALL_BYTES[:, None]
    if isinstance(rule, MXRule | DecodeRule):
        values = rule.decode(np.broadcast_to(q, (256, q.size)), np.broadcast_to(byte, (256, q.size)))
    else:
        scale = np.ones((), np.float32) if stored is None else stored
        values = rule.decode(q, decode(byte, E4M3), scale, top)
    return np.ascontiguousarray(values).astype(dtype)


def for_kernel(table: npt.NDArray[Any], format: BlockFormat) -> npt.NDArray[Any]:
    """A table of values as the kernels take it: for E2M1 in two bytes, sixteen low bytes, then sixteen high bytes."""
    if format.element == E2M1 and table.dtype.itemsize == 2:
        return np.ascontiguousarray(table.view(np.uint8).reshape(256, 16, 2).swapaxes(1, 2))
    return table


def decode_blocks(
    codes: U8,
    scales: U8,
    table: npt.NDArray[Any],
    shape: tuple[int, int],
    request: Request,
    out: npt.NDArray[Any] | None,
) -> npt.NDArray[Any]:
    library, isa = native()
    block, width = request.format.block, table.dtype.itemsize
    code_bytes = block // request.format.codes_per_byte
    out = np.empty(shape, table.dtype) if out is None else out
    table = for_kernel(table, request.format)

    def run(start: int, stop: int) -> None:
        inputs = pointer(codes, start * code_bytes), pointer(scales, start), ctypes.c_int64(stop - start)
        at = pointer(out, start * block * width)
        if request.format.element == E2M1:
            library.hb_decode(isa, *inputs, block, pointer(table), width, at)
        else:
            library.hb_decode_mxfp8(isa, *inputs, pointer(table), width, at)

    over_ranges(run, scales.size, block * width, request.threads)
    return out
