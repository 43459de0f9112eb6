"""A model from its config, and the table of families."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.models import Model, model_of
from halfbyte.models.architectures import find_architecture
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


def test_a_value_of_the_text_part_counts_where_the_config_has_none() -> None:
    text = {"model_type": "llama4_text", "num_hidden_layers": 2, "hidden_size": 32, "tie_word_embeddings": True}
    own = {"model_type": "qwen3_moe", "num_hidden_layers": 7, "hidden_size": 64, "tie_word_embeddings": False}
    model = model_of(own | {"text_config": text})
    assert (model.family.name, model.layers, model.hidden, model.tied_head) == ("Qwen3-MoE", 7, 64, False)
    inner = model_of({"text_config": text})
    assert (inner.family.name, inner.layers, inner.hidden, inner.tied_head) == ("Llama-4", 2, 32, True)
    assert model_of({"text_config": "llama4"}).family.name == "other"


def test_the_name_of_a_model() -> None:
    assert model_of({"architectures": ["NewLM", "Other"], "model_type": "new"}).name == "NewLM"
    nothing: tuple[object, ...] = ([], "NewLM", None)
    for named in nothing:
        assert model_of({"architectures": named, "model_type": "new"}).name == "new"
    assert model_of({}).name == ""


def test_sizes_of_stacks_are_unknown_where_the_config_has_none() -> None:
    assert Model(hidden=64).stack_sizes("experts.gate_up_proj") == (None, 64)
    assert Model(hidden=64).stack_sizes("experts.down_proj") == (64, None)
    assert model_of({"intermediate_size": 96}).expert_inner == 96
    assert Model().projections("experts.gate_up_proj", 4) == {"gate_proj": slice(0, 2, 1), "up_proj": slice(2, 4, 1)}


def test_layers_of_encoders_and_decoders_are_counted_apart() -> None:
    """num_hidden_layers counts one of the two lists: what lies beyond it predicts no further tokens."""
    config = {"num_hidden_layers": 1}
    both = model_of(config | {"architectures": ["BartForConditionalGeneration"]})
    assert both.kept("model.decoder.layers.3.fc1") is None
    one = model_of(config | {"architectures": ["LlamaForCausalLM"]})
    assert one.kept("model.layers.0.mlp.up_proj") is None
    assert one.kept("model.layers.1.mlp.up_proj") == "multi token prediction: beyond num_hidden_layers"
    assert model_of({"architectures": ["LlamaForCausalLM"]}).kept("model.layers.1.mlp.up_proj") is None


def test_what_is_tied_is_known_by_either_name() -> None:
    tied = {"tie_word_embeddings": True}
    llava = model_of(tied | {"architectures": ["LlavaForConditionalGeneration"]})
    neox = model_of(tied | {"architectures": ["GPTNeoXForCausalLM"]})
    bart = model_of(tied | {"architectures": ["BartForConditionalGeneration"]})
    head = "output head tied to the embedding"
    assert llava.tied("language_model.lm_head") == llava.tied("lm_head") == neox.tied("embed_out") == head
    assert bart.tied("model.encoder.embed_tokens") == "tied to another weight"
    assert bart.tied("model.shared") is None
    assert model_of(tied).tied("text_model.lm_head") == head
    assert model_of(tied).tied("proj_out") is None


def test_partners_that_an_architecture_does_not_have() -> None:
    model = model_of({"architectures": ["LlamaForCausalLM"]})
    at = "model.layers.0.mlp"
    assert model.lacks(f"{at}.w3", f"{at}.up_proj")
    assert not model.lacks(f"{at}.gate_proj", f"{at}.up_proj")
    assert not model.lacks(f"{at}.w3", f"{at}.w1")  # nothing is known of w1
    assert not Model().lacks(f"{at}.w3", f"{at}.up_proj")


def test_a_description_goes_before_the_table() -> None:
    row = find_architecture({"architectures": ["BertForMaskedLM"]})
    model = model_of({"architectures": ["LlamaForCausalLM"]}, row)
    assert model.heads == ("cls.predictions.transform.dense", "cls.predictions.decoder")
