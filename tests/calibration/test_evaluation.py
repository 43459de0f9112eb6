"""Eval: the figures of a plain loop over transformers' own model; activations rounded as a server rounds them."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte.calibration import evaluation, states
from halfbyte.calibration.evaluation import evaluate, interval, rounding_of
from halfbyte.calibration.weights import open_weights
from halfbyte.checkpoint import Options, make_plan, run
from halfbyte.testing import assert_same_bits
from tests.calibration.scenes import logits, model, whole_model, windows
from tests.tiny_models import read_safetensors


def converted(tmp_path: Path, name: str = "llama", **options: object) -> tuple[Path, Path]:
    source = model(tmp_path, name)
    run(make_plan(source, Options(**options)), tmp_path / "q")  # type: ignore[arg-type]
    return tmp_path / "q", source


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_figures_are_those_of_a_plain_loop(tmp_path: Path, name: str) -> None:
    path, source = converted(tmp_path, name)
    run(make_plan(path, Options("bf16")), tmp_path / "decoded")
    text = windows(6)
    found = evaluate(path, source, text)
    before, after = logits(whole_model(source), text), logits(whole_model(tmp_path / "decoded"), text)
    real, other = (torch.log_softmax(part[:, :-1].double(), dim=-1) for part in (before, after))
    wanted = torch.from_numpy(text.tokens)[:, 1:, None]
    # BF16 holds a decoded weight with an error of up to 2^-9 of it; eval decodes exactly
    assert found.source_perplexity.value == pytest.approx(float((-real.gather(-1, wanted)).mean().exp()), rel=1e-5)
    assert found.perplexity.value == pytest.approx(float((-other.gather(-1, wanted)).mean().exp()), rel=5e-3)
    kl = float((real.exp() * (real - other)).sum(dim=-1).mean())
    assert found.kl.value == pytest.approx(kl, rel=0.05)
    same = float((real.argmax(-1) == other.argmax(-1)).double().mean())
    assert found.top1.value == pytest.approx(same, abs=0.03)
    assert (found.windows, found.tokens, found.activations) == (6, 6 * 39, "not rounded")
    assert found.kl.low < found.kl.value < found.kl.high


def test_a_model_equals_itself(tmp_path: Path) -> None:
    source = model(tmp_path)
    found = evaluate(source, source, windows())
    assert found.kl.value == 0
    assert found.top1.value == 1
    assert found.perplexity == found.source_perplexity


@pytest.mark.parametrize(("format", "layout"), [("nvfp4", "modelopt"), ("mxfp4", "compressed-tensors")])
def test_rounded_activations_cost_more(tmp_path: Path, format: str, layout: str) -> None:
    path, source = converted(tmp_path, to=format, layout=layout)
    weights, both = evaluate(path, source, windows()), evaluate(path, source, windows(), w4a4=True)
    assert both.kl.value > weights.kl.value
    assert both.activations.startswith("NVFP4, input scales" if format == "nvfp4" else "MXFP4")


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_each_window_has_its_own_amax_on_every_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """A GPU takes many windows at once. This machine has none, so the CPU takes as many as a GPU would."""
    path, source = converted(tmp_path, layout=layout)
    plain = evaluate(path, source, windows(6), w4a4=True)
    asked = []

    def as_on_a_card(tokens: torch.Tensor, device: torch.device, apart: bool = False) -> list[torch.Tensor]:
        asked.append(apart)
        return states.batches_of(tokens, torch.device("cuda"), apart)

    monkeypatch.setattr(evaluation, "batches_of", as_on_a_card)
    assert evaluate(path, source, windows(6), w4a4=True) == plain
    assert asked == [True, True]
    assert evaluate(path, source, windows(6)).windows == 6
    assert asked[2:] == [False, False], "weights alone do not ask for it, and neither do input scales"


def test_one_window_has_no_interval(tmp_path: Path) -> None:
    path, source = converted(tmp_path)
    found = evaluate(path, source, windows(1)).as_json()
    assert found["interval"] is None
    assert found["kl"] == {"value": found["kl"]["value"], "low": None, "high": None}
    assert evaluate(path, source, windows(2)).as_json()["kl"]["low"] is not None


def test_input_scales_of_the_checkpoint_are_used(tmp_path: Path) -> None:
    amaxes = {"model.layers.0.mlp.down_proj": 3.5}
    (tmp_path / "amax.json").write_text(json.dumps(amaxes))
    modules = [name for name in open_weights(model(tmp_path)).linears if ".layers." in name]
    (tmp_path / "amax.json").write_text(json.dumps(dict.fromkeys(modules, 3.5)))
    path, _ = converted(tmp_path, activations=str(tmp_path / "amax.json"))
    rounding, words = rounding_of(open_weights(path))
    assert words == "NVFP4, input scales of the checkpoint for 14 of 14 layers"
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((7, 256)).astype(np.float32))
    found = rounding("model.layers.0.mlp.down_proj", x, False)
    assert found is not None
    wanted = hb.dequantize(hb.quantize(x.numpy(), "nvfp4", "vllm", global_amax=3.5))
    assert_same_bits(found.numpy(), np.asarray(wanted))
    assert rounding("lm_head", x, False) is None


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_rounding_is_what_a_server_computes(tmp_path: Path, layout: str) -> None:
    """vLLM's emulation, written out: the encode factor is the divisor on disk, or one over the multiplier."""
    modules = [name for name in open_weights(model(tmp_path)).linears if ".layers." in name]
    (tmp_path / "amax.json").write_text(json.dumps(dict.fromkeys(modules, 4.7)))
    path, _ = converted(tmp_path, activations=str(tmp_path / "amax.json"), layout=layout)
    rounding, _ = rounding_of(open_weights(path))
    module = "model.layers.1.mlp.down_proj"
    stored = np.concatenate(
        [
            found.reshape(-1)
            for file in path.glob("*.safetensors")
            for name, found in read_safetensors(file).items()
            if name.startswith(f"{module}.input_")
        ]
    ).astype(np.float32)
    factor = np.float32(stored[0] if layout == "compressed-tensors" else 1 / stored[0])
    x = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    blocks = x.reshape(64, 16, 16)
    amax = np.abs(blocks).max(axis=2, keepdims=True)
    scale = (factor * (amax * np.float32(1 / 6))).clip(0, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    steps = (blocks * (1 / (scale * (1 / factor)))).clip(-6, 6)
    wanted = steps.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale / factor
    found = rounding(module, torch.from_numpy(x), False)
    assert found is not None
    np.testing.assert_allclose(found.numpy(), wanted.reshape(64, 256), rtol=1e-6, atol=0)


def test_intervals_are_the_same_again() -> None:
    values = np.random.default_rng(3).standard_normal(50)
    found = interval(values)
    assert found == interval(values)
    assert found.low < found.value < found.high
    assert found.high - found.low == pytest.approx(4 * values.std() / 50**0.5, rel=0.15)
