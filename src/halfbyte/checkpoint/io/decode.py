"""A weight matrix inside a checkpoint: where its elements lie, and how a range of its rows is read and decoded.

Everything here is frozen and holds numbers only, so that a plan can be written down. Reading is plain (no mapped pages:
they would count as memory) and goes into buffers that the caller reuses.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.codec.bits import BFLOAT16, F32, U8
from halfbyte.codec.element import decode
from halfbyte.contracts import get_contract
from halfbyte.errors import CheckpointError
from halfbyte.formats import E4M3, get_format
from halfbyte.quantize import dequantize
from halfbyte.types import QuantizedTensor

Kind = Literal["float", "fp8", "int4", "mxfp4", "nvfp4"]

NUMPY: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
}
"""How the bytes of a dtype are held; float8 and packed codes as bytes."""


@dataclass(frozen=True, slots=True)
class View:
    """A (rows, columns) matrix of elements inside a file, by strides: a tensor, or a part or transpose of one."""

    tensor: str
    """Name of the tensor, for messages."""
    file: str
    dtype: str
    offset: int
    """Byte of element (0, 0) in the file."""
    rows: int
    columns: int
    row_stride: int
    """Elements from one row to the next; `column_stride` likewise."""
    column_stride: int = 1

    @property
    def bytes(self) -> int:
        return self.rows * self.columns * NUMPY[self.dtype].itemsize

    @property
    def contiguous(self) -> bool:
        return self.column_stride == 1 and self.row_stride == self.columns


@dataclass(frozen=True, slots=True)
class Source:
    """A weight matrix as the checkpoint holds it."""

    kind: Kind
    rows: int
    columns: int
    """Logical size: elements, not bytes."""
    weight: View
    scale: View | None = None
    """FP8: any grid; INT4: one a group; MXFP4: E8M0 bytes (rows, columns/32); NVFP4: E4M3 bytes (rows, columns/16)."""
    global_scale: View | None = None
    """NVFP4: the tensor scale."""
    divides: bool = False
    """NVFP4: whether the tensor scale divides (compressed-tensors) or multiplies."""
    input_scale: View | None = None
    """NVFP4: the tensor scale of the activations, in the same direction."""

    @property
    def row_bytes(self) -> int:
        """Bytes that one row takes in the file."""
        return self.weight.columns * NUMPY[self.weight.dtype].itemsize


class Files:
    """The source files of a run, opened once, read from any thread."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = paths
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, file: str, offset: int, into: U8) -> None:
        """Fill a contiguous byte array from a position. A file that ends early has changed since the plan."""
        done, total = 0, into.nbytes
        view = into.data
        try:
            descriptor = self._open(file)
            while done < total:
                got = os.preadv(descriptor, [view[done:]], offset + done)
                if got == 0:
                    raise CheckpointError(f"{file} ended at byte {offset + done}: it was cut since the plan was made")
                done += got
        except OSError as error:
            raise CheckpointError(f"{self._paths[file]} cannot be read at byte {offset + done}: {error}") from error

    def _open(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(self._paths[file], os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[file]

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def read_rows(files: Files, view: View, start: int, stop: int, arena: Arena) -> npt.NDArray[Any]:
    """Rows start to stop as a contiguous (rows, columns) array of the dtype's numpy form."""
    dtype = NUMPY[view.dtype]
    size, rows = dtype.itemsize, stop - start
    first = view.offset + start * view.row_stride * size
    if view.contiguous:
        raw = arena.take(rows * view.columns * size)
        files.read(view.file, first, raw)
        return raw.view(dtype).reshape(rows, view.columns)
    out = arena.take(rows * view.columns * size).view(dtype).reshape(rows, view.columns)
    mark = arena.mark()
    if view.column_stride == 1:  # every other row: read the span, keep what belongs
        span = (rows - 1) * view.row_stride + view.columns
        raw = arena.take(span * size)
        files.read(view.file, first, raw)
        strided = np.lib.stride_tricks.as_strided(
            raw.view(dtype), out.shape, (view.row_stride * size, size), writeable=False
        )
        np.copyto(out, strided)
    else:  # transposed: a column of ours is a stretch of each row in the file
        span = (rows - 1) * view.row_stride + 1
        block = max(1, min(view.columns, (4 << 20) // (span * size)))
        raw = arena.take(block * span * size).reshape(block, span * size)
        for column in range(0, view.columns, block):
            count = min(block, view.columns - column)
            for i in range(count):
                files.read(view.file, first + (column + i) * view.column_stride * size, raw[i])
            stretch = raw[:count].view(dtype)[:, :: view.row_stride]
            np.copyto(out[:, column : column + count], stretch.T)
    arena.release(mark)
    return out


def scratch_bytes(source: Source, rows: int) -> int:
    """Bytes beyond the rows themselves that `read_rows` and `decode_rows` take from an arena for that many rows."""
    view = source.weight
    size = NUMPY[view.dtype].itemsize
    scratch = 0
    if view.column_stride != 1:
        scratch += max(4 << 20, ((rows - 1) * view.row_stride + 1) * size)
    elif view.row_stride != view.columns:
        scratch += ((rows - 1) * view.row_stride + view.columns) * size
    if source.kind == "fp8":
        scratch += rows * source.columns * 4
    elif source.kind != "float":
        scratch += rows * source.columns * 5
    return scratch + 4096


@dataclass(frozen=True, slots=True)
class Scales:
    """The small tensors of a source, read once: FP8 scales as a float32 grid, the tensor scale of NVFP4."""

    grid: F32 | None = None
    stored: np.float32 | None = None


def read_scales(files: Files, source: Source) -> Scales:
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


def decode_rows(
    source: Source, raw: npt.NDArray[Any], start: int, scales: Scales, arena: Arena, files: Files
) -> npt.NDArray[Any]:
    """Values of rows that were read: as they are, or float32 after the source's own scales."""
    match source.kind:
        case "float":
            return raw
        case "fp8":
            return _decode_fp8(source, raw, start, scales, arena)
        case "int4":
            return _decode_int4(source, raw, start, arena, files)
        case _:
            return decode_fp4(source, raw, read_block_scales(files, source, start, start + len(raw), arena), scales)


def _decode_fp8(source: Source, raw: U8, start: int, scales: Scales, arena: Arena) -> F32:
    """E4M3 values times the scale of their block, one rounding. Blocks at the edges may be partial."""
    out: F32 = arena.take(raw.size * 4).view(np.float32).reshape(raw.shape)
    for first, last, across in _slabs(source, start, start + len(raw), scales):
        codes, part = raw[first - start : last - start], out[first - start : last - start]
        if raw.shape[1] % 2 == 0:
            np.take(E4M3_PAIRS, codes.view(np.uint16), out=part.view(np.uint64), mode="clip")
        else:
            np.take(E4M3_VALUES, codes, out=part, mode="clip")
        np.multiply(part, across, out=part)
    return out


def fp8_amax(source: Source, raw: U8, start: int, scales: Scales) -> np.float32:
    """Largest magnitude of rows that `_decode_fp8` would give, without decoding them. NaN if there is one.

    The order of E4M3 magnitudes is that of their bytes, and rounding keeps the order of products with one scale: the
    largest byte of each column (or row) that shares a scale, times that scale, is enough.
    """
    largest = np.float32(0)
    for first, last, across in _slabs(source, start, start + len(raw), scales):
        bytes_ = raw[first - start : last - start] & np.uint8(0x7F)
        if len(across) == 1:
            tops = bytes_.max(axis=0, keepdims=True)
        elif across.shape[1] == 1:
            tops = bytes_.max(axis=1, keepdims=True)
        else:
            tops = bytes_
        largest = np.maximum(largest, np.abs(E4M3_VALUES[tops] * across).max())
    return np.float32(largest)


SLAB = 64
"""Rows that are decoded at a time: what numpy makes on the way stays in the cache."""


def _slabs(source: Source, start: int, stop: int, scales: Scales) -> Iterator[tuple[int, int, F32]]:
    """Ranges of rows with their scales: (1 or rows, 1 or columns), one row of scales where all share it."""
    if scales.grid is None:
        raise CheckpointError(f"{source.weight.tensor}: no scales were read")
    grid = scales.grid
    tall = block_length(source.rows, grid.shape[0])
    wide = block_length(source.columns, grid.shape[1])
    across = np.repeat(grid, wide, axis=1)[:, : source.columns] if 1 < wide < source.columns else grid
    row = start
    while row < stop:
        end_of_block = stop if tall == 1 else (row // tall + 1) * tall
        last = min(stop, row + SLAB, end_of_block)
        first_scale = row // tall
        yield row, last, across[first_scale : first_scale + (last - row if tall == 1 else 1)]
        row = last


def _decode_int4(source: Source, raw: U8, start: int, arena: Arena, files: Files) -> F32:
    """(code − 8) times the scale of its group; the low nibble comes first."""
    if source.scale is None:
        raise CheckpointError(f"{source.weight.tensor} has no scales")
    rows, groups = len(raw), source.scale.columns
    out: F32 = arena.take(rows * source.columns * 4).view(np.float32).reshape(rows, source.columns)
    np.take(INT4_VALUES, raw & np.uint8(15), out=out[:, 0::2], mode="clip")
    np.take(INT4_VALUES, raw >> np.uint8(4), out=out[:, 1::2], mode="clip")
    scales = read_rows(files, source.scale, start, start + rows, arena).astype(np.float32)
    grouped = out.reshape(rows, groups, -1)
    np.multiply(grouped, scales[:, :, None], out=grouped)
    return out


def fp8_grid(shape: tuple[int, ...]) -> tuple[int, int]:
    """How many scales of FP8 lie along the two axes of their weight. Model-Optimizer writes [rows, 1, columns, 1]."""
    if len(shape) == 4 and shape[1] == shape[3] == 1:
        return shape[0], shape[2]
    axes = [axis for axis in shape if axis != 1]
    if len(axes) > 2:
        raise CheckpointError(f"scales of shape {list(shape)} are not known for FP8")
    if len(axes) == 2:
        return axes[0], axes[1]
    flat = axes[0] if axes else 1
    return (1, flat) if len(shape) == 2 and shape[0] == 1 else (flat, 1)


def block_length(size: int, scales: int) -> int:
    """Elements along an axis that share a scale: all, one, or 128 (the last block may be partial)."""
    if scales == 1:
        return size
    if scales == size:
        return 1
    for length in (128, 64, 32, 16, 256):
        if -(-size // length) == scales:
            return length
    raise CheckpointError(
        f"{scales} scales do not fit an axis of {size} elements: neither one, nor one a row, nor 128s"
    )


def read_block_scales(files: Files, source: Source, start: int, stop: int, arena: Arena) -> U8:
    """The scale bytes of rows start to stop of an FP4 source."""
    if source.scale is None:
        raise CheckpointError(f"{source.weight.tensor} has no scales")
    return read_rows(files, source.scale, start, stop, arena)


def decode_fp4(source: Source, codes: U8, scales: U8, stored: Scales, dtype: str = "float32") -> npt.NDArray[Any]:
    """Values of FP4 rows, in float32 or rounded once from it."""
    shape = (codes.shape[0], source.columns)
    if source.kind == "mxfp4":
        format = get_format("mxfp4")
        q = QuantizedTensor(format, shape, codes, scales, None, None, get_contract("ocp", format))
    else:
        format = get_format("nvfp4")
        contract = get_contract("compressed_tensors" if source.divides else "modelopt", format)
        word = np.asarray(stored.stored, np.float32)
        multiplier = np.asarray(np.float32(1) / word if source.divides else word, np.float32)
        q = QuantizedTensor(format, shape, codes, scales, multiplier, word, contract)
    return np.asarray(dequantize(q, dtype, threads=1))


INT4_VALUES: F32 = np.arange(16, dtype=np.float32) - np.float32(8)
"""The value of every code of offset-binary INT4."""

E4M3_VALUES: F32 = decode(np.arange(256, dtype=np.uint8), E4M3)
"""The value of every E4M3 byte."""

E4M3_PAIRS = np.stack(np.meshgrid(E4M3_VALUES, E4M3_VALUES), axis=-1).reshape(-1, 2).view(np.uint64).reshape(-1)
"""The two values of every pair of bytes, the first in the low half: half as many look-ups."""
