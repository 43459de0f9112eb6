"""verify: large tensors need little memory; damage gives a report or a clear error, never a crash."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from halfbyte.errors import CheckpointError
from halfbyte.verify import verify
from tests.quantized import load, write_quantized
from tests.tiny_models import make, read_safetensors, write_checkpoint, write_safetensors


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    """Compare tensors of 256 MB by value and by byte with less extra memory than one of them takes."""
    for name, shape in (("source", (2**15, 2**12)), ("target", (2**15, 2**12))):
        path = write_checkpoint(tmp_path / name, {}, {"model_type": "llama"}, shards=1)
        entries, size = {}, 2 * shape[0] * shape[1]
        for i, tensor in enumerate(("model.norm.weight", "model.layers.0.mlp.down_proj.weight")):
            stored = "F16" if (name, i) == ("target", 1) else "BF16"
            entries[tensor] = {"dtype": stored, "shape": shape, "data_offsets": [i * size, (i + 1) * size]}
        text = json.dumps(entries).encode()
        with (path / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + 2 * size)  # zeros, and no disk
    program = (
        "import resource, sys, pathlib; from halfbyte.verify import verify;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "report = verify(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]));"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before;"
        "print(report.clean, report.equal, len(report.errors), grown // 1024)"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "target"), str(tmp_path / "source")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=300)
    clean, equal, compared, grown = done.stdout.split()
    assert (clean, equal, compared) == ("True", "1", "1")
    assert int(grown) < 128


@pytest.mark.parametrize("model", ["llama", "gpt_oss_mxfp4", "deepseek_v3"])
def test_any_damage_is_a_report_or_a_checkpoint_error(tmp_path: Path, model: str) -> None:
    """Headers and configs with random values never raise another error."""
    source = make(model, tmp_path / "source", shards=1)
    good = source if model != "llama" else write_quantized(tmp_path / "q", activations=True)
    generator = np.random.default_rng(8)
    outcomes: set[bool | None] = set()
    for number in range(20):
        path = tmp_path / f"damaged{number}"
        shutil.copytree(good, path)
        for file in [path / "config.json", *path.glob("hf_quant*"), *path.glob("*.index.json")]:
            file.write_text(json.dumps(shaken(json.loads(file.read_text()), generator)))
        for file in path.glob("*.safetensors"):
            tensors = load(path)
            name = list(tensors)[generator.integers(len(tensors))]
            values = np.atleast_1d(tensors[name])
            choices = [
                values[..., :0],
                values.reshape(-1)[:1],
                values.astype(np.float32),
                values.reshape(1, *values.shape),
            ]
            write_safetensors(file, read_safetensors(file) | {name: choices[generator.integers(4)]})
            break
        try:
            outcomes.add(verify(path, source).clean)
        except CheckpointError:
            outcomes.add(None)
        shutil.rmtree(path)
    assert {None, False} <= outcomes | ({None} if model != "llama" else set())


def shaken(value: object, generator: np.random.Generator) -> object:
    """The same JSON, with about one in twenty values replaced by a value of another type."""
    if generator.random() < 0.05:
        return [None, 7, "re:(", ["*["], {"a": {}}, True][generator.integers(6)]
    if isinstance(value, dict):
        return {key: shaken(item, generator) for key, item in value.items()}
    if isinstance(value, list):
        return [shaken(item, generator) for item in value]
    return value
