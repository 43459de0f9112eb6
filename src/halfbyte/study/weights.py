"""Weights from safetensors files, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from halfbyte.checkpoint.io.header import TensorInfo, read_header
from halfbyte.errors import InputError

DTYPES: dict[str, npt.DTypeLike] = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
BLOCK = 16


def safetensors_files(path: Path) -> list[Path]:
    """The file, or all files of a directory in order."""
    if path.is_file():
        return [path]
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if not found:
        raise InputError(f"{path} is neither a safetensors file nor a directory that holds some")
    return found


def is_weight(info: TensorInfo) -> bool:
    """Whether a tensor is a matrix, or a stack of matrices, of floats whose rows are whole blocks."""
    return info.dtype in DTYPES and len(info.shape) >= 2 and info.bytes > 0 and info.shape[-1] % BLOCK == 0


def read_weights(path: Path) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
    """Name and values of every weight. Tensors that are not float matrices of whole blocks are skipped."""
    for file in safetensors_files(path):
        for info in read_header(file).tensors.values():
            if is_weight(info):
                yield info.name, read_tensor(file, info)


def read_statistics(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    """Every float tensor of a file (or directory) by name."""
    return {
        info.name: read_tensor(file, info)
        for file in safetensors_files(path)
        for info in read_header(file).tensors.values()
        if info.dtype in DTYPES
    }


def read_tensor(file: Path, info: TensorInfo) -> npt.NDArray[np.generic]:
    """The values of one tensor."""
    with file.open("rb") as data:
        data.seek(info.start)
        raw = data.read(info.bytes)
    if len(raw) != info.bytes:
        raise InputError(f"{file} ends within {info.name}: {len(raw)} of {info.bytes} bytes")
    values: npt.NDArray[np.generic] = np.frombuffer(raw, dtype=DTYPES[info.dtype]).reshape(info.shape)
    return values
