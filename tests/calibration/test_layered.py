"""A model that is run layer by layer computes what transformers computes with all of it in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
            wanted = whole(row[None]).logits[0]
        torch.testing.assert_close(layered.logits(row, states[number]), wanted, rtol=1e-5, atol=1e-5)


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
    rows = [torch.full((1, 4, 8), float(i)) for i in range(3)]
    kept, spilled = States(rows, 3), States(rows, 3, limit=0)
    for states in (kept, spilled):
        states.replace(lambda x: x + 1)
    for i in range(3):
        assert_same_bits(spilled[i].numpy(), kept[i].numpy())
        assert_same_bits(kept[i].numpy(), (rows[i] + 1).numpy())
