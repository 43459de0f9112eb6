"""A checkpoint directory: its shards, its weight map, config.json and the files beside them. Headers only, no data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from halfbyte.checkpoint.io.absent import refuse_absent
from halfbyte.checkpoint.io.header import Header, TensorInfo, encodable, read_header
from halfbyte.checkpoint.io.side_files import PICKLES, side_files
from halfbyte.errors import CheckpointError
from halfbyte.layouts import LAYOUTS
from halfbyte.models.config import setting, text_part
from halfbyte.smoothing import FILE as SMOOTHING

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
MANIFEST = "halfbyte.json"

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor and the shard that holds it."""

    info: TensorInfo
    file: str
    """Name of the shard, relative to the directory."""

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def dtype(self) -> str:
        return self.info.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape


@dataclass(frozen=True)
class Checkpoint:
    """A directory of safetensors shards that passed every check of headers and index."""

    path: Path
    headers: Mapping[str, Header]
    """Shard name → header, in the order of the names."""
    tensors: Mapping[str, Tensor]
    """Tensor name → where it lies, shard by shard in the order of the data."""
    config: Json
    quantization: Json
    """quantization_config of config.json or of its language part, or that of a layout's file; {} if none."""
    side_files: tuple[str, ...]
    """Files to copy byte for byte: tokenizer, generation config, chat template, remote code, weights in folders."""
    left_out: Mapping[str, str]
    """Files that are not part of the checkpoint, with the reason."""

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    def setting(self, name: str) -> Any:
        """A value of config.json, or of its part for the language model."""
        return setting(self.config, name)


def open_checkpoint(path: Path, need_config: bool = True) -> Checkpoint:
    """Read index, config and every header of a directory (or one safetensors file without a config).

    Each thing that makes the directory no checkpoint raises a CheckpointError that names the file.
    """
    if path.is_file():
        if need_config:
            raise CheckpointError(f"{path} is a file; give the directory that holds it and config.json")
        return _assemble(path.parent, [path.name], None, {}, (), {})
    if not path.is_dir():
        raise CheckpointError(f"{path} is not there, or is no directory; give the folder of a downloaded checkpoint")
    files, weight_map = _shards(path)
    config = read_json(path / CONFIG) if need_config or (path / CONFIG).exists() else {}
    written = {CONFIG, INDEX, MANIFEST, SMOOTHING, *(layout.config_file for layout in LAYOUTS.values())}
    side, left_out = side_files(path, files, written, strict=need_config)
    return _assemble(path, files, weight_map, config, side, left_out)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    refuse_absent(path)
    try:
        text = path.read_text(encoding="utf-8")
        parsed = json.loads(text)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} holds no {path.name}: not a Hugging Face checkpoint") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(parsed).__name__}")
    if "\\ud" in text.lower() and not encodable(json.dumps(parsed, ensure_ascii=False)):
        raise CheckpointError(f"{path}: holds half of a surrogate pair (\\ud800 to \\udfff), which is no Unicode text")
    return parsed


def _shards(path: Path) -> tuple[list[str], dict[str, str] | None]:
    """Names of the shards, and the weight map if there is an index."""
    present = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(".safetensors"))
    if (path / INDEX).exists() or (path / INDEX).is_symlink():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path / INDEX}: weight_map is missing or empty")
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or not _inside(name):
                raise CheckpointError(f"{path / INDEX}: {tensor} is said to be in {name!r}, outside the directory")
        named = sorted(set(weight_map.values()))
        for name in named:
            refuse_absent(path / name)
            if not (path / name).is_file():
                raise CheckpointError(f"{path / INDEX} names {name}, which is not there; fetch the missing shard")
            if not name.endswith(".safetensors"):
                raise CheckpointError(f"{path / INDEX} names {name}, which is no safetensors file")
        return named, {str(tensor): str(name) for tensor, name in weight_map.items()}
    if "model.safetensors" in present:
        return ["model.safetensors"], None
    if len(present) == 1:
        return present, None
    if present:
        raise CheckpointError(
            f"{path} holds {len(present)} safetensors files but no {INDEX} that says which belong to the model"
        )
    pickles = sorted(entry.name for entry in path.iterdir() if entry.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"{path} holds only pickle files ({pickles[0]}), which can run code; save it as safetensors first"
        )
    raise CheckpointError(f"{path} holds no safetensors file: not a checkpoint")


def _inside(name: str) -> bool:
    """Whether a file name stays a plain name within the directory."""
    parts = PurePosixPath(name).parts
    return len(parts) == 1 and parts[0] not in ("..", "/") and "\\" not in name and "\0" not in name


def _assemble(
    path: Path,
    files: list[str],
    weight_map: Mapping[str, str] | None,
    config: Json,
    side: tuple[str, ...],
    left_out: Mapping[str, str],
) -> Checkpoint:
    headers = {name: read_header(path / name) for name in files}
    tensors: dict[str, Tensor] = {}
    for file, header in headers.items():
        for name, info in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{path}: tensor {name} is in both {tensors[name].file} and {file}")
            if weight_map is not None and weight_map.get(name) != file:
                said = f"says {weight_map[name]}" if name in weight_map else "does not name it"
                raise CheckpointError(f"{path / file} holds tensor {name}, but {INDEX} {said}")
            tensors[name] = Tensor(info, file)
    for name in weight_map or {}:
        if name not in tensors:
            raise CheckpointError(f"{path / INDEX} puts {name} into {(weight_map or {})[name]}, where it is not")
    if not tensors:
        raise CheckpointError(f"{path} holds no tensor")
    return Checkpoint(path, headers, tensors, config, _quantization(path, config), side, left_out)


def _quantization(path: Path, config: Json) -> Json:
    """What config.json, or the file of a layout beside it, says about a source that is quantized already."""
    for place in (config, text_part(config)):
        found = place.get("quantization_config")
        if isinstance(found, dict):
            return found
    for layout in LAYOUTS.values():
        if layout.config_file and (path / layout.config_file).is_file():
            return layout.read_config_file(read_json(path / layout.config_file))
    return {}
