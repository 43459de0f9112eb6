"""Checkpoints for measurements: experts with random weights, or sparse files that have only headers."""

from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

HIDDEN, INNER = 2048, 4096
PROJECTIONS = (("gate_proj", INNER, HIDDEN), ("up_proj", INNER, HIDDEN), ("down_proj", HIDDEN, INNER))


@dataclass(frozen=True)
class Made:
    """A checkpoint that was written."""

    path: Path
    tensors: int
    bytes: int
    """Total size of the shards."""


def write_experts(folder: Path, shards: int, experts: int, hidden: int = HIDDEN, inner: int = INNER) -> Made:
    """Write BF16 experts, one layer per shard, with gate and up next to each other, and a norm and a router."""
    shapes = [("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)]
    noise = np.random.default_rng(0).standard_normal(1 << 22) * 0.02
    values = noise.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint8)
    return _write(folder, shards, experts, shapes, values)


def write_holes(folder: Path, shards: int, experts: int) -> Made:
    """Write the experts of a large model without data: sparse files that need no disk space."""
    shapes = [("gate_proj", 2048, 7168), ("up_proj", 2048, 7168), ("down_proj", 7168, 2048)]
    return _write(folder, shards, experts, shapes, None)


def _write(
    folder: Path,
    shards: int,
    experts: int,
    shapes: list[tuple[str, int, int]],
    values: np.ndarray[tuple[int], np.dtype[np.uint8]] | None,
) -> Made:
    folder.mkdir(parents=True)
    hidden = shapes[0][2]
    weight_map: dict[str, str] = {}
    files: list[tuple[Path, list[tuple[str, list[int]]]]] = []
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        at = f"model.layers.{shard}"
        tensors: list[tuple[str, list[int]]] = [
            (f"{at}.input_layernorm.weight", [hidden]),
            (f"{at}.mlp.gate.weight", [experts, hidden]),
        ]
        tensors += [
            (f"{at}.mlp.experts.{expert}.{name}.weight", [rows, columns])
            for expert in range(experts)
            for name, rows, columns in shapes
        ]
        files.append((folder / file, tensors))
        weight_map |= dict.fromkeys((name for name, _ in tensors), file)
    with ThreadPoolExecutor() as threads:
        sizes = list(threads.map(lambda file: _write_file(file[0], file[1], values), files))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {"model_type": "qwen3_moe", "num_hidden_layers": shards, "hidden_size": hidden}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return Made(folder, len(weight_map), sum(sizes))


def _write_file(
    path: Path, tensors: list[tuple[str, list[int]]], values: np.ndarray[tuple[int], np.dtype[np.uint8]] | None
) -> int:
    header: dict[str, object] = {}
    at = 0
    for name, shape in tensors:
        stop = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, stop]}
        at = stop
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        if values is None:
            file.truncate(8 + len(raw) + at)
        else:
            for start in range(0, at, values.size):
                file.write(values[: at - start].data)
    return 8 + len(raw) + at
