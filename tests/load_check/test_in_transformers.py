"""transformers' own loader on tensors without bytes: what it misses, what it leaves over, what does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conformance.peers.spec import quiet
from halfbyte.load_check import Mismatch, check_load
from halfbyte.load_check.headers import TORCH_NAMES, meta_tensors
from halfbyte.load_check.in_transformers import load, replaced
from tests.clients.converted import converted
from tests.quantized import edit
from tests.tiny_models import make

CT = ("--layout", "compressed-tensors")
CLEAN: dict[str, Any] = {"missing": [], "unexpected": [], "mismatched": []}
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def offline_and_quiet() -> Iterator[None]:
    with quiet():  # transformers warns when it is imported
        import transformers
    transformers.logging.set_verbosity_error()
    with quiet():
        yield


def copy(models: Path, target: Path, name: str, *options: str) -> Path:
    """A converted tiny model to damage, converted once for all tests of a process."""
    stored = models / "-".join([name, *options]).replace("--", "")
    path = stored if stored.exists() else converted(models, name, *options)
    return Path(shutil.copytree(path, target / "model"))


def asked(path: Path) -> dict[str, Any]:
    return load(str(path), "known")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", ("--to", "nvfp4", *CT)),
        ("llama", ("--to", "nvfp4", *CT, "--activations", "unit")),
        ("llama", ("--to", "mxfp4", *CT)),
        ("qwen3_moe", ("--to", "mxfp4", *CT)),
        ("gpt_oss", ("--to", "mxfp4", "--layout", "gpt-oss")),
    ],
)
def test_what_transformers_reads_is_clean(models: Path, tmp_path: Path, name: str, options: tuple[str, ...]) -> None:
    assert asked(copy(models, tmp_path, name, *options)) == CLEAN


def test_the_whole_way(models: Path, tmp_path: Path) -> None:
    """Through a process of its own."""
    path = copy(models, tmp_path, "llama", "--to", "nvfp4", *CT)
    edit(path, {f"{UP}.weight_scale": np.zeros((3, 8), np.float32)}, drop=("model.norm.weight",))
    report = check_load(path, "transformers")
    assert report.missing == ("model.norm.weight",)
    assert report.mismatched == (Mismatch(f"{UP}.weight_scale", (3, 8), (256, 8)),)
    assert report.error is None


def test_an_unquantized_model_is_clean(tmp_path: Path) -> None:
    assert asked(make("qwen3_moe", tmp_path / "source")) == CLEAN


def test_no_weight_is_read(models: Path, tmp_path: Path) -> None:
    """The files end after their headers: any read of data would fail."""
    path = copy(models, tmp_path, "llama", "--to", "nvfp4", *CT)
    tensors = meta_tensors(path)
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
    assert tensors[f"{UP}.weight_scale"].dtype == torch.float8_e4m3fn
    for file in path.glob("*.safetensors"):
        size, length = file.stat().st_size, 8 + int.from_bytes(file.read_bytes()[:8], "little")
        with file.open("r+b") as stream:
            stream.truncate(length)
            stream.truncate(size)  # a hole as long as the data
    assert asked(path) == CLEAN


def test_a_tensor_that_is_missing(models: Path, tmp_path: Path) -> None:
    path = copy(models, tmp_path, "llama", "--to", "nvfp4", *CT)
    edit(path, drop=(f"{UP}.weight_global_scale", "model.norm.weight"))
    assert asked(path) == {**CLEAN, "missing": [f"{UP}.weight_global_scale", "model.norm.weight"]}


def test_a_tensor_that_nothing_takes(models: Path, tmp_path: Path) -> None:
    path = copy(models, tmp_path, "llama", "--to", "nvfp4", *CT)
    edit(path, {"model.layers.0.extra.weight": np.zeros(3, np.float32)})
    assert asked(path) == {**CLEAN, "unexpected": ["model.layers.0.extra.weight"]}


def test_an_exclude_list_that_names_a_quantized_module(models: Path, tmp_path: Path) -> None:
    path = copy(models, tmp_path, "llama", "--to", "nvfp4", *CT)
    edit(path, ignore=["lm_head", UP])
    found = asked(path)
    assert found["missing"] == [f"{UP}.weight"]
    assert found["unexpected"] == [f"{UP}.{part}" for part in ("weight_global_scale", "weight_packed", "weight_scale")]


@pytest.mark.parametrize("quantized", [True, False])
def test_a_shape_that_does_not_fit(models: Path, tmp_path: Path, quantized: bool) -> None:
    """transformers compares shapes of unquantized models only."""
    if quantized:
        path = copy(models, tmp_path, "llama", "--to", "nvfp4", *CT)
        name, wanted = f"{UP}.weight_scale", [256, 8]
    else:
        path = make("llama", tmp_path / "source")
        name, wanted = f"{UP}.weight", [256, 128]
    edit(path, {name: np.zeros((3, 8), np.float32)})
    found = asked(path)
    assert [[kind, list(stored), list(right)] for kind, stored, right in found["mismatched"]] == [
        [name, [3, 8], wanted]
    ]
    assert found["missing"] == []


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    path = make("llama", tmp_path / "source")
    edit(path, drop=("lm_head.weight",))
    assert asked(path)["missing"] == ["lm_head.weight"]
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert asked(path) == CLEAN


def test_nvfp4_experts_leave_their_tensor_scales_over(models: Path, tmp_path: Path) -> None:
    found = asked(copy(models, tmp_path, "qwen3_moe", "--to", "nvfp4", *CT))
    assert found["missing"] == found["mismatched"] == []
    assert len(found["unexpected"]) == 2 * 4 * 3
    assert all(name.endswith("weight_global_scale") for name in found["unexpected"])


def test_experts_that_cannot_be_merged(models: Path, tmp_path: Path) -> None:
    path = copy(models, tmp_path, "qwen3_moe", "--to", "mxfp4", *CT)
    experts = "model.layers.1.mlp.experts"
    edit(path, drop=tuple(f"{experts}.{number}.up_proj.weight_scale" for number in range(4)))
    found = asked(path)
    assert found["error"].startswith(f"{experts}.gate_up_proj cannot be made from its tensors: KeyError: ")
    assert "up_proj.weight_scale" in found["error"]
    assert f"{experts}.gate_up_proj" in found["missing"]


def test_what_is_replaced_comes_back() -> None:
    with replaced(Path, "cwd", None):
        assert Path.cwd is None
    assert Path.cwd().is_absolute()
    with pytest.raises(KeyError), replaced(Path, "not_there", None):
        pass


def test_every_dtype_has_a_name_in_torch() -> None:
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in TORCH_NAMES.values())
