"""Which weights a checkpoint holds and in which form: found from headers, by the tables of the layouts.

A weight is one module's matrix with the small tensors that belong to it, or the stacked experts of a layer. What is no
weight (biases, norms, positions) is copied as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from halfbyte.checkpoint.io.index import Checkpoint, Tensor
from halfbyte.checkpoint.io.views import NUMPY, Kind, SourceMatrix, View
from halfbyte.checkpoint.plan.unreadable import unreadable_text
from halfbyte.errors import CheckpointError
from halfbyte.layouts.description import FLOATS, PartRule
from halfbyte.layouts.storage import StoredWeight, code_suffixes, find_stored
from halfbyte.models.experts import is_stack

KINDS: Mapping[str, Kind] = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "fp8": "fp8", "int4": "int4"}
"""Formats that can be decoded."""

SCALARS = ((), (1,))
"""Shapes of one number."""


@dataclass(frozen=True, slots=True)
class SourceWeight:
    """A module's weight: one matrix, or several that are stacked in one tensor."""

    module: str
    kind: Kind
    tensor: Tensor
    """The tensor that holds the elements; its shard gets the output."""
    sources: tuple[SourceMatrix, ...]
    """One matrix, or one per expert."""
    belongs: tuple[str, ...] = ()
    """Other tensors that are part of it: scales."""
    dropped: tuple[str, ...] = ()
    """Tensors that lose their meaning: scales of activations under the source's own format."""
    stacked: bool = False


@dataclass
class Found:
    """The weights of a checkpoint, and who owns each tensor that is part of one."""

    weights: list[SourceWeight] = field(default_factory=list)
    owner: dict[str, str] = field(default_factory=dict)
    """Tensor → the module that it is part of."""
    unreadable: dict[str, Tensor] = field(default_factory=dict)
    """Module → its matrix, of a dtype that cannot be converted: it can only be kept as it is."""

    def add(self, weight: SourceWeight) -> None:
        self.weights.append(weight)
        for name in (weight.tensor.name, *weight.belongs):
            if name in self.owner:
                raise CheckpointError(f"{name} belongs to both {self.owner[name]} and {weight.module}")
            self.owner[name] = weight.module


def find_source_weights(checkpoint: Checkpoint) -> Found:
    """Every weight of a checkpoint. A tensor that should have scales and has none is an error."""
    found = Found()
    stored = {weight.codes.name: weight for weight in find_stored(checkpoint.tensors)}
    packed = code_suffixes()
    for name, tensor in checkpoint.tensors.items():
        dtype, shape = tensor.info.dtype, tensor.info.shape
        if name in stored:
            if (len(shape) == 2 and 0 not in shape) or not name.endswith(".weight"):  # others are no linear layers
                found.add(_quantized(stored[name]))
        elif name.endswith(".weight") and len(shape) == 2 and 0 not in shape:
            module = name.removesuffix(".weight")
            if dtype not in FLOATS:
                found.unreadable[module] = tensor
                continue
            found.add(SourceWeight(module, "float", tensor, (SourceMatrix("float", *shape, whole(tensor)),)))
        elif name.endswith(packed):
            raise CheckpointError(unreadable_text(tensor))
        elif dtype in FLOATS and len(shape) == 3 and is_stack(name):
            found.add(_stacked(tensor))
    return found


def whole(tensor: Tensor, rows: int | None = None, columns: int | None = None) -> View:
    """A tensor as a matrix; leading axes are joined into rows."""
    info = tensor.info
    width = columns if columns is not None else (info.shape[-1] if info.shape else 1)
    height = rows if rows is not None else prod(info.shape) // max(1, width)
    return View(info.name, tensor.file, info.dtype, info.start, height, width, width)


def _matrices(tensor: Tensor, rule: PartRule) -> list[View]:
    """The (rows, columns) matrices of bytes of a tensor, one per expert, by the axes of its rule."""
    axes = ("rows", "columns") if callable(rule.shape) else rule.shape
    strides = [prod(tensor.shape[i + 1 :]) for i in range(len(axes))]
    length, stride = dict(zip(axes, tensor.shape, strict=True)), dict(zip(axes, strides, strict=True))
    across = [axis for axis in axes if axis not in ("experts", "rows")]
    size = NUMPY[tensor.dtype].itemsize
    return [
        View(
            tensor.name,
            tensor.file,
            tensor.dtype,
            tensor.info.start + expert * stride.get("experts", 0) * size,
            length["rows"],
            prod(length[axis] for axis in across),
            stride["rows"],
            stride[across[-1]],
        )
        for expert in range(length.get("experts", 1))
    ]


def _quantized(weight: StoredWeight[Tensor]) -> SourceWeight:
    """A quantized weight, its tensors checked against the table of its layout."""
    storage, parts, codes = weight.storage, weight.parts, weight.codes
    if storage.format not in KINDS:
        raise CheckpointError(f"{weight.name} is stored as {storage.name}, which no decoder knows")
    for missing in weight.missing:
        raise CheckpointError(f"{weight.name} is quantized ({storage.name}), but {missing} is not in the checkpoint")
    for role, part in parts.items():
        if storage.rules[role].refusal:
            raise CheckpointError(f"{weight.name} ({part.name}): {storage.rules[role].refusal}")
    sizes = storage.sizes(codes.shape)
    if sizes is None or 0 in codes.shape:
        raise CheckpointError(
            f"{codes.name}: {codes.dtype} of shape {list(codes.shape)} is no weight of {storage.name}, whose codes are "
            f"{storage.describe(storage.codes)}"
        )
    _, rows, columns = sizes
    kind = KINDS[storage.format]
    scales = _scales(weight, sizes)
    codes_views = _int4_bytes(codes, rows, columns) if kind == "int4" else _matrices(codes, storage.codes)
    tensor_scale = _scalar(parts[storage.global_role]) if storage.has_tensor_scale else None
    inputs = parts.get(storage.input_role) if storage.has_tensor_scale else None
    sources = tuple(
        SourceMatrix(
            kind,
            rows,
            columns,
            codes_view,
            scale_view,
            tensor_scale,
            storage.divides,
            None if inputs is None else _scalar(inputs),
        )
        for codes_view, scale_view in zip(codes_views, scales, strict=True)
    )
    dropped = () if storage.has_tensor_scale else _names(parts.get(storage.input_role))
    belongs = tuple(part.name for part in parts.values() if part is not codes and part.name not in dropped)
    return SourceWeight(weight.name, kind, codes, sources, belongs, dropped, storage.stacked)


def _scales(weight: StoredWeight[Tensor], sizes: tuple[int, int, int]) -> list[View]:
    """The block scales, one matrix per expert."""
    storage, codes, scale = weight.storage, weight.codes, weight.parts["scales"]
    rule = storage.rules["scales"]
    if callable(rule.shape):
        if scale.dtype not in rule.dtypes:
            raise CheckpointError(f"{scale.name}: scales of dtype {scale.dtype} are not known for {storage.name}")
        try:
            grid = rule.shape(sizes[1], sizes[2], scale.shape)
        except CheckpointError as error:
            raise CheckpointError(f"{scale.name}, shape {list(scale.shape)}, of {codes.name}: {error}") from error
        return [whole(scale, *grid)]
    wanted = storage.shape_of(rule, *sizes)
    if scale.shape != wanted or scale.dtype not in rule.dtypes:
        raise CheckpointError(
            f"{scale.name}: {codes.name} of shape {list(codes.shape)} needs {' or '.join(rule.dtypes)} scales of shape "
            f"{list(wanted)}, got {scale.dtype} {list(scale.shape)}"
        )
    return _matrices(scale, rule)


def _int4_bytes(codes: Tensor, rows: int, columns: int) -> list[View]:
    """Eight codes per int32, the lowest bits first: in a little-endian file that is two codes per byte, in order."""
    return [View(codes.name, codes.file, "U8", codes.info.start, rows, columns // 2, columns // 2)]


def _stacked(tensor: Tensor) -> SourceWeight:
    """Float experts in one 3-D tensor, as they lie; the model knows which axis is which."""
    _, rows, columns = tensor.shape
    views = _matrices(tensor, PartRule("values", "", FLOATS, ("experts", "rows", "columns")))
    sources = tuple(SourceMatrix("float", rows, columns, view) for view in views)
    return SourceWeight(tensor.name, "float", tensor, sources, stacked=True)


def _names(tensor: Tensor | None) -> tuple[str, ...]:
    return () if tensor is None else (tensor.name,)


def _scalar(tensor: Tensor) -> View:
    if tensor.dtype not in FLOATS or tensor.shape not in SCALARS:
        raise CheckpointError(f"{tensor.name}: expected one float, got {tensor.dtype} {list(tensor.shape)}")
    return whole(tensor, 1, 1)
