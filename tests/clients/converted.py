"""`halfbyte convert` on tiny models, for the clients to load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from halfbyte.cli import app
from tests.tiny_models import E4M3, LAYERS, Tensors, llama, make, write_checkpoint


def convert(source: Path, target: Path, *options: str) -> Path:
    """The command itself, as a user types it."""
    result = CliRunner().invoke(app, ["convert", str(source), str(target), "--quiet", *options], env={"COLUMNS": "200"})
    if result.exit_code:
        raise AssertionError(f"halfbyte convert {' '.join(options)} ended with {result.exit_code}:\n{result.output}")
    return target


def converted(directory: Path, model: str, *options: str) -> Path:
    """A tiny model, made and converted."""
    source = directory / model
    if not source.exists():
        make(model, source)
    return convert(source, directory / "-".join([model, *options]).replace("--", ""), *options)


def cache_scales() -> Tensors:
    """Scales of an FP8 cache of the tiny Llama, under Model-Optimizer's names: another one for each tensor."""
    name = "model.layers.{0}.self_attn.{1}_proj.{1}_scale"
    return {
        name.format(layer, part): np.asarray(2.0 ** -(2 * layer + place + 1), np.float32)
        for layer in range(LAYERS)
        for place, part in enumerate("kv")
    }


def with_fp8_cache(directory: Path) -> Path:
    """The tiny Llama in Model-Optimizer's FP8, with an FP8 cache of keys and values."""
    plain, config = llama()
    tensors: Tensors = {}
    for name, values in plain.items():
        if name.endswith("_proj.weight"):
            tensors[name] = (values.astype(np.float32) * 64).astype(E4M3)
            tensors[f"{name}_scale"] = np.asarray(1 / 64, np.float32)
        else:
            tensors[name] = values
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    return write_checkpoint(directory, tensors | cache_scales(), config | {"quantization_config": quantization})
