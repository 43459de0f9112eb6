"""What `inspect` says of files: lines, sizes, and what the tensors and the config are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfbyte.errors import CheckpointError
from halfbyte.verify.summary import Line, summarize
from tests.quantized import write_quantized
from tests.samples import f32
from tests.tiny_models import BF16, Tensors, write_checkpoint, write_safetensors

TENSORS: Tensors = {
    "l.0.e.3.w": np.zeros((2, 4), BF16),
    "l.0.e.5.w": np.zeros((2, 4), BF16),
    "l.2.e.4.w": np.zeros((2, 4), BF16),
    "l.7.n.w": f32(1),
    "l.1.x.w": np.zeros((4, 2), BF16),
    "l.3.x.w": np.zeros((2, 4), BF16),
    "12.b": f32(1, 2),
    "13.b": f32(1, 2),
    "q.4": f32(1, 2, 3),
}


def test_numbers_become_ranges(tmp_path: Path) -> None:
    """One line for each pattern, dtype and shape, sorted by name; numbers at either end of a name are left alone."""
    path = write_checkpoint(tmp_path, TENSORS, {"model_type": "m"}, shards=1)
    found = summarize(path)
    assert found.lines == (
        Line("12.b", 1, "F32", (2,), 8),
        Line("13.b", 1, "F32", (2,), 8),
        Line("l.1.x.w", 1, "BF16", (4, 2), 16),
        Line("l.3.x.w", 1, "BF16", (2, 4), 16),
        Line("l.7.n.w", 1, "F32", (1,), 4),
        Line("l.{0-2}.e.{3-5}.w", 3, "BF16", (2, 4), 48),
        Line("q.4", 1, "F32", (3,), 12),
    )
    assert (found.files, found.tensors, found.bytes, found.model_type) == (1, 9, 112, "m")
    assert list(found.dtypes.items()) == [("BF16", 80), ("F32", 32)]
    assert found.quantization == "no quantized weights"
    every = summarize(path, every=True)
    assert [line.name for line in every.lines] == list(TENSORS)
    assert every.lines[0] == Line("l.0.e.3.w", 1, "BF16", (2, 4), 16)
    part = summarize(path, match=".x.")
    assert (part.tensors, part.bytes, [line.name for line in part.lines]) == (2, 32, ["l.1.x.w", "l.3.x.w"])
    assert part.as_json() == {
        "path": str(path),
        "files": 1,
        "tensors": 2,
        "bytes": 32,
        "model_type": "m",
        "quantization": "no quantized weights",
        "dtypes": {"BF16": 32},
        "lines": [
            {"name": "l.1.x.w", "count": 1, "dtype": "BF16", "shape": [4, 2], "bytes": 16},
            {"name": "l.3.x.w", "count": 1, "dtype": "BF16", "shape": [2, 4], "bytes": 16},
        ],
    }


def test_loose_files_are_taken_together(tmp_path: Path) -> None:
    for name, size in (("b", 1), ("a", 2)):
        write_safetensors(
            tmp_path / f"{name}.safetensors", {"same": np.zeros(size, np.float32), f"only.{name}": f32(1)}
        )
    found = summarize(tmp_path)
    assert [(line.name, line.shape) for line in found.lines] == [
        ("b.safetensors: same", (1,)),
        ("only.a", (1,)),
        ("only.b", (1,)),
        ("same", (2,)),
    ]
    assert (found.files, found.model_type, found.quantization) == (2, "", "no quantized weights")
    assert summarize(tmp_path / "a.safetensors").tensors == 2
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())
    assert summarize(tmp_path).files == 1  # that one is the model
    (tmp_path / "model.safetensors").rename(tmp_path / "c.safetensors")
    assert summarize(tmp_path).files == 3
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"same": "a.safetensors"}}))
    with pytest.raises(CheckpointError):
        summarize(tmp_path)


def test_one_file_in_a_directory(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"a": f32(1)})
    assert (summarize(tmp_path).files, summarize(tmp_path).tensors) == (1, 1)


@pytest.mark.parametrize(("activations", "said"), [(False, "weights only"), (True, "activations FP4 too")])
def test_what_is_stored_and_what_the_config_says(tmp_path: Path, activations: bool, said: str) -> None:
    path = write_quantized(tmp_path / "q", activations=activations)
    assert summarize(path).quantization == f"14 weights nvfp4 (modelopt); config: modelopt, {said}, 1 module excluded"
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    (path / "hf_quant_config.json").unlink()
    assert summarize(path).quantization == "14 weights nvfp4 (modelopt)"
