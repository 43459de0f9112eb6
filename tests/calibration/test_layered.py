"""A model that is run layer by layer computes what transformers computes with all of it in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.calibration.evaluation import final_states
from halfbyte.calibration.layered import LayeredModel
from halfbyte.calibration.states import States
from halfbyte.calibration.weights import open_weights
from halfbyte.testing import assert_same_bits
from tests.calibration.scenes import MODELS, model, whole_model, windows


@pytest.mark.parametrize("name", MODELS)
def test_layers_one_by_one_are_the_model(tmp_path: Path, name: str) -> None:
    path, tokens = model(tmp_path, name), torch.from_numpy(windows().tokens)
    whole, layered = whole_model(path), LayeredModel(open_weights(path))
    states = final_states(layered, tokens)
    for number, row in enumerate(tokens):
        with torch.no_grad():
            wanted = whole(row[None]).logits
        torch.testing.assert_close(layered.logits(row[None], states[number]), wanted, rtol=1e-5, atol=1e-5)


def test_one_layer_has_memory_at_a_time(tmp_path: Path) -> None:
    layered = LayeredModel(open_weights(model(tmp_path)))
    with layered.layer(0) as layer:
        assert layer.weight("model.layers.0.mlp.up_proj").device.type == "cpu"
    assert {p.device.type for layer in layered.layers for p in layer.parameters()} == {"meta"}


def test_replaced_weights_are_used(tmp_path: Path) -> None:
    layered = LayeredModel(open_weights(model(tmp_path, "qwen3_moe")))
    name = "model.layers.1.mlp.experts.2.up_proj"
    with layered.layer(1, {name: torch.zeros(64, 128)}) as layer:
        assert not layer.weight(name).any()
        assert layer.weight("model.layers.1.mlp.experts.2.gate_proj").any()
        assert layer.weight("model.layers.1.mlp.experts.1.up_proj").any()


@pytest.mark.parametrize("name", MODELS)
def test_a_weight_in_its_parameter_is_the_one_on_disk(tmp_path: Path, name: str) -> None:
    weights = open_weights(model(tmp_path, name))
    layered = LayeredModel(weights)
    with layered.layer(0) as layer:
        for module in layer.parts:
            assert_same_bits(layer.weight(module).contiguous().numpy(), weights.matrix(module))


def test_states_beyond_the_limit_are_in_a_file() -> None:
    rows = list(torch.split(torch.arange(3 * 4 * 8.0).reshape(3, 4, 8), [2, 1]))
    kept, spilled = States(torch.clone, rows), States(torch.clone, rows, limit=0)
    for states in (kept, spilled):
        states.replace(lambda x: x + 1)
    for one, other, row in zip(kept, spilled, rows, strict=True):
        assert_same_bits(one.numpy(), (row + 1).numpy())
        assert_same_bits(other.numpy(), one.numpy())


def test_a_batch_is_its_windows_one_by_one(tmp_path: Path) -> None:
    layered = LayeredModel(open_weights(model(tmp_path, "qwen3_moe")))
    tokens = torch.from_numpy(windows(3).tokens)
    alone = [layered.embed(row[None]) for row in tokens]
    together = layered.embed(tokens)
    with layered.layer(0) as layer:
        torch.testing.assert_close(layer(together), torch.cat([layer(one) for one in alone]), rtol=1e-5, atol=1e-5)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    path = model(tmp_path)
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (path / "model.safetensors.index.json").unlink()
    config = json.loads((path / "config.json").read_text())
    del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    found = LayeredModel(open_weights(path)).model
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert_same_bits(found.lm_head.weight.numpy(), tensors["model.embed_tokens.weight"].float().numpy())
