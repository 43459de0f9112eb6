"""Values of a source matrix: FP8, INT4 and FP4 rows decoded with the source's own scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.arrays import Array, is_torch
from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.io.views import SourceMatrix, read_rows
from halfbyte.codec.bits import F32, U8
from halfbyte.codec.element import decode
from halfbyte.contracts import get_contract
from halfbyte.errors import CheckpointError
from halfbyte.formats import E4M3, get_format
from halfbyte.layouts.fp8 import block_length
from halfbyte.quantize import dequantize
from halfbyte.types import QuantizedTensor


@dataclass(frozen=True, slots=True)
class Scales:
    """The small tensors of a source, read once: FP8 scales as a float32 grid, the tensor scale of NVFP4."""

    grid: F32 | None = None
    stored: np.float32 | None = None


def read_scales(files: Files, source: SourceMatrix) -> Scales:
    """FP8 scales widened to float32 (E8M0 as powers of two), or the tensor scale as it is stored."""
    arena = Arena(256)
    if source.kind == "nvfp4" and source.global_scale is not None:
        view = source.global_scale
        return Scales(stored=np.float32(read_rows(files, view, 0, 1, arena).astype(np.float32)[0, 0]))
    if source.kind != "fp8" or source.scale is None:
        return Scales()
    view = source.scale
    raw = read_rows(files, view, 0, view.rows, Arena(view.bytes + 4096))
    if view.dtype in ("F8_E8M0", "U8"):
        return Scales(grid=np.ldexp(np.float32(1), raw.astype(np.int32) - 127).astype(np.float32))
    return Scales(grid=raw.astype(np.float32))


@dataclass(frozen=True, slots=True)
class RowScales:
    """The scales of some rows as a device takes them: float32 for FP8 and INT4, bytes for FP4."""

    array: npt.NDArray[Any]
    tall: int = 1
    """Rows that share a scale."""
    wide: int = 1
    """Columns that share a scale."""
    first: int = 0
    """Position of the first row among those that share its scale."""
    stored: np.float32 | None = None
    """NVFP4: the tensor scale as it is stored."""


def read_row_scales(
    files: Files, source: SourceMatrix, start: int, stop: int, scales: Scales, arena: Arena
) -> RowScales:
    """The scales of rows start to stop of an encoded source, in the arena."""
    if source.kind == "fp8":
        grid = _grid(source, scales)
        tall, wide = block_length(source.rows, grid.shape[0]), block_length(source.columns, grid.shape[1])
        rows = grid[start // tall : (stop - 1) // tall + 1]
        return RowScales(_copy(rows, arena), tall, wide, start % tall)
    if source.kind == "int4":
        found = read_block_scales(files, source, start, stop, arena)
        return RowScales(_copy(found.astype(np.float32), arena), 1, source.columns // found.shape[1])
    return RowScales(read_block_scales(files, source, start, stop, arena), stored=scales.stored)


def _copy(array: F32, arena: Arena) -> F32:
    out: F32 = arena.take(array.nbytes).view(np.float32).reshape(array.shape)
    np.copyto(out, array)
    return out


def decode_rows(
    source: SourceMatrix, raw: npt.NDArray[Any], start: int, scales: Scales, arena: Arena, files: Files
) -> npt.NDArray[Any]:
    """Values of rows that were read: floats as they are, all else decoded to float32."""
    match source.kind:
        case "float":
            return raw
        case "fp8":
            return _decode_fp8(source, raw, start, scales, arena)
        case "int4":
            return _decode_int4(source, raw, start, arena, files)
        case _:
            return decode_fp4(source, raw, read_block_scales(files, source, start, start + len(raw), arena), scales)


def _decode_fp8(source: SourceMatrix, raw: U8, start: int, scales: Scales, arena: Arena) -> F32:
    """E4M3 values times the scale of their block, one rounding. Blocks at the edges may be partial."""
    out: F32 = arena.take(raw.size * 4).view(np.float32).reshape(raw.shape)
    for first, last, across in _slabs(source, start, start + len(raw), scales):
        codes, part = raw[first - start : last - start], out[first - start : last - start]
        if raw.shape[1] % 2 == 0:
            np.take(E4M3_PAIRS, codes.view(np.uint16), out=part.view(np.uint64), mode="clip")
        else:
            np.take(E4M3_VALUES, codes, out=part, mode="clip")
        with np.errstate(over="ignore", invalid="ignore"):  # Inf and NaN are found by the amax
            np.multiply(part, across, out=part)
    return out


def fp8_amax(source: SourceMatrix, raw: U8, start: int, scales: Scales) -> np.float32:
    """Largest magnitude of rows that `_decode_fp8` would give, without decoding them. NaN if there is one.

    The order of E4M3 magnitudes is that of their bytes, and rounding keeps the order of products with one scale: the
    largest byte of each column (or row) that shares a scale, times that scale, is enough.
    """
    largest = np.float32(0)
    for first, last, across in _slabs(source, start, start + len(raw), scales):
        bytes_ = raw[first - start : last - start] & np.uint8(0x7F)
        if len(across) == 1:
            tops = bytes_.max(axis=0)
        elif across.shape[1] == 1:
            tops = bytes_.max(axis=1, keepdims=True)
        else:
            tops = bytes_
        with np.errstate(over="ignore", invalid="ignore"):
            largest = np.maximum(largest, np.abs(E4M3_VALUES[tops] * across).max())
    return np.float32(largest)


SLAB = 1 << 17
"""Elements of FP8 and INT4 that are decoded in one step, unless a row has more."""
TEMPORARY = 15
"""Bytes per element of such a step, at most: the scale, indices of the look-up, products."""


def slab_rows(columns: int) -> int:
    """Rows that are decoded in one step, so that temporary arrays stay small."""
    return max(1, min(64, SLAB // max(1, columns)))


def decoding_memory(source: SourceMatrix, rows: int) -> int:
    """Bytes that `decode_rows` takes for that many rows: their values, and what it needs to find them."""
    if source.kind == "float":
        return 0
    steps = min(rows, slab_rows(source.columns)) * source.columns if source.kind in ("fp8", "int4") else 0
    return rows * source.columns * 4 + steps * TEMPORARY


def _slabs(source: SourceMatrix, start: int, stop: int, scales: Scales) -> Iterator[tuple[int, int, F32]]:
    """Ranges of rows with their scales: (1 or rows, 1 or columns), one row of scales where all share it."""
    grid = _grid(source, scales)
    tall = block_length(source.rows, grid.shape[0])
    wide = block_length(source.columns, grid.shape[1])
    row = start
    while row < stop:
        end_of_block = stop if tall == 1 else (row // tall + 1) * tall
        last = min(stop, row + slab_rows(source.columns), end_of_block)
        first_scale = row // tall
        found = grid[first_scale : first_scale + (last - row if tall == 1 else 1)]
        yield row, last, np.repeat(found, wide, axis=1)[:, : source.columns] if 1 < wide < source.columns else found
        row = last


def _grid(source: SourceMatrix, scales: Scales) -> F32:
    if scales.grid is None:
        raise CheckpointError(f"{source.weight.tensor}: no scales were read")
    return scales.grid


def _decode_int4(source: SourceMatrix, raw: U8, start: int, arena: Arena, files: Files) -> F32:
    """(code − 8) times the scale of its group; the low nibble comes first."""
    if source.scale is None:
        raise CheckpointError(f"{source.weight.tensor} has no scales")
    rows, groups = len(raw), source.scale.columns
    out: F32 = arena.take(rows * source.columns * 4).view(np.float32).reshape(rows, source.columns)
    scales = read_rows(files, source.scale, start, start + rows, arena)
    step = slab_rows(source.columns)
    for first in range(0, rows, step):
        part = out[first : first + step]
        np.take(INT4_PAIRS, raw[first : first + step], out=part.view(np.uint64), mode="clip")
        grouped = part.reshape(len(part), groups, -1)
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(grouped, scales[first : first + step].astype(np.float32)[:, :, None], out=grouped)
    return out


def read_block_scales(files: Files, source: SourceMatrix, start: int, stop: int, arena: Arena) -> U8:
    """The scale bytes of rows start to stop of an FP4 source."""
    if source.scale is None:
        raise CheckpointError(f"{source.weight.tensor} has no scales")
    return read_rows(files, source.scale, start, stop, arena)


def decode_fp4(source: SourceMatrix, codes: U8, scales: U8, stored: Scales, dtype: str = "float32") -> npt.NDArray[Any]:
    """Values of FP4 rows, in float32 or rounded once from it."""
    return np.asarray(dequantize(as_quantized(source, codes, scales, stored.stored), dtype, threads=1))


def as_quantized(source: SourceMatrix, codes: Array, scales: Array, stored: np.float32 | None) -> QuantizedTensor:
    """Rows of an FP4 source as a tensor that `dequantize` takes; arrays of numpy, or torch tensors on any device."""
    shape = (codes.shape[0], source.columns)
    if source.kind == "mxfp4":
        format = get_format("mxfp4")
        return QuantizedTensor(format, shape, codes, scales, None, None, get_contract("ocp", format))
    format = get_format("nvfp4")
    contract = get_contract("compressed_tensors" if source.divides else "modelopt", format)
    word = np.asarray(stored, np.float32)
    multiplier = np.asarray(np.float32(1) / word if source.divides else word, np.float32)
    return QuantizedTensor(format, shape, codes, scales, _scalar(multiplier, codes), _scalar(word, codes), contract)


def _scalar(value: F32, codes: Array) -> Array:
    """A number as the same kind of array as the codes. Filling a tensor does not wait for its device."""
    if not is_torch(codes):
        return value
    import torch

    return torch.full((), float(value), dtype=torch.float32, device=codes.device)


INT4_PAIRS = (np.stack(np.divmod(np.arange(256), 16)[::-1], axis=-1) - 8).astype(np.float32).view(np.uint64)[:, 0]
"""The two values of every byte of offset-binary INT4, the low nibble's in the low half."""

E4M3_VALUES: F32 = decode(np.arange(256, dtype=np.uint8), E4M3)
"""The value of every E4M3 byte."""

E4M3_PAIRS = np.stack(np.meshgrid(E4M3_VALUES, E4M3_VALUES), axis=-1).reshape(-1, 2).view(np.uint64).reshape(-1)
"""The two values of every pair of E4M3 bytes, the first in the low half: half as many look-ups."""
