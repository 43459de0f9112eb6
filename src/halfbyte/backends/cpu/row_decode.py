"""Decoding rows that have a stored scale each: the library fills a table for each row, of the scales that occur."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.library import native, over_ranges, pointer
from halfbyte.backends.cpu.recipe import decode_recipe_of
from halfbyte.backends.protocol import Parts
from halfbyte.backends.reference.quantize import Reference
from halfbyte.codec.bits import DTYPES, F32
from halfbyte.request import Request


def decode_rows(
    parts: Parts[npt.NDArray[Any]],
    shape: tuple[int, int],
    request: Request,
    dtype: np.dtype[np.generic],
    out: npt.NDArray[Any] | None,
) -> npt.NDArray[Any]:
    """Decode rows with a stored scale each. The reference decodes those with values that are not finite."""
    name = next(name for name, known in DTYPES.items() if known == dtype)
    recipe, stored = decode_recipe_of(request, name), parts.stored_scale
    if recipe is None or stored is None:
        return Reference().dequantize(parts, shape, request, dtype)
    library, isa = native()
    scales: F32 = np.ascontiguousarray(stored.reshape(-1), np.float32)
    out = np.empty(shape, dtype) if out is None else out
    failed = np.empty(shape[0], np.uint8)
    columns, row_bytes = parts.scales.shape[1], shape[1] * out.dtype.itemsize

    def run(start: int, stop: int) -> None:
        library.hb_dequantize_rows(
            ctypes.byref(recipe), isa, pointer(parts.codes, start * parts.codes.shape[1]),
            pointer(parts.scales, start * columns), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
            pointer(scales, start * 4), pointer(out, start * row_bytes), pointer(failed, start),
        )  # fmt: skip

    over_ranges(run, shape[0], row_bytes, request.threads)
    left = failed != 0
    if left.any():
        some = Parts(parts.codes[left], parts.scales[left], scales[left])
        out[left] = Reference().dequantize(some, (int(left.sum()), shape[1]), request, dtype)
    return out
