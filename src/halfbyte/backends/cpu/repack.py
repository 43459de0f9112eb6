"""A kernel that only moves bytes: the verbatim cast of MXFP4 blocks to NVFP4 ones."""

from __future__ import annotations

import ctypes

import numpy as np

from halfbyte.backends.cpu.library import load_library, native, over_ranges, pointer
from halfbyte.codec.bits import U8


def has_kernels() -> bool:
    """Whether the package was installed with its kernels."""
    return load_library() is not None


def cast_blocks(
    codes: U8, scales: U8, table: U8, out: tuple[U8, U8] | None = None, threads: int | None = None
) -> tuple[U8, U8, int]:
    """MXFP4 codes (blocks, 16) and scales (blocks,) to NVFP4 codes and scales (blocks, 2).

    Also returns the number of zero blocks. table: the E4M3 byte for each E8M0 byte. out: arrays of the result's shapes
    to write into.
    """
    library, isa = native()
    codes, scales, table = (np.ascontiguousarray(part) for part in (codes, scales, table))
    if codes.shape != (scales.size, 16) or table.shape != (256,):
        raise TypeError(f"codes {codes.shape} and table {table.shape} do not fit {scales.size} blocks of 32")
    new_codes = _output(None if out is None else out[0], codes.shape)
    new_scales = _output(None if out is None else out[1], (scales.size, 2))

    def run(start: int, stop: int) -> int:
        return int(
            library.hb_cast(
                isa, pointer(codes, 16 * start), pointer(scales, start), ctypes.c_int64(stop - start), pointer(table),
                pointer(new_codes, 16 * start), pointer(new_scales, 2 * start),
            )
        )  # fmt: skip

    return new_codes, new_scales, sum(over_ranges(run, scales.size, 34, threads))


def _output(out: U8 | None, shape: tuple[int, ...]) -> U8:
    if out is None:
        return np.empty(shape, np.uint8)
    if out.shape != shape or out.dtype != np.uint8:
        raise TypeError(f"out is {out.dtype} of shape {out.shape}, but the result is uint8 of {shape}")
    return out
