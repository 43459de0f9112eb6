"""Where config.json speaks of the language model."""

from __future__ import annotations

import pytest

from halfbyte.models import model_of
from halfbyte.models.config import TEXT_PARTS, setting, text_part, text_parts


@pytest.mark.parametrize("part", TEXT_PARTS)
def test_the_part_for_the_language_model(part: str) -> None:
    inner = {"model_type": "qwen2", "num_hidden_layers": 7, "tie_word_embeddings": True, "hidden_size": 64}
    config = {"model_type": "brand_new", "architectures": ["BrandNew"], "hidden_size": 32, part: inner}
    assert text_part(config) == inner
    assert (setting(config, "num_hidden_layers"), setting(config, "hidden_size")) == (7, 32)
    model = model_of(config)
    assert (model.layers, model.tied_head, model.hidden) == (7, True, 32)
    assert model.architecture is not None
    assert model.architecture.name == "Qwen2ForCausalLM"
    assert model.role("language_model.model.layers.0.mlp.up_proj") == "linear"
    assert model.role("language_model.model.embed_tokens") == "table"


def test_what_is_no_part() -> None:
    assert text_part({}) == text_part({"text_config": None, "llm_config": "qwen2"}) == {}
    assert setting({"text_config": []}, "hidden_size") is None
    assert list(text_parts({"text_config": {"a": 1}, "language_config": {"b": 2}})) == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("part", TEXT_PARTS)
def test_partners_are_those_of_its_model_type(part: str) -> None:
    model = model_of({"model_type": "brand_new", part: {"model_type": "qwen"}})
    assert model.fused.partners("transformer.h.0.mlp.w1") == ("transformer.h.0.mlp.w2",)
