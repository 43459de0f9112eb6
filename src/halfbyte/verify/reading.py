"""Tensors of a checkpoint, read: whole, some rows of them, or from end to end in pieces.

They are read and not mapped. So what a disk cannot read, or a file that was cut since its header was read, is an error
that names the file and the tensor, and not the end of the process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from halfbyte.checkpoint.io.files import read_all
from halfbyte.checkpoint.io.index import Tensor
from halfbyte.codec.bits import U8
from halfbyte.errors import CheckpointError

Raw = npt.NDArray[np.generic]

NUMPY: dict[str, npt.DTypeLike] = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "BOOL": np.bool_,
}

PIECE = 1 << 21
"""Elements that `read_pieces` reads at a time."""


def read_whole(path: Path, tensor: Tensor) -> Raw:
    """A tensor as it lies, for small ones."""
    memory = _read(path, tensor, 0, 1, tensor.info.bytes, 0)
    return memory.view(NUMPY[tensor.info.dtype]).reshape(tensor.info.shape)


def read_rows(path: Path, tensor: Tensor, rows: slice, axis: int = 0, expert: int | None = None) -> Raw:
    """Some rows of a matrix, or of one expert of a stack, as [rows, …]: the rows come first, whatever their axis.

    axis: the one of `tensor.shape` that counts rows. expert: which element of the first axis, if that counts experts.
    """
    dtype = np.dtype(NUMPY[tensor.info.dtype])
    shape = tensor.info.shape if expert is None else tensor.info.shape[1:]
    axis -= expert is not None
    before, count, after = shape[:axis], shape[axis], shape[axis + 1 :]
    picked = range(count)[rows]
    first, last = (min(picked), max(picked) + 1) if picked else (0, 0)
    element = dtype.itemsize * math.prod(after)  # of the axis that counts rows
    start = (expert or 0) * math.prod(shape) * dtype.itemsize + first * element
    memory = _read(path, tensor, start, math.prod(before), (last - first) * element, count * element)
    found = memory.view(dtype).reshape(*before, last - first, *after)
    if axis:
        found = np.ascontiguousarray(np.moveaxis(found, axis, 0))  # the kernel that compares rows asks for it
    return found[:: picked.step]


def read_pieces(path: Path, tensor: Tensor) -> Iterator[Raw]:
    """A tensor's elements in order, flat, a piece at a time. Rare dtypes come as bytes."""
    dtype = np.dtype(NUMPY.get(tensor.info.dtype, np.uint8))
    step = PIECE * dtype.itemsize
    for start in range(0, tensor.info.bytes, step):
        yield _read(path, tensor, start, 1, min(step, tensor.info.bytes - start), 0).view(dtype)


def read_scalar(path: Path, tensor: Tensor) -> np.float32:
    """A tensor of one number, as float32."""
    return np.float32(read_whole(path, tensor).reshape(-1)[0])


def _read(path: Path, tensor: Tensor, start: int, count: int, size: int, step: int) -> U8:
    """`count` times `size` bytes of a tensor, the first from `start` on, each `step` behind the one before."""
    into = np.empty(count * size, np.uint8)
    if not into.size:
        return into
    file = f"{path}/{tensor.file}"
    place = tensor.info.start + start
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for at in range(0, into.size, size):
                if read_all(descriptor, place, into[at : at + size]) < size:
                    raise CheckpointError(f"{file} was cut while it was checked: {tensor.name} ends behind its end")
                place += step
        finally:
            os.close(descriptor)
    except OSError as error:
        text = f"{file} cannot be read after byte {place}, in {tensor.name}: {error.strerror or error}"
        raise CheckpointError(text) from error
    return into
