"""Small checkpoints for the tests, written without the code under test."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors

Array = npt.NDArray[Any]

NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int8): "I8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}

READ_AS = {name: np.dtype(np.uint8) if name.startswith("F8") else dtype for dtype, name in NAMES.items()}


def safetensors_bytes(tensors: Mapping[str, Array]) -> bytes:
    """A safetensors file, tensors in the order given."""
    header: dict[str, object] = {}
    data = b""
    for name, x in tensors.items():
        raw = x.tobytes()
        header[name] = {
            "dtype": NAMES[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return raw_file(header, data)


def raw_file(header: object, data: bytes) -> bytes:
    """A file with any header, for hostile ones."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_checkpoint(
    folder: Path, tensors: Mapping[str, Array], config: Mapping[str, Any] | None = None, shards: int = 1
) -> Path:
    """A directory of that many shards, tensors dealt out in turns so that partners lie apart."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: x for number, (key, x) in enumerate(tensors.items()) if number % shards == shard}
        (folder / name).write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, name)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, **(config or {})}))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def random(seed: int, *shape: int, dtype: npt.DTypeLike = ml_dtypes.bfloat16, scale: float = 1.0) -> Array:
    """Gaussian values, with outliers here and there."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(shape) * scale
    x[generator.random(shape) < 0.01] *= 8
    return x.astype(np.float32).astype(dtype)


def llama(
    layers: int = 2, hidden: int = 64, inner: int = 96, dtype: npt.DTypeLike = ml_dtypes.bfloat16
) -> dict[str, Array]:
    """The tensors of a tiny Llama."""
    tensors = {"model.embed_tokens.weight": random(1, 32, hidden, dtype=dtype)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for number, (name, rows, columns) in enumerate(
            [
                ("self_attn.q_proj", hidden, hidden),
                ("self_attn.k_proj", hidden // 2, hidden),
                ("self_attn.v_proj", hidden // 2, hidden),
                ("self_attn.o_proj", hidden, hidden),
                ("mlp.gate_proj", inner, hidden),
                ("mlp.up_proj", inner, hidden),
                ("mlp.down_proj", hidden, inner),
            ]
        ):
            tensors[f"{at}.{name}.weight"] = random(
                10 * layer + number, rows, columns, dtype=dtype, scale=0.02 * (number + 1)
            )
        tensors[f"{at}.input_layernorm.weight"] = random(100 + layer, hidden, dtype=dtype)
        tensors[f"{at}.self_attn.q_proj.bias"] = random(200 + layer, hidden, dtype=dtype)
    tensors["model.norm.weight"] = random(2, hidden, dtype=dtype)
    tensors["lm_head.weight"] = random(3, 32, hidden, dtype=dtype)
    return tensors


def read_checkpoint(folder: Path) -> dict[str, Array]:
    """Every tensor of a directory, read by the format's own library; float8 as bytes."""
    found: dict[str, Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        if safetensors.__version__.startswith("0.5.") and b'"F8_E8M0"' in data:
            pytest.skip(f"safetensors {safetensors.__version__} does not know F8_E8M0; 0.6.1 does")
        for name, tensor in safetensors.deserialize(data):  # type: ignore[no-untyped-call]
            found[name] = np.frombuffer(tensor["data"], READ_AS[tensor["dtype"]]).reshape(tensor["shape"])
    return found


def all_bytes(folder: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
