"""Where a weight matrix lies in a file, by strides, and how a range of its rows is read.

Views are frozen and hold numbers only, so that a plan can be written down. Rows go into buffers that the caller reuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from halfbyte.backends.amax import can_read
from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.io.files import Files
from halfbyte.codec.bits import BFLOAT16

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

AT_ONCE = 1 << 18
"""Bytes that are read at a time where nobody keeps them: a part of a second-level cache."""


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

    def place(self, row: int) -> int:
        """The byte of the file where a row begins."""
        return self.offset + row * self.row_stride * NUMPY[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class SourceMatrix:
    """A weight matrix as the checkpoint holds it."""

    kind: Kind
    rows: int
    columns: int
    """Logical size: elements, not bytes."""
    weight: View
    scale: View | None = None
    """FP8: any grid; INT4: one per group; MXFP4: E8M0 bytes, one per 32 columns; NVFP4: E4M3 bytes, one per 16."""
    global_scale: View | None = None
    """NVFP4: the tensor scale."""
    divides: bool = False
    """NVFP4: whether the tensor scale divides (compressed-tensors) or multiplies."""
    input_scale: View | None = None
    """NVFP4: the tensor scale of the activations, in the same direction."""

    @property
    def files(self) -> set[str]:
        """Names of the files that hold a part of it."""
        views = (self.weight, self.scale, self.global_scale, self.input_scale)
        return {view.file for view in views if view is not None}

    @property
    def row_bytes(self) -> int:
        """Bytes that one row takes in the file."""
        return self.weight.columns * NUMPY[self.weight.dtype].itemsize


def read_rows(files: Files, view: View, start: int, stop: int, arena: Arena) -> npt.NDArray[Any]:
    """Rows start to stop as a contiguous (rows, columns) array of the dtype's numpy form."""
    dtype = NUMPY[view.dtype]
    size, rows = dtype.itemsize, stop - start
    first = view.place(start)
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


def read_rows_amax(
    files: Files, view: View, start: int, stop: int, arena: Arena
) -> tuple[npt.NDArray[Any], np.float32]:
    """Rows of a contiguous view of floats, and their largest magnitude, found while they are in the cache."""
    dtype, rows = NUMPY[view.dtype], stop - start
    raw = arena.take(rows * view.columns * dtype.itemsize).view(dtype).reshape(rows, view.columns)
    return raw, files.read_amax(view.file, view.place(start), raw)


def find_amax(files: Files, view: View, start: int, stop: int, arena: Arena) -> np.float32:
    """The largest magnitude of rows of a contiguous view of floats, which are not kept."""
    dtype = NUMPY[view.dtype]
    size = (stop - start) * view.columns * dtype.itemsize
    mark = arena.mark()
    room = arena.take(min(size, AT_ONCE) if can_read() else size)
    amax = files.read_amax(view.file, view.place(start), room.view(dtype), size)
    arena.release(mark)
    return amax


def read_scratch(view: View, rows: int) -> int:
    """Bytes beyond the rows themselves that `read_rows` takes from an arena."""
    size = NUMPY[view.dtype].itemsize
    if view.column_stride != 1:
        return max(4 << 20, ((rows - 1) * view.row_stride + 1) * size)
    if view.row_stride != view.columns:
        return ((rows - 1) * view.row_stride + view.columns) * size
    return 0


def scratch_bytes(source: SourceMatrix, rows: int) -> int:
    """Likewise for a source, with what alignment takes."""
    return read_scratch(source.weight, rows) + 4096
