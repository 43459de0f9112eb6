"""Values of a checkpoint's weights, a few rows at a time: every way of storing becomes matrices [out, in] of float32.

A stack of experts yields one matrix for each expert and projection, whatever its axes, so
that a checkpoint can be compared with a source that stores the same model in another way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import ml_dtypes
import numpy as np

from halfbyte.checkpoint.io.index import Checkpoint, Tensor
from halfbyte.codec.bits import F32
from halfbyte.contracts import get_contract
from halfbyte.errors import CheckpointError
from halfbyte.formats import get_format
from halfbyte.layouts.description import Role
from halfbyte.layouts.fp8 import block_length, fp8_grid
from halfbyte.models import Model, model_of
from halfbyte.models.experts import expert_module, is_stack
from halfbyte.quantize import dequantize
from halfbyte.types import QuantizedTensor
from halfbyte.verify.nearest import Encoded
from halfbyte.verify.reading import Raw, read_rows, read_scalar, read_whole
from halfbyte.verify.stored import FLOATS, Contents, StoredTensors

T = TypeVar("T")

CODED: tuple[Role, Role] = ("codes", "scales")

CHUNK = 1 << 21
"""Elements that are decoded at a time: few enough that what is computed of them stays in the cache."""


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
    """read(start, stop): these rows, decoded."""
    plain: Tensor | None = None
    """The tensor itself, where the matrix is one tensor as it lies."""
    encoded: Callable[[int, int], Encoded] | None = None
    """encoded(start, stop): these rows as they are stored, for formats of 4-bit codes in blocks."""
    stored: Callable[[int, int], Raw] | None = None
    """stored(start, stop): these rows in the dtype of the file, where they lie one after another."""
    multipliers: Callable[[int, int], F32] | None = None
    """multipliers(start, stop): what the stored values of these rows were multiplied by, for FP8."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def row(self, number: int) -> F32:
        """One row, decoded."""
        found: F32 = self.read(number, number + 1)[0]
        return found

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows that bound memory."""
        step = max(1, CHUNK // max(1, self.shape[1]))
        for start in range(0, self.shape[0], step):
            yield start, min(start + step, self.shape[0])


def coded_rows(path: Path, weight: StoredTensors, role: Role, expert: int, rows: slice) -> Raw:
    """Codes or scales of some rows as [rows, width], whatever the order of axes in the file; a matrix is expert 0."""
    tensor, axes = weight.parts[role], weight.storage.rules[role].shape
    if callable(axes):
        raise CheckpointError(f"{tensor.name}: {weight.storage.name} has no axes of its own")
    found = read_rows(path, tensor, rows, axes.index("rows"), expert if "experts" in axes else None)
    return found.reshape(len(found), math.prod(found.shape[1:]))


def matrices(checkpoint: Checkpoint, contents: Contents) -> dict[str, Matrix]:
    """Every logical weight of a checkpoint by name, and every plain tensor of rank 2 or 3 that is a weight."""
    found: dict[str, Matrix] = {}
    model = model_of(checkpoint.config)
    for weight in contents.quantized.values():
        if not weight.missing:
            found.update((matrix.name, matrix) for matrix in _quantized(checkpoint.path, weight, model))
    for name, tensor in contents.plain.items():
        found.update((matrix.name, matrix) for matrix in _plain(checkpoint.path, name, tensor, model))
    return found


def _plain(path: Path, name: str, tensor: Tensor, model: Model) -> Iterator[Matrix]:
    shape, stored_as = tensor.shape, tensor.dtype.lower()
    if tensor.dtype not in FLOATS or not all(shape):
        return
    if len(shape) == 2 and name.endswith(".weight"):

        def stored(start: int, stop: int) -> Raw:
            return read_rows(path, tensor, slice(start, stop))

        def read(start: int, stop: int) -> F32:
            return _widen(stored(start, stop))

        module, size = name.removesuffix(".weight"), (shape[0], shape[1])
        yield Matrix(module, size, stored_as, (name,), read, tensor, stored=stored)
    elif len(shape) == 3 and is_stack(name):
        transposed = model.lies_transposed(name, shape)
        out, width = (shape[2], shape[1]) if transposed else (shape[1], shape[2])

        def rows(expert: int, picked: slice) -> F32:
            return _widen(read_rows(path, tensor, picked, 2 if transposed else 1, expert))

        yield from _split(Stack(name, shape[0], out, width, stored_as, (name,)), rows, model)


def _quantized(path: Path, weight: StoredTensors, model: Model) -> Iterator[Matrix]:
    storage, parts = weight.storage, weight.parts
    names = tuple(part.name for part in parts.values())
    sizes = storage.sizes(weight.codes.shape)
    if sizes is None:
        return
    experts, out, width = sizes

    def rows(expert: int, picked: slice) -> F32:
        if storage.format == "fp8":
            values = _widen(read_rows(path, weight.codes, picked))
            return values * _fp8_scales(path, parts["scales"], (out, width), picked)
        if storage.format == "int4":
            return _integers(read_rows(path, weight.codes, picked), _widen(read_rows(path, parts["scales"], picked)))
        codes, scales = (coded_rows(path, weight, role, expert, picked) for role in CODED)
        return _decode(path, weight, codes, scales)

    known: list[float] = []  # not functools.cache: what that gives cannot be sent to another process

    def tensor_scale() -> float:
        if not known:
            known.append(_tensor_scale(path, weight))
        return known[0]

    def stored(expert: int, picked: slice) -> Encoded:
        codes, scales = (coded_rows(path, weight, role, expert, picked) for role in CODED)
        return _encoded(storage.format, codes, scales, tensor_scale())

    def multipliers(start: int, stop: int) -> F32:
        return _fp8_scales(path, parts["scales"], (out, width), slice(start, stop))

    coded = stored if storage.format in ("nvfp4", "mxfp4") else None
    if storage.stacked:
        yield from _split(Stack(weight.name, experts, out, width, storage.name, names), rows, model, coded)
        return
    yield Matrix(
        weight.name,
        (out, width),
        storage.name,
        names,
        lambda start, stop: rows(0, slice(start, stop, 1)),
        encoded=None if coded is None else lambda start, stop: stored(0, slice(start, stop, 1)),
        multipliers=None if storage.format != "fp8" else multipliers,
    )


@dataclass(frozen=True)
class Stack:
    """The experts of a layer in one tensor, each [out, width]."""

    name: str
    experts: int
    out: int
    width: int
    kind: str
    sources: tuple[str, ...]


def _split(
    stack: Stack,
    rows: Callable[[int, slice], F32],
    model: Model,
    coded: Callable[[int, slice], Encoded] | None = None,
) -> Iterator[Matrix]:
    """The matrices of a stack: one per expert for down, two for gate and up."""
    for expert in range(stack.experts):
        for projection, whole in model.projections(stack.name, stack.out).items():
            count = len(range(*whole.indices(stack.out)))
            name = expert_module(stack.name, expert, projection)
            read = _part_of(rows, expert, whole)
            encoded = None if coded is None else _part_of(coded, expert, whole)
            yield Matrix(name, (count, stack.width), stack.kind, stack.sources, read, encoded=encoded)


def _part_of(rows: Callable[[int, slice], T], expert: int, whole: slice) -> Callable[[int, int], T]:
    """A reader of the rows of one projection of one expert, out of a reader of the expert's rows."""

    def read(start: int, stop: int) -> T:
        first, step = whole.start, whole.step
        return rows(expert, slice(first + start * step, min(first + stop * step, whole.stop), step))

    return read


def _tensor_scale(path: Path, weight: StoredTensors) -> float:
    """The number that codes and block scales are multiplied by; 1 in formats without one."""
    storage = weight.storage
    if not storage.has_tensor_scale:
        return 1.0
    number = float(read_scalar(path, weight.parts[storage.global_role]))
    return number if not storage.divides else 1 / number if number else np.inf


def _encoded(format: str, codes: Raw, scales: Raw, tensor_scale: float) -> Encoded:
    """Rows of a block format, undecoded but for the scales."""
    raw, scale_format = np.ascontiguousarray(scales).view(np.uint8), get_format(format).scale
    packed = np.ascontiguousarray(codes).view(np.uint8)
    return Encoded(packed, raw, scale_format.values.take(raw.astype(np.intp), mode="clip"), tensor_scale, scale_format)


def _decode(path: Path, weight: StoredTensors, codes: Raw, scales: Raw) -> F32:
    """Rows of a block format, by the contract of those who read them."""
    storage, format = weight.storage, get_format(weight.storage.format)
    contract = "ocp"
    stored = None
    if storage.has_tensor_scale:
        contract = "compressed_tensors" if storage.divides else "modelopt"
        stored = np.asarray(read_scalar(path, weight.parts[storage.global_role]))
    return np.asarray(
        dequantize(
            QuantizedTensor(
                format=format,
                shape=(codes.shape[0], codes.shape[1] * storage.packing),
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


def _fp8_scales(path: Path, tensor: Tensor, size: tuple[int, int], rows: slice) -> F32:
    """The multiplier of each element: one per tensor, row, column, or block whose edges may be partial."""
    raw = read_whole(path, tensor)
    if raw.dtype == np.uint8:
        raw = raw.view(ml_dtypes.float8_e8m0fnu)
    scales = _widen(raw)
    if scales.size == 1:
        return scales.reshape(1, 1)
    grid = scales.reshape(fp8_grid(*size, scales.shape))
    tall, wide = block_length(size[0], grid.shape[0]), block_length(size[1], grid.shape[1])
    picked = grid[np.arange(rows.start, min(rows.stop, size[0])) // tall]
    return picked if grid.shape[1] == 1 else np.asarray(np.repeat(picked, wide, axis=1)[:, : size[1]], np.float32)


def _widen(values: Raw) -> F32:
    return np.asarray(values, np.float32)
