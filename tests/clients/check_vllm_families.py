"""vLLM builds and fills models of many architectures from what `halfbyte convert` writes. Run by `make test-clients`.

Towers, projectors and heads under vLLM's own names, and layers that it fuses: each layer must hold what it holds of the
same model with its weights decoded, to the last bit. Nothing is computed; `check_vllm` does that for some of them.
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
from tests.clients.converted import cache_scales, convert, with_fp8_cache
from tests.clients.fused_sources import disagreements, fusions
from tests.clients.served_models import MODELS
from tests.quantized import edit, load, write_dequantized

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
CLIENT = Path(__file__).parent / "vllm_loader.py"

MODELOPT, COMPRESSED = ("--layout", "modelopt"), ("--layout", "compressed-tensors")
LAYERS = {
    "llava": (20, 8),
    "pixtral": (20, 8),
    "qwen2_vl": (20, 8),
    "qwen2_5_vl": (20, 8),
    "gemma3": (18, 8),
    "mistral3": (20, 8),
    "internvl": (14, 8),
    "gpt_neox": (10, 8),
    "falcon": (10, 8),
    "mamba2": (8, 4),
    "lfm2": (11, 8),
    "olmo2": (10, 8),
    "phi3": (10, 8),
    "qwen3_5": (12, 6),
    "exaone": (10, 8),
}
"""Model → how many layers vLLM builds, towers included, and how many of them as quantized."""

CASES = {f"{model} {layout[1]}": (model, layout) for model in LAYERS for layout in (MODELOPT, COMPRESSED)}
CACHED = {f"FP8 cache {layout[1]}": ("FP8 cache", layout) for layout in (MODELOPT, COMPRESSED)}
LIMITED = {f"mamba {layout[1]}": ("mamba", layout) for layout in (MODELOPT, COMPRESSED)}
"""What the table of limits says that vLLM cannot load."""


@dataclass(frozen=True)
class Answer:
    """What vLLM made of a checkpoint: numbers, or why there are none."""

    found: dict[str, Any] = field(default_factory=dict)
    log: str = ""


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    if not PYTHON.exists():
        raise AssertionError(f"{PYTHON} is not there: run `make test-clients`, which builds vLLM's environment")
    base = tmp_path_factory.mktemp("vllm-loader")
    jobs = []
    names = CASES | CACHED | LIMITED
    for number, (model, layout) in enumerate(names.values()):
        source = base / model
        if not source.exists():
            MODELS.get(model, with_fp8_cache)(source)
        path = convert(source, base / f"{number}-converted", *layout)
        decoded = write_dequantized(base / f"{number}-decoded", path)
        for code in path.glob("*.py"):
            shutil.copy(code, decoded)
        if model == "FP8 cache":
            edit(decoded, drop=tuple(name for name in load(decoded) if name.endswith((".k_scale", ".v_scale"))))
        jobs.append({"checkpoint": str(path), "decoded": str(decoded), "output": str(base / f"{number}.json")})
    (base / "jobs.json").write_text(json.dumps(jobs))
    subprocess.run([PYTHON, CLIENT, base / "jobs.json"], check=True, capture_output=True, timeout=3000)
    result = {}
    for name, job in zip(names, jobs, strict=True):
        output = Path(job["output"])
        found = json.loads(output.read_text()) if output.exists() else {}
        result[name] = Answer(found, output.with_suffix(".log").read_text())
    return result


@pytest.mark.parametrize("name", CASES)
def test_every_layer_holds_the_decoded_weights(answers: dict[str, Answer], name: str) -> None:
    found = answers[name].found
    assert found, answers[name].log[-2000:]
    assert (found["layers"], found["quantized"]) == LAYERS[CASES[name][0]], found["names"]
    assert found["error"] == 0, found["worst"]


@pytest.mark.parametrize("name", CACHED)
def test_scales_of_an_fp8_cache_arrive(answers: dict[str, Answer], name: str) -> None:
    found = answers[name].found
    assert found, answers[name].log[-2000:]
    assert found["error"] == 0
    wanted = {
        f"{tensor.rsplit('.', 2)[0]}.attn.{tensor.rpartition('.')[2]}": float(value)
        for tensor, value in cache_scales().items()
    }
    assert found["cache"] == wanted


@pytest.mark.parametrize("name", LIMITED)
def test_what_the_table_of_limits_says_is_so(answers: dict[str, Answer], name: str) -> None:
    model, layout = LIMITED[name]
    assert not answers[name].found
    assert "vLLM" in [limit.reader for limit in limits(model, layout[1], "nvfp4", ["backbone.layers.0.mixer.in_proj"])]


@pytest.mark.parametrize("folder", ["model_executor/models", "models"])
def test_the_table_of_fused_layers_is_that_of_vllm(folder: str) -> None:
    (package,) = (ROOT / ".venv-vllm" / "lib").glob("python*/site-packages/vllm")
    assert len(fusions(package / folder)) > 40
    assert disagreements(package / folder, named=True) == []
