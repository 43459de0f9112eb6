"""The weights of a checkpoint in any layout, decoded, under the names that transformers has at run time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.io.decode import decode_rows, decoding_memory, read_scales
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.io.index import Checkpoint, open_checkpoint
from halfbyte.checkpoint.io.likeness import fingerprint_of
from halfbyte.checkpoint.io.views import SourceMatrix, View, read_rows, scratch_bytes
from halfbyte.checkpoint.plan.source_weights import SourceWeight, find_source_weights, whole
from halfbyte.checkpoint.plan.unstack import orient, split
from halfbyte.errors import UnsupportedError
from halfbyte.models import Model, model_of
from halfbyte.smoothing import I8, Smoothing, scaled

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Part:
    """Some rows of a parameter at run time: the whole of it, or one projection of one expert."""

    module: str
    """The linear layer on disk: `….experts.3.gate_proj`; "" for what is none."""
    read: Callable[[], F32]
    expert: int | None = None
    rows: slice = field(default_factory=lambda: slice(None))
    transposed: bool = False
    """Whether the parameter lies as [inputs, outputs]."""


@dataclass
class Weights:
    """A checkpoint's tensors by the names of parameters at run time. Nothing is read before it is asked for."""

    checkpoint: Checkpoint
    model: Model
    files: Files
    smoothing: Smoothing
    parts: dict[str, list[Part]] = field(default_factory=dict)
    linears: dict[str, SourceMatrix] = field(default_factory=dict)
    """Linear layer on disk → its matrix."""

    @property
    def fingerprint(self) -> str:
        """What statistics know the model by."""
        return fingerprint_of(self.checkpoint, self.files)

    def matrix(self, module: str) -> F32:
        """The values of a linear layer's weight, (outputs, inputs)."""
        values = read_matrix(self.files, self.linears[module])
        columns, rows = self.smoothing.columns.get(module), self.smoothing.rows.get(module)
        return values if columns is None and rows is None else scaled(values, columns, rows)

    def input_scale(self, module: str) -> float | None:
        """The tensor scale of the activations that the checkpoint has for a layer, as a multiplier."""
        source = self.linears.get(module)
        if source is None or source.input_scale is None:
            return None
        value = float(read_rows(self.files, source.input_scale, 0, 1, Arena(4096)).astype(np.float32)[0, 0])
        return 1 / value if source.divides else value

    def is_packed(self, module: str) -> bool:
        """Whether a layer's weight is FP4."""
        return module in self.linears and self.linears[module].kind in ("nvfp4", "mxfp4")


def open_weights(path: Path, smoothing: Smoothing | None = None) -> Weights:
    """Open a checkpoint; refuses one whose tensors transformers reshapes in a way that is not known here.

    smoothing: factors that are folded into what is read.
    """
    checkpoint = open_checkpoint(path)
    model = model_of(checkpoint.config)
    files = Files({name: str(header.path) for name, header in checkpoint.headers.items()})
    weights = Weights(checkpoint, model, files, smoothing or Smoothing(()))
    found = find_source_weights(checkpoint)
    for weight in found.weights:
        for module, source, expert, projection in _matrices(weight, model):
            weights.linears[module] = source
            for name, part in _places(weights, module, source, expert, projection):
                weights.parts.setdefault(name, []).append(part)
    for name, tensor in checkpoint.tensors.items():
        if name in found.owner:
            continue
        view, shape = whole(tensor), tensor.shape
        at = model.architecture.run_time(name) if model.architecture else None
        if at is not None and at.operations:
            raise UnsupportedError(f"{path}: transformers turns {name} into {at.names} by {at.operations}")
        target = at.names[0] if at is not None else name
        exponents = weights.smoothing.vectors.get(name)
        weights.parts.setdefault(target, []).append(Part("", _reader(files, view, shape, exponents)))
    return weights


def _matrices(weight: SourceWeight, model: Model) -> Iterator[tuple[str, SourceMatrix, int | None, str]]:
    if not weight.stacked:
        yield weight.module, weight.sources[0], None, ""
        return
    for one in split(orient(weight, model), model):
        head, _, tail = one.module.rpartition(".experts.")
        number, _, projection = tail.partition(".")
        yield one.module, one.sources[0], int(number), f"{head}.experts {projection}"


def _places(
    weights: Weights, module: str, source: SourceMatrix, expert: int | None, projection: str
) -> Iterator[tuple[str, Part]]:
    """(parameter, part) of a linear layer: its own parameter, or a place in a stack of experts."""
    model = weights.model

    def read() -> F32:
        return weights.matrix(module)

    at = model.run_time(module)
    if expert is None and not at.operations:
        yield f"{at.names[0]}.weight", Part(module, read)
        return
    head, found, tail = module.rpartition(".experts.")
    if not found or (at.operations and not at.merges_experts):
        raise UnsupportedError(
            f"{module}: transformers turns its weight into {at.names} by {', '.join(at.operations)}, which cannot be "
            "calibrated layer by layer"
        )
    number, _, last = tail.partition(".")
    down = last in ("down_proj", "w2")
    stack = f"{head}.experts.{'down_proj' if down else 'gate_up_proj'}"
    stacking = "halves" if model.architecture is None else _stacking(model, stack)
    rows = slice(None) if down else _rows(last, source.rows, stacking)
    yield stack, Part(module, read, int(number), rows, stacking != "halves")


def _stacking(model: Model, stack: str) -> str:
    from halfbyte.models.names import pattern_of

    assert model.architecture is not None
    return model.architecture.stacks.get(pattern_of(stack)) or model.stacking or "halves"


def _rows(projection: str, rows: int, stacking: str) -> slice:
    """The rows of a projection in gate_up_proj."""
    first = projection in ("gate_proj", "w1")
    if stacking == "interleaved":
        return slice(0 if first else 1, 2 * rows, 2)
    return slice(0, rows) if first else slice(rows, 2 * rows)


def _reader(files: Files, view: View, shape: tuple[int, ...], exponents: I8 | None) -> Callable[[], F32]:
    def read() -> F32:
        raw = read_rows(files, view, 0, view.rows, Arena(view.bytes + 4096))
        values = raw.astype(np.float32).reshape(shape)
        return values if exponents is None else scaled(values, None, exponents)

    return read


def read_matrix(files: Files, source: SourceMatrix) -> F32:
    """All values of a matrix, decoded to float32."""
    size = source.weight.bytes + decoding_memory(source, source.rows) + scratch_bytes(source, source.rows)
    scale = source.scale
    size += 0 if scale is None else scale.bytes + scratch_bytes_of(scale)
    arena = Arena(size + (1 << 16))
    raw = read_rows(files, source.weight, 0, source.rows, arena)
    values = decode_rows(source, raw, 0, read_scales(files, source), arena, files)
    return np.array(values, np.float32).reshape(source.rows, source.columns)


def scratch_bytes_of(view: View) -> int:
    return view.rows * view.row_stride * 8 + (4 << 20) if not view.contiguous else 0


def fill(target: Any, parts: Iterable[Part], replace: Mapping[str, Any], name: str) -> None:
    """Copy a parameter's values into a torch tensor; `replace` (module → tensor) has other values than the stored."""
    import torch

    covered = 0
    for part in parts:
        values = replace.get(part.module) if part.module else None
        if values is None:
            values = torch.from_numpy(part.read())
        place = target if part.expert is None else target[part.expert]
        if part.transposed:
            place = place.T
        place = place[part.rows] if place.ndim else place
        if tuple(place.shape) != tuple(values.shape):
            raise UnsupportedError(
                f"{name}: the checkpoint has shape {tuple(values.shape)}, transformers expects {tuple(place.shape)}"
            )
        place.copy_(values)
        covered += place.numel()
    if covered != math.prod(target.shape):
        raise UnsupportedError(f"{name}: the checkpoint has {covered} of {math.prod(target.shape)} values of it")
