"""SGLang's config and loader code takes what `halfbyte convert` writes. Run by `make test-clients`.

Dense layers, and the attention of MoE models: its experts, and dense MXFP4 layers, need kernels that want a GPU.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from halfbyte.layouts.matching import sglang_modelopt
from tests.clients import fused_sources
from tests.clients.converted import converted
from tests.clients.matching_cases import disagreements
from tests.quantized import dequantized, edit, load

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
CLIENT = Path(__file__).parent / "sglang_client.py"
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

MODELOPT, COMPRESSED = ("--layout", "modelopt"), ("--layout", "compressed-tensors")
W4A4 = ("--activations", "unit")
GOOD: dict[str, tuple[str, tuple[str, ...], int, int]] = {
    "llama modelopt": ("llama", MODELOPT, 8, 8),
    "llama modelopt W4A4": ("llama", (*MODELOPT, *W4A4), 8, 8),
    "llama compressed-tensors": ("llama", COMPRESSED, 8, 8),
    "llama compressed-tensors W4A4": ("llama", (*COMPRESSED, *W4A4), 8, 8),
    "llama first layer kept": ("llama", (*MODELOPT, "--keep-first", "1"), 8, 4),
    "qwen3_moe modelopt": ("qwen3_moe", MODELOPT, 4, 4),
    "qwen3_moe compressed-tensors": ("qwen3_moe", COMPRESSED, 4, 4),
    "qwen3_moe experts only": ("qwen3_moe", (*MODELOPT, "--experts-only"), 4, 0),
}
"""Model, options, how many layers SGLang builds, and how many of them as quantized."""


def run(path: Path, output: Path) -> subprocess.CompletedProcess[str]:
    if not PYTHON.exists():
        raise AssertionError(f"{PYTHON} is not there: run `make test-clients`, which builds SGLang's environment")
    return subprocess.run([PYTHON, CLIENT, path, output], capture_output=True, text=True, timeout=300, check=False)


def worst(path: Path, output: Path) -> float:
    """Largest relative error of a layer against the decoded weights of its members."""
    wanted, found = dequantized(load(path)), np.load(output)
    errors = []
    for prefix in found.files:
        parent, _, leaf = prefix.rpartition(".")
        parts = [wanted[f"{parent}.{member}.weight"].astype(np.float32) for member in FUSED.get(leaf, (leaf,))]
        reference = np.concatenate(parts)
        errors.append(float(np.linalg.norm(found[prefix] - reference) / np.linalg.norm(reference)))
    return max(errors)


@pytest.mark.parametrize("name", GOOD)
def test_sglang_loads_the_decoded_weights(tmp_path: Path, name: str) -> None:
    model, options, layers, quantized = GOOD[name]
    path = converted(tmp_path, model, "--to", "nvfp4", *options)
    done = run(path, tmp_path / "weights.npz")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == f"{layers} layers, {quantized} quantized"
    assert worst(path, tmp_path / "weights.npz") < 1e-6


def test_a_scale_of_its_own_goes_wrong(tmp_path: Path) -> None:
    """SGLang takes the largest of a fused layer's scales, and says nothing."""
    path = converted(tmp_path, "llama", "--to", "nvfp4", *MODELOPT)
    name = "model.layers.1.self_attn.k_proj.weight_scale_2"
    edit(path, {name: load(path)[name].astype(np.float32) / np.float32(3)})
    assert run(path, tmp_path / "weights.npz").returncode == 0
    assert worst(path, tmp_path / "weights.npz") > 0.1


def test_an_exclude_list_that_swallows_goes_wrong(tmp_path: Path) -> None:
    path = converted(tmp_path, "llama", "--to", "nvfp4", *MODELOPT)
    (path / "hf_quant_config.json").unlink()
    edit(path, ignore=["lm_head", "model.layers.1*"])
    assert run(path, tmp_path / "weights.npz").returncode != 0


def test_config_files_that_disagree_are_seen(tmp_path: Path) -> None:
    path = converted(tmp_path, "llama", "--to", "nvfp4", *MODELOPT)
    edit(path, ignore=["lm_head", "model.layers.1.mlp"])
    done = run(path, tmp_path / "weights.npz")
    assert "different exclude lists" in done.stderr


def test_verify_matches_exclude_lists_as_sglang_does(tmp_path: Path) -> None:
    assert disagreements(PYTHON, "sglang", sglang_modelopt, tmp_path) == []


def test_the_table_of_fused_layers_is_that_of_sglang() -> None:
    (package,) = (ROOT / ".venv-sglang" / "lib").glob("python*/site-packages/sglang")
    models = package / "srt" / "models"
    assert len(fused_sources.fusions(models)) > 200
    assert fused_sources.disagreements(models, named=False) == []


def test_dense_mxfp4_has_no_scheme(tmp_path: Path) -> None:
    """The limit that convert notes."""
    path = converted(tmp_path, "llama", "--to", "mxfp4", *COMPRESSED)
    done = run(path, tmp_path / "weights.npz")
    assert done.returncode != 0
    assert "No compressed-tensors compatible scheme" in done.stderr
