"""inspect: layers and experts of equal form share a line, sizes add up, and damaged files are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from halfbyte.cli import app
from halfbyte.cli.inspect import size_text
from halfbyte.errors import CheckpointError
from halfbyte.verify import summarize
from tests.quantized import write_quantized
from tests.tiny_models import MODELS, make, write_safetensors


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


@pytest.mark.parametrize("model", MODELS)
def test_counts_and_bytes_add_up(tmp_path: Path, model: str) -> None:
    tensors = MODELS[model](0)[0]
    summary = summarize(make(model, tmp_path))
    size = sum(array.nbytes for array in tensors.values())
    assert (summary.files, summary.tensors, summary.bytes) == (3, len(tensors), size)
    assert sum(line.count for line in summary.lines) == len(tensors)
    assert sum(line.bytes for line in summary.lines) == sum(summary.dtypes.values()) == size
    assert len(summary.lines) < len(tensors)


def test_numbers_become_ranges(tmp_path: Path) -> None:
    lines = {line.name: line for line in summarize(make("qwen3_moe", tmp_path)).lines}
    line = lines["model.layers.{0-1}.mlp.experts.{0-3}.up_proj.weight"]
    assert (line.count, line.dtype, line.shape, line.bytes) == (8, "BF16", (64, 128), 8 * 64 * 128 * 2)
    assert lines["lm_head.weight"].count == 1


def test_shapes_that_differ_stay_apart(tmp_path: Path) -> None:
    """Tensors of a dense and an expert layer with the same name do not share a line."""
    names = [line.name for line in summarize(make("deepseek_v3", tmp_path)).lines]
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.{1-2}.mlp.experts.{0-3}.gate_proj.weight" in names


def test_one_file_and_filters(tmp_path: Path) -> None:
    path = make("llama", tmp_path, shards=1)
    one = summarize(path / "model.safetensors")
    assert (one.files, one.model_type, one.quantization) == (1, "", "no quantized weights")
    chosen = summarize(path, every=True, match="self_attn")
    assert chosen.tensors == len(chosen.lines) == 8
    assert {line.count for line in chosen.lines} == {1}


def test_files_without_an_index(tmp_path: Path) -> None:
    path = make("llama", tmp_path)
    whole = summarize(path)
    (path / "model.safetensors.index.json").unlink()
    loose = summarize(path)
    assert (loose.files, loose.tensors, loose.bytes, loose.lines) == (3, whole.tensors, whole.bytes, whole.lines)
    shutil.copy(path / "model-00001-of-00003.safetensors", path / "model-copy.safetensors")
    assert summarize(path).tensors == whole.tensors + 7


def test_the_command(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q", "qwen3_moe", activations=True)
    result = run("inspect", path, "--json", tmp_path / "summary.json")
    assert result.exit_code == 0, result.output
    assert "model.layers.{0-1}.mlp.experts.{0-3}.up_proj.weight_scale" in result.output
    assert "32 weights nvfp4 (modelopt); config: modelopt, activations FP4 too, 3 modules excluded" in result.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["model_type"] == "qwen3_moe"
    assert sum(line["bytes"] for line in summary["lines"]) == summary["bytes"]


def test_what_is_no_checkpoint_is_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    result = run("inspect", tmp_path)
    assert result.exit_code == 2
    assert "halfbyte inspect:" in result.output
    assert run("inspect", tmp_path / "nowhere").exit_code == 2
    with pytest.raises(CheckpointError):
        summarize(tmp_path)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (2 * 10**15, "2000.0 TB")]
)
def test_sizes_are_readable(size: int, text: str) -> None:
    assert size_text(size) == text


def test_names_with_brackets_are_printed_as_they_are(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a[/b].weight": np.ones((2, 2), np.float32)})
    result = run("inspect", tmp_path)
    assert result.exit_code == 0, result.output
    assert "a[/b].weight" in result.output


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_report_that_cannot_be_written(tmp_path: Path, command: str) -> None:
    path = make("llama", tmp_path / "m")
    result = run(command, path, "--json", tmp_path / "nowhere" / "report.json")
    assert result.exit_code == 2
    assert "report.json cannot be written: " in result.output


def test_two_files_without_an_index(tmp_path: Path) -> None:
    path = make("llama", tmp_path, shards=2)
    whole = summarize(path)
    (path / "model.safetensors.index.json").unlink()
    loose = summarize(path)
    assert (loose.files, loose.tensors, loose.bytes, loose.lines) == (2, whole.tensors, whole.bytes, whole.lines)
