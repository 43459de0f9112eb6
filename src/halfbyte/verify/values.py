"""Values of a checkpoint's weights, a few rows at a time: every way of storing becomes matrices [out, in] of float32.

Reading is a matter of views: a stack of experts yields one matrix for each expert and projection, whatever its axes, so
that a checkpoint can be compared with a source that stores the same model in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from halfbyte.checkpoint.io.decode import block_length, fp8_grid
from halfbyte.checkpoint.io.index import Checkpoint, Tensor
from halfbyte.codec.bits import F32
from halfbyte.contracts import get_contract
from halfbyte.formats import get_format
from halfbyte.quantize import dequantize
from halfbyte.types import QuantizedTensor
from halfbyte.verify.stored import FLOATS, GPT_OSS, MODELOPT_STACK, Weight, Weights

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
CHUNK = 1 << 20
"""Elements that are decoded at a time."""

SMALL = 1 << 16
"""Bytes up to which a tensor is read rather than mapped."""

TRANSPOSED = ("gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text")
"""Families whose plain expert stacks are [experts, in, out]; all others are [experts, out, in]."""

Half = Literal["whole", "first", "second", "even", "odd"]


@dataclass(frozen=True)
class Matrix:
    """One logical weight [out, in], read a few rows at a time."""

    name: str
    """The module it would be if every expert stood alone."""
    shape: tuple[int, int]
    kind: str
    sources: tuple[str, ...]
    """Names of the tensors that it is read from."""
    read: Callable[[int, int], F32]
    """Rows from, to."""
    plain: Tensor | None = None
    """The tensor itself, where the matrix is one tensor as it lies."""

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows that bound memory."""
        step = max(1, CHUNK // max(1, self.shape[1]))
        for start in range(0, self.shape[0], step):
            yield start, min(start + step, self.shape[0])


def view(path: Path, tensor: Tensor) -> Raw:
    """A tensor's data, mapped: only what is used is read, and it is given back with the array."""
    info = tensor.info
    if info.bytes == 0:
        return np.zeros(info.shape, NUMPY[info.dtype])
    if info.bytes <= SMALL:  # there may be a hundred thousand scales
        with open(f"{path}/{tensor.file}", "rb") as file:
            file.seek(info.start)
            return np.frombuffer(file.read(info.bytes), NUMPY[info.dtype]).reshape(info.shape)
    raw = np.memmap(path / tensor.file, np.uint8, "r", info.start, (info.bytes,))
    return np.asarray(raw).view(NUMPY[info.dtype]).reshape(info.shape)


def pieces(path: Path, tensor: Tensor) -> Iterator[Raw]:
    """A tensor's elements in order, flat, a part at a time, each mapped on its own. Rare dtypes come as bytes."""
    dtype = np.dtype(NUMPY.get(tensor.info.dtype, np.uint8))
    step = CHUNK * dtype.itemsize
    for start in range(tensor.info.start, tensor.info.stop, step):
        size = min(step, tensor.info.stop - start)
        yield np.asarray(np.memmap(path / tensor.file, np.uint8, "r", start, (size,))).view(dtype)


def scalar(path: Path, tensor: Tensor) -> np.float32:
    """A tensor of one number, as float32."""
    return np.float32(view(path, tensor).reshape(-1)[0])


def matrices(checkpoint: Checkpoint, weights: Weights) -> dict[str, Matrix]:
    """Every logical weight of a checkpoint by name, and every plain tensor of rank 2 or 3 that is a weight."""
    found: dict[str, Matrix] = {}
    for weight in weights.quantized.values():
        if set(weight.kind.required) <= set(weight.parts):
            found.update((matrix.name, matrix) for matrix in _quantized(checkpoint, weight))
    for name, tensor in weights.plain.items():
        found.update((matrix.name, matrix) for matrix in _plain(checkpoint, name, tensor))
    return found


def _plain(checkpoint: Checkpoint, name: str, tensor: Tensor) -> Iterator[Matrix]:
    shape, kind = tensor.info.shape, tensor.info.dtype.lower()
    if tensor.info.dtype not in FLOATS or not all(shape):
        return
    if len(shape) == 2 and name.endswith(".weight"):

        def read(start: int, stop: int) -> F32:
            return _widen(view(checkpoint.path, tensor)[start:stop])

        yield Matrix(name.removesuffix(".weight"), (shape[0], shape[1]), kind, (name,), read, tensor)
    elif len(shape) == 3 and name.endswith((".gate_up_proj", ".down_proj")):
        transposed = checkpoint.model_type in TRANSPOSED
        out, width = (shape[2], shape[1]) if transposed else (shape[1], shape[2])

        def rows(expert: int, half: Half, start: int, stop: int) -> F32:
            stack = view(checkpoint.path, tensor)[expert]
            return _widen(_rows(stack.T if transposed else stack, half)[start:stop])

        yield from _split(checkpoint, name, (shape[0], out, width), kind, (name,), rows)


def _quantized(checkpoint: Checkpoint, weight: Weight) -> Iterator[Matrix]:
    path, kind, parts = checkpoint.path, weight.kind, weight.parts
    names = tuple(part.name for part in parts.values())
    codes = parts["codes"].info.shape
    if kind is GPT_OSS:

        def block_rows(expert: int, half: Half, start: int, stop: int) -> F32:
            packed = _rows(view(path, parts["codes"])[expert].reshape(codes[1], -1), half)[start:stop]
            return _decode(path, weight, packed, _rows(view(path, parts["scales"])[expert], half)[start:stop])

        yield from _split(checkpoint, weight.name, (codes[0], codes[1], codes[2] * 32), kind.name, names, block_rows)
    elif kind is MODELOPT_STACK:

        def stack_rows(expert: int, half: Half, start: int, stop: int) -> F32:
            packed = _rows(view(path, parts["codes"])[expert].T, half)[start:stop]
            return _decode(path, weight, packed, _rows(view(path, parts["scales"])[expert].T, half)[start:stop])

        yield from _split(checkpoint, weight.name, (codes[0], codes[2], codes[1] * 2), kind.name, names, stack_rows)
    elif kind.format == "fp8":
        if len(codes) != 2:
            return

        def square_rows(start: int, stop: int) -> F32:
            values = _widen(view(path, parts["codes"])[start:stop])
            return values * _square_scales(path, parts["scales"], codes, start, stop)

        yield Matrix(weight.name, (codes[0], codes[1]), kind.name, names, square_rows)
    elif kind.format == "int4":

        def int4_rows(start: int, stop: int) -> F32:
            scales = _widen(view(path, parts["scales"])[start:stop])
            return _integers(view(path, parts["codes"])[start:stop], scales)

        yield Matrix(weight.name, (codes[0], codes[1] * 8), kind.name, names, int4_rows)
    else:

        def rows(start: int, stop: int) -> F32:
            scales = view(path, parts["scales"])[start:stop]
            return _decode(path, weight, view(path, parts["codes"])[start:stop], scales)

        yield Matrix(weight.name, (codes[0], codes[1] * 2), kind.name, names, rows)


def _split(
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, int, int],
    kind: str,
    sources: tuple[str, ...],
    rows: Callable[[int, Half, int, int], F32],
) -> Iterator[Matrix]:
    """The matrices of a stack: one an expert for down, two for gate and up."""
    parent, _, leaf = name.rpartition(".")
    interleaved = checkpoint.model_type == "gpt_oss"
    halves: Mapping[str, Half] = {leaf: "whole"}
    if leaf == "gate_up_proj":
        halves = {"gate_proj": "even", "up_proj": "odd"} if interleaved else {"gate_proj": "first", "up_proj": "second"}
    for expert in range(shape[0]):
        for part, half in halves.items():

            def read(start: int, stop: int, expert: int = expert, half: Half = half) -> F32:
                return rows(expert, half, start, stop)

            yield Matrix(f"{parent}.{expert}.{part}", (shape[1] // len(halves), shape[2]), kind, sources, read)


def _rows(matrix: Raw, half: Half) -> Raw:
    middle = matrix.shape[0] // 2
    picked = {
        "whole": slice(None),
        "first": slice(0, middle),
        "second": slice(middle, None),
        "even": slice(0, None, 2),
        "odd": slice(1, None, 2),
    }
    return matrix[picked[half]]


def _decode(path: Path, weight: Weight, codes: Raw, scales: Raw) -> F32:
    """Rows of a block format, by the contract of those who read them."""
    format = get_format(weight.kind.format)
    contract = "ocp"
    stored = None
    if format.name == "nvfp4":
        contract = "compressed_tensors" if weight.kind.divisor else "modelopt"
        stored = np.asarray(scalar(path, weight.parts["global"]))
    return np.asarray(
        dequantize(
            QuantizedTensor(
                format=format,
                shape=(codes.shape[0], codes.shape[1] * 2),
                codes=np.ascontiguousarray(codes).view(np.uint8),
                scales=np.ascontiguousarray(scales).view(np.uint8),
                global_scale=None,
                stored_scale=stored,
                contract=get_contract(contract, format),
            )
        )
    )


def _integers(packed: Raw, scales: F32) -> F32:
    """INT4, eight to a word with the lowest bits first, 8 standing for zero; each group of a row times its scale."""
    words = np.ascontiguousarray(packed).view(np.uint32)
    codes = (words[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(15)
    grouped = _widen(codes).reshape(*scales.shape, -1) - np.float32(8)
    return (grouped * scales[:, :, None]).reshape(len(words), -1)


def _square_scales(path: Path, tensor: Tensor, codes: tuple[int, ...], start: int, stop: int) -> F32:
    """The multiplier of each element: one a tensor, a row, a column, or a block whose edges may be partial."""
    raw = view(path, tensor)
    if raw.dtype == np.uint8:
        raw = raw.view(ml_dtypes.float8_e8m0fnu)
    scales = _widen(raw)
    if scales.size == 1:
        return scales.reshape(1, 1)
    grid = scales.reshape(fp8_grid(scales.shape))
    tall, wide = block_length(codes[0], grid.shape[0]), block_length(codes[1], grid.shape[1])
    rows = grid[np.arange(start, stop) // tall]
    return rows if grid.shape[1] == 1 else np.asarray(np.repeat(rows, wide, axis=1)[:, : codes[1]], np.float32)


def _widen(values: Raw) -> F32:
    return np.asarray(values, np.float32)
