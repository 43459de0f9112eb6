"""A model from its config, and the table of families."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.models import Model, model_of
from halfbyte.models.experts import Stacking, expert_module, is_stack, is_transposed, projections
from halfbyte.models.families import FAMILIES, find_family


def test_no_model_type_is_in_two_families() -> None:
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(types) == len(set(types))


def test_a_model_from_its_config() -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "tie_word_embeddings": True, "hidden_size": 64}
    model = model_of(config)
    assert (model.family, model.layers, model.tied_head) == (find_family("qwen3_moe"), 4, True)
    assert (model.hidden, model.expert_inner, model.name, model.known) == (64, None, "qwen3_moe", True)
    inner = {"moe_intermediate_size": 32, "intermediate_size": 256}
    assert model_of(config | inner).stack_sizes("experts.gate_up_proj") == (64, 64)
    assert model_of(config | inner).stack_sizes("experts.down_proj") == (64, 32)


def test_the_config_of_a_model_that_wraps_another() -> None:
    model = model_of({"model_type": "unheard_of", "text_config": {"model_type": "llama4_text", "num_hidden_layers": 2}})
    assert (model.family.name, model.layers, model.stacking) == ("Llama-4", 2, "transposed")


@pytest.mark.parametrize("layers", [0, -1, True, "4", None])
def test_a_number_of_layers_that_is_none(layers: object) -> None:
    assert model_of({"num_hidden_layers": layers}) == Model()


def test_kept_by_the_model() -> None:
    model = Model(find_family("deepseek_v3"), layers=4, tied_head=True)
    assert model.kept("model.layers.0.self_attn.o_proj") == "attention of this family"
    assert model.kept("model.layers.4.mlp.up_proj") == "multi token prediction: beyond num_hidden_layers"
    assert model.kept("model.layers.3.mlp.up_proj") is None
    assert model.never("model.embed_tokens") == "embedding"
    assert model.tied("lm_head") == "output head tied to the embedding"
    assert Model().tied("lm_head") is None


@pytest.mark.parametrize("stacking", ["halves", "transposed", "interleaved"])
def test_projections_of_a_stack(stacking: Stacking) -> None:
    """Every row belongs to exactly one projection; gate comes first, or takes every other row."""
    rows = projections("mlp.experts.gate_up_proj", 6, stacking)
    numbers = np.arange(6)
    assert sorted(np.concatenate([numbers[part] for part in rows.values()])) == list(range(6))
    assert list(numbers[rows["gate_proj"]]) == ([0, 2, 4] if stacking == "interleaved" else [0, 1, 2])
    assert projections("mlp.experts.down_proj", 6, stacking) == {"down_proj": slice(0, 6, 1)}
    assert is_transposed(stacking) is (stacking != "halves")


def test_names_of_stacks() -> None:
    assert is_stack("model.layers.0.mlp.experts.gate_up_proj")
    assert not is_stack("model.layers.0.mlp.gate_up_proj")
    assert expert_module("l.0.experts.gate_up_proj", 3, "up_proj") == "l.0.experts.3.up_proj"
