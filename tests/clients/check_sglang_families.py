"""SGLang builds and fills models of many architectures from what `halfbyte convert` writes. Run by `make test-clients`.

Towers, projectors and heads under SGLang's own names, layers that it fuses, and layers that are kept: each must hold
what it holds of the same model with its weights decoded, to the last bit, and nothing may be left unfilled.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from halfbyte.models.limits import limits
from tests.clients.converted import convert
from tests.clients.served_models import MODELS
from tests.quantized import write_dequantized
from tests.tiny_models import make

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
CLIENT = Path(__file__).parent / "sglang_loader.py"

MODELOPT, COMPRESSED = ("--layout", "modelopt"), ("--layout", "compressed-tensors")
W4A4 = ("--activations", "unit")
KEPT = ("--keep-first", "1")

LAYERS: dict[str, tuple[str, tuple[str, ...], int, int]] = {
    "pixtral": ("pixtral", (), 18, 8),
    "qwen2_vl": ("qwen2_vl", (), 20, 8),
    "qwen2_5_vl": ("qwen2_5_vl", (), 20, 8),
    "gemma3": ("gemma3", (), 17, 8),
    "mistral3": ("mistral3", (), 18, 8),
    "internvl_chat": ("internvl_chat", (), 18, 8),
    "lfm2 W4A4": ("lfm2", W4A4, 12, 10),
    "olmo2": ("olmo2", (), 10, 8),
    "phi3 W4A4": ("phi3", W4A4, 10, 8),
    "exaone": ("exaone", (), 10, 8),
    "llama": ("llama", (), 10, 8),
    "llama first layer kept": ("llama", KEPT, 10, 4),
    "llama W4A4, first layer kept": ("llama", (*W4A4, *KEPT), 10, 4),
    "gemma3 first layer kept": ("gemma3", KEPT, 17, 4),
    "olmo2 attention kept": ("olmo2", ("--keep", "self_attn"), 10, 4),
    "exaone mlp kept": ("exaone", ("--keep", "mlp"), 10, 4),
}
"""Model, options, how many layers SGLang builds, towers and tables included, and how many of them as quantized."""

CASES = {f"{name} {layout[1]}": (name, layout) for name in LAYERS for layout in (MODELOPT, COMPRESSED)}
FUSED = {f"{model} modelopt": (model, MODELOPT) for model in ("lfm2", "phi3")}
WITHOUT_CLASS = {
    f"{model} {layout[1]}": (model, layout)
    for model in ("falcon", "gpt_neox", "internvl", "mamba")
    for layout in (MODELOPT, COMPRESSED)
}
LIMITED = FUSED | WITHOUT_CLASS
"""What the table of limits says that SGLang cannot load."""


@dataclass(frozen=True)
class Answer:
    """What SGLang made of a checkpoint: numbers, or why there are none."""

    found: dict[str, Any] = field(default_factory=dict)
    log: str = ""


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    if not PYTHON.exists():
        raise AssertionError(f"{PYTHON} is not there: run `make test-clients`, which builds SGLang's environment")
    base = tmp_path_factory.mktemp("sglang-loader")
    jobs = []
    wanted = {name: (*LAYERS[case][:2], layout) for name, (case, layout) in CASES.items()}
    wanted |= {f"limit: {name}": (model, (), layout) for name, (model, layout) in LIMITED.items()}
    for number, (model, options, layout) in enumerate(wanted.values()):
        source = base / model
        if not source.exists():
            MODELS[model](source) if model in MODELS else make(model, source)
        path = convert(source, base / f"{number}-converted", *layout, *options)
        decoded = write_dequantized(base / f"{number}-decoded", path)
        for code in path.glob("*.py"):
            shutil.copy(code, decoded)
        jobs.append({"checkpoint": str(path), "decoded": str(decoded), "output": str(base / f"{number}.json")})
    (base / "jobs.json").write_text(json.dumps(jobs))
    subprocess.run([PYTHON, CLIENT, base / "jobs.json"], check=True, capture_output=True, timeout=3000)
    result = {}
    for name, job in zip(wanted, jobs, strict=True):
        output = Path(job["output"])
        found = json.loads(output.read_text()) if output.exists() else {}
        result[name] = Answer(found, output.with_suffix(".log").read_text())
    return result


@pytest.mark.parametrize("name", CASES)
def test_every_layer_holds_the_decoded_weights(answers: dict[str, Answer], name: str) -> None:
    found = answers[name].found
    assert found, answers[name].log[-2000:]
    assert (found["layers"], found["quantized"]) == LAYERS[CASES[name][0]][2:], found["names"]
    assert found["unfilled"] == []
    assert found["error"] == 0, found["worst"]


@pytest.mark.parametrize("name", FUSED)
def test_scales_of_layers_that_are_stored_fused_are_left_as_they_lie_in_memory(
    answers: dict[str, Answer], name: str
) -> None:
    found = answers[f"limit: {name}"].found
    assert found["unfilled"]
    assert all(left.endswith(".weight_scale_2") for left in found["unfilled"])
    quantized = [left.removesuffix(".weight_scale_2") for left in found["unfilled"]]
    assert "SGLang" in [limit.reader for limit in limits(FUSED[name][0], "modelopt", "nvfp4", quantized)]


@pytest.mark.parametrize("name", WITHOUT_CLASS)
def test_models_that_sglang_has_no_class_for(answers: dict[str, Answer], name: str) -> None:
    """What it falls back to stops, or builds the head as quantized."""
    model, layout = WITHOUT_CLASS[name]
    found = answers[f"limit: {name}"].found
    assert not found or any("lm_head" in left for left in found["unfilled"])
    assert "SGLang" in [limit.reader for limit in limits(model, layout[1], "nvfp4", ["layers.0.mlp.up_proj"])]
