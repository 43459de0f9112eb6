"""vLLM loads what `halfbyte convert` writes, and goes wrong where it is made wrong. Run by `make test-clients`.

All checkpoints, good and bad, and the unquantized models to compare them with are made first and go through one vLLM
process. A good one must give the very log-probabilities of its decoded weights, to the last bit.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from halfbyte.layouts.matching import vllm_modelopt
from halfbyte.testing import assert_same_bits
from tests.clients.converted import converted
from tests.clients.matching_cases import disagreements
from tests.quantized import edit, load, write_dequantized
from tests.tiny_models import E4M3

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
CLIENT = Path(__file__).parent / "vllm_client.py"

MODELOPT, COMPRESSED = ("--layout", "modelopt"), ("--layout", "compressed-tensors")
W4A4 = ("--activations", "unit")
GOOD: dict[str, tuple[str, tuple[str, ...]]] = {
    "llama modelopt": ("llama", ("--to", "nvfp4", *MODELOPT)),
    "llama modelopt W4A4": ("llama", ("--to", "nvfp4", *MODELOPT, *W4A4)),
    "llama compressed-tensors": ("llama", ("--to", "nvfp4", *COMPRESSED)),
    "llama compressed-tensors W4A4": ("llama", ("--to", "nvfp4", *COMPRESSED, *W4A4)),
    "llama MXFP4": ("llama", ("--to", "mxfp4", *COMPRESSED)),
    "qwen3 modelopt": ("qwen3", ("--to", "nvfp4", *MODELOPT)),
    "qwen3_moe modelopt": ("qwen3_moe", ("--to", "nvfp4", *MODELOPT)),
    "qwen3_moe modelopt W4A4": ("qwen3_moe", ("--to", "nvfp4", *MODELOPT, *W4A4)),
    "qwen3_moe experts only": ("qwen3_moe", ("--to", "nvfp4", *MODELOPT, "--experts-only")),
    "qwen3_moe first layer kept": ("qwen3_moe", ("--to", "nvfp4", *MODELOPT, "--keep-first", "1")),
    "qwen3_moe compressed-tensors": ("qwen3_moe", ("--to", "nvfp4", *COMPRESSED)),
    "qwen3_moe MXFP4": ("qwen3_moe", ("--to", "mxfp4", *COMPRESSED)),
    "gpt_oss MXFP4": ("gpt_oss", ("--to", "mxfp4", "--layout", "gpt-oss")),
}
"""Model and options of `halfbyte convert`."""

ACTIVATIONS = [name for name in GOOD if name.startswith("llama") and "W4A4" in name]
"""Loaded a second time with quantized activations; the experts' products leave them as they are."""

ATTENTION, EXPERT = "model.layers.1.self_attn", "model.layers.1.mlp.experts.2"


def scale_of_its_own(path: Path, module: str) -> None:
    """The same values by another tensor scale, four times as large, and block scales a quarter: right if read alone."""
    stored = load(path)
    scales = stored[f"{module}.weight_scale"].astype(np.float32)
    quarter = (scales / 4).astype(E4M3)
    assert_same_bits(quarter.astype(np.float32) * np.float32(4), scales)
    multiplier, divisor = f"{module}.weight_scale_2", f"{module}.weight_global_scale"
    if multiplier in stored:
        changed = {multiplier: stored[multiplier].astype(np.float32) * np.float32(4)}
    else:
        changed = {divisor: stored[divisor].astype(np.float32) / np.float32(4)}
    edit(path, {**changed, f"{module}.weight_scale": quarter})


def swapped_nibbles(path: Path) -> None:
    name = f"{ATTENTION}.o_proj.weight"
    codes = load(path)[name].astype(np.uint8)
    edit(path, {name: (codes << 4) | (codes >> 4)})


def reciprocal(path: Path) -> None:
    name = f"{ATTENTION}.o_proj.weight_scale_2"
    edit(path, {name: 1 / load(path)[name].astype(np.float32)})


def swapped_gate_and_up(path: Path) -> None:
    stored = load(path)
    parts = ("weight", "weight_scale")  # the tensor scale is one for both
    pairs = [(f"{EXPERT}.gate_proj.{part}", f"{EXPERT}.up_proj.{part}") for part in parts]
    edit(path, {gate: stored[up] for gate, up in pairs} | {up: stored[gate] for gate, up in pairs})


def without_routers(path: Path) -> None:
    (path / "hf_quant_config.json").unlink()
    edit(path, ignore=["lm_head"])


BAD: dict[str, tuple[str, Callable[[Path], None]]] = {
    "k_proj with a scale of its own": (
        "llama modelopt",
        lambda path: scale_of_its_own(path, f"{ATTENTION}.k_proj"),
    ),
    "k_proj with a divisor of its own": (
        "llama compressed-tensors",
        lambda path: scale_of_its_own(path, f"{ATTENTION}.k_proj"),
    ),
    "up_proj of an expert with a scale of its own": (
        "qwen3_moe modelopt",
        lambda path: scale_of_its_own(path, f"{EXPERT}.up_proj"),
    ),
    "missing input_scale": (
        "llama modelopt W4A4",
        lambda path: edit(path, drop=(f"{ATTENTION}.o_proj.input_scale",)),
    ),
    "missing input_global_scale": (
        "llama compressed-tensors W4A4",
        lambda path: edit(path, drop=(f"{ATTENTION}.o_proj.input_global_scale",)),
    ),
    "swapped nibbles": ("llama modelopt", swapped_nibbles),
    "reciprocal scale": ("llama modelopt", reciprocal),
    "gate and up swapped": ("qwen3_moe modelopt", swapped_gate_and_up),
    "exclude list without the routers": ("qwen3_moe modelopt", without_routers),
}
"""What is done to which good checkpoint."""


@dataclass(frozen=True)
class Answer:
    """What vLLM said to a checkpoint: numbers, or why there are none."""

    values: npt.NDArray[np.float32] | None
    log: str


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Every checkpoint through one vLLM process: by name, "name/decoded" for the unquantized twin, and the bad ones."""
    if not PYTHON.exists():
        raise AssertionError(f"{PYTHON} is not there: run `make test-clients`, which builds vLLM's environment")
    base = tmp_path_factory.mktemp("vllm")
    jobs: dict[str, tuple[Path, bool]] = {}
    for name, (model, options) in GOOD.items():
        path = converted(base / name.replace(" ", "-"), model, *options)
        jobs[name] = (path, False)
        if "W4A4" not in name:
            jobs[f"{name}/decoded"] = (write_dequantized(base / f"{name}-decoded".replace(" ", "-"), path), False)
        elif name in ACTIVATIONS:
            jobs[f"{name}/activations"] = (path, True)
    for name, (good, spoil) in BAD.items():
        model, options = GOOD[good]
        path = converted(base / name.replace(" ", "-"), model, *options)
        spoil(path)
        jobs[name] = (path, good in ACTIVATIONS)
    entries = [
        {"checkpoint": str(path), "output": str(base / f"{number}.npy"), "activations": activations}
        for number, (path, activations) in enumerate(jobs.values())
    ]
    (base / "jobs.json").write_text(json.dumps(entries))
    subprocess.run([PYTHON, CLIENT, base / "jobs.json"], check=True, capture_output=True, timeout=3000)
    found = {}
    for number, name in enumerate(jobs):
        output = base / f"{number}.npy"
        values = np.load(output) if output.exists() else None
        found[name] = Answer(values, output.with_suffix(".log").read_text())
    return found


def decoded(name: str) -> str:
    """The unquantized twin. Input scales do not change the weights: with and without, it is the same."""
    return f"{name.removesuffix(' W4A4')}/decoded"


def distance(answers: dict[str, Answer], name: str, reference: str) -> float:
    """Relative error of the log-probabilities, less their mean, which a softmax takes away anyway."""
    a, b = (answers[one].values for one in (name, reference))
    assert a is not None, answers[name].log[-2000:]
    assert b is not None, answers[reference].log[-2000:]
    a, b = (values - values.mean(axis=1, keepdims=True) for values in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("name", GOOD)
def test_vllm_computes_with_the_decoded_weights(answers: dict[str, Answer], name: str) -> None:
    assert distance(answers, name, decoded(name)) == 0
    warned = [line for line in answers[name].log.splitlines() if "WARNING" in line and "weight" in line]
    assert not any("must match" in line or "different" in line for line in warned), warned


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_quantized_where_asked(answers: dict[str, Answer], name: str) -> None:
    assert 0.02 < distance(answers, f"{name}/activations", decoded(name)) < 0.5


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_goes_wrong(answers: dict[str, Answer], name: str) -> None:
    """Not loaded, not finite, or far from what the good checkpoint gives: each of these must be seen by this check."""
    good = BAD[name][0]
    values = answers[name].values
    if values is not None and np.isfinite(values).all():
        assert distance(answers, name, f"{good}/activations" if good in ACTIVATIONS else good) > 0.01


def test_verify_matches_exclude_lists_as_vllm_does(tmp_path: Path) -> None:
    assert disagreements(PYTHON, "vllm", vllm_modelopt, tmp_path) == []
