"""What a file or directory holds, at a glance: tensors that differ only in layer and expert numbers on one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from halfbyte.checkpoint.io.header import read_header
from halfbyte.checkpoint.io.index import INDEX, Checkpoint, Tensor, open_checkpoint
from halfbyte.layouts.storage import find_stored, read_config
from halfbyte.verify.problems import number

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Line:
    """Tensors of one dtype and shape whose names differ in numbers only."""

    name: str
    """With the range in place of each number that varies: model.layers.{0-31}.mlp.up_proj.weight."""
    count: int
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    """Of all these tensors."""


@dataclass(frozen=True)
class Summary:
    """A checkpoint, or a bare file, without its data."""

    path: str
    files: int
    tensors: int
    bytes: int
    model_type: str
    quantization: str
    dtypes: Mapping[str, int]
    """Bytes by dtype, largest first."""
    lines: tuple[Line, ...]

    def as_json(self) -> dict[str, object]:
        return vars(self) | {"lines": [vars(line) | {"shape": list(line.shape)} for line in self.lines]}


def summarize(path: Path, every: bool = False, match: str = "") -> Summary:
    """Read headers and config of a safetensors file or directory. Raises CheckpointError if they are no such thing.

    every: one line for each tensor. match: only tensors whose name contains this.
    """
    checkpoint = _loose_files(path) or open_checkpoint(path, need_config=False)
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if match in name}
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.info.dtype] = sizes.get(tensor.info.dtype, 0) + tensor.info.bytes
    lines = [_line(name, [tensor]) for name, tensor in tensors.items()] if every else _grouped(tensors)
    return Summary(
        path=str(path),
        files=len(checkpoint.headers),
        tensors=len(tensors),
        bytes=sum(sizes.values()),
        model_type=checkpoint.model_type,
        quantization=_quantization(checkpoint),
        dtypes=dict(sorted(sizes.items(), key=lambda item: -item[1])),
        lines=tuple(lines),
    )


def _loose_files(path: Path) -> Checkpoint | None:
    """A directory of several files and no index, taken together; the same name in two files is told by the file."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if len(files) < 2 or (path / INDEX).exists() or (path / "model.safetensors").exists():
        return None
    headers = {file.name: read_header(file) for file in files}
    tensors: dict[str, Tensor] = {}
    for file, header in headers.items():
        for name, info in header.tensors.items():
            tensors[name if name not in tensors else f"{file}: {name}"] = Tensor(info, file)
    return Checkpoint(path, headers, tensors, {}, {}, (), {})


def _quantization(checkpoint: Checkpoint) -> str:
    """What the tensors are, and what the config says, in one line."""
    kinds: dict[str, int] = {}
    for weight in find_stored(checkpoint.tensors):
        kinds[weight.storage.name] = kinds.get(weight.storage.name, 0) + 1
    stored = ", ".join(f"{number(count, 'weight')} {name}" for name, count in kinds.items()) or "no quantized weights"
    claim = read_config(checkpoint.quantization)
    if claim.layout is None:
        return stored
    activations = "activations FP4 too" if claim.activations else "weights only"
    return f"{stored}; config: {claim.layout}, {activations}, {number(len(claim.ignore), 'module')} excluded"


def _grouped(tensors: Mapping[str, Tensor]) -> list[Line]:
    groups: dict[tuple[str, str, tuple[int, ...]], list[Tensor]] = {}
    for name, tensor in tensors.items():
        key = (NUMBER.sub("#", name), tensor.info.dtype, tensor.info.shape)
        groups.setdefault(key, []).append(tensor)
    lines = [
        _line(_pattern(pattern, [tensor.name for tensor in group]), group) for (pattern, _, _), group in groups.items()
    ]
    return sorted(lines, key=lambda line: line.name)


def _line(name: str, group: list[Tensor]) -> Line:
    info = group[0].info
    return Line(name, len(group), info.dtype, info.shape, sum(tensor.info.bytes for tensor in group))


def _pattern(pattern: str, names: Iterable[str]) -> str:
    """The pattern with what its numbers were: one number, or the range that they span."""
    columns = zip(*(map(int, NUMBER.findall(name)) for name in names), strict=True)
    for column in columns:
        low, high = min(column), max(column)
        pattern = pattern.replace("#", str(low) if low == high else f"{{{low}-{high}}}", 1)
    return pattern
