"""`verify --load vllm`: the check finds what is missing, left over or misshapen, and nothing else. `make test-clients`.

All checkpoints go through one vLLM process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients.converted import converted
from tests.quantized import edit, load
from tests.tiny_models import make

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
CLIENT = Path(__file__).parent / "vllm_load_client.py"

MODELOPT, COMPRESSED = ("--layout", "modelopt"), ("--layout", "compressed-tensors")
W4A4 = ("--activations", "unit")
CLEAN: dict[str, Any] = {"missing": [], "unexpected": []}
GOOD: dict[str, tuple[str, tuple[str, ...]]] = {
    "llama": ("llama", ()),
    "llama modelopt": ("llama", ("--to", "nvfp4", *MODELOPT)),
    "llama modelopt W4A4": ("llama", ("--to", "nvfp4", *MODELOPT, *W4A4)),
    "llama compressed-tensors": ("llama", ("--to", "nvfp4", *COMPRESSED)),
    "llama MXFP4": ("llama", ("--to", "mxfp4", *COMPRESSED)),
    "qwen3_moe modelopt": ("qwen3_moe", ("--to", "nvfp4", *MODELOPT)),
    "qwen3_moe compressed-tensors": ("qwen3_moe", ("--to", "nvfp4", *COMPRESSED)),
    "qwen3_moe MXFP4": ("qwen3_moe", ("--to", "mxfp4", *COMPRESSED)),
    "gpt_oss MXFP4": ("gpt_oss", ("--to", "mxfp4", "--layout", "gpt-oss")),
}
ATTENTION, EXPERT = "model.layers.1.self_attn", "model.layers.1.mlp.experts"


def damage(source: Path, target: Path, name: str) -> None:
    """A copy with one thing wrong."""
    shutil.copytree(source, target)
    if name == "one member of a fused layer is missing":
        edit(target, drop=(f"{ATTENTION}.k_proj.weight_scale",))
    elif name == "an input scale is missing":
        edit(target, drop=(f"{ATTENTION}.o_proj.input_scale",))
    elif name == "a part of one expert is missing":
        edit(target, drop=(f"{EXPERT}.2.up_proj.weight_scale_2",))
    elif name == "a shape does not fit":
        edit(target, {f"{ATTENTION}.o_proj.weight_scale": load(target)[f"{ATTENTION}.o_proj.weight_scale"][:5]})
    elif name == "a tensor has no place":
        edit(target, {"model.layers.1.self_attn.rotary_emb.cos_cached": np.zeros((4, 4), np.float32)})
    elif name == "an exclude list names a quantized layer":
        (target / "hf_quant_config.json").unlink()
        edit(target, ignore=["lm_head", f"{ATTENTION}.o_proj"])


BAD = {
    "one member of a fused layer is missing": "llama modelopt",
    "an input scale is missing": "llama modelopt W4A4",
    "a part of one expert is missing": "qwen3_moe modelopt",
    "a shape does not fit": "llama modelopt",
    "a tensor has no place": "llama modelopt",
    "an exclude list names a quantized layer": "llama modelopt",
}
"""What is wrong, and with which of the good ones."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not PYTHON.exists():
        raise AssertionError(f"{PYTHON} is not there: run `make test-clients`, which builds vLLM's environment")
    folder = tmp_path_factory.mktemp("vllm")
    paths: dict[str, Path] = {}
    for name, (model, options) in GOOD.items():
        paths[name] = converted(folder, model, *options) if options else make(model, folder / model)
    for number, (name, good) in enumerate(BAD.items()):
        paths[name] = folder / f"bad-{number}"
        damage(paths[good], paths[name], name)
    output = folder / "answers.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    command = [PYTHON, CLIENT, output, *paths.values()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(output.read_text())
    return {name: found[str(path)] for name, path in paths.items()}


@pytest.mark.parametrize("name", GOOD)
def test_what_vllm_reads_is_clean(answers: dict[str, Any], name: str) -> None:
    assert answers[name] == CLEAN


def test_one_member_of_a_fused_layer(answers: dict[str, Any]) -> None:
    (name,) = answers["one member of a fused layer is missing"]["missing"]
    assert name == f"{ATTENTION}.qkv_proj.weight_scale (1536 of 2048 numbers are there)"


def test_an_input_scale(answers: dict[str, Any]) -> None:
    assert answers["an input scale is missing"] == {**CLEAN, "missing": [f"{ATTENTION}.o_proj.input_scale"]}


def test_a_part_of_one_expert(answers: dict[str, Any]) -> None:
    (name,) = answers["a part of one expert is missing"]["missing"]
    assert name.startswith(EXPERT)
    assert name.endswith("w13_weight_scale_2 (7 of 8 numbers are there)")


def test_a_shape(answers: dict[str, Any]) -> None:
    assert answers["a shape does not fit"]["error"].startswith(f"at {ATTENTION}.o_proj.weight_scale: ")


def test_a_tensor_without_a_place(answers: dict[str, Any]) -> None:
    found = answers["a tensor has no place"]
    assert found["unexpected"] == ["model.layers.1.self_attn.rotary_emb.cos_cached"]
    assert found["missing"] == []


def test_an_exclude_list(answers: dict[str, Any]) -> None:
    """vLLM builds a plain layer, whose weight has another shape."""
    assert f"{ATTENTION}.o_proj.weight" in answers["an exclude list names a quantized layer"]["error"]
