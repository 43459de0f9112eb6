"""What names tell of modules where nothing else is known."""

from __future__ import annotations

import pytest

from halfbyte.models.model import model_of
from halfbyte.models.roles import pattern_of, role_by_name

BY_NAME = [
    ("table", ("shared", "transformer.vte", "transformer.wte", "model.embed_tokens", "model.tok_embeddings")),
    ("head", ("output", "model.output", "proj_out", "embed_out", "lm_head", "lm_head.dense", "lm_head.decoder",
              "decoder", "cls.predictions.decoder", "classifier", "score", "head",
              "classification_head.dense", "pre_classifier", "discriminator_predictions.dense")),
    ("tower", ("vpm.blocks.0.fc1", "model.vision_backbone.x", "sam_model.layers.0.lin1", "visual_tokenizer.head.0",
               "audio_encoder.layers.0.fc1", "speech_encoder.x", "token2wav.x", "model.visual.blocks.0.attn.qkv")),
    ("projector", ("mlp1.1", "model.connector.proj", "resampler.attn.out_proj", "vision_projector.0", "patch_merger.x",
                   "model.vision_language_adapter.w_in", "model.img_projection.0")),
    ("router", ("model.layers.0.mlp.gate", "model.layers.0.altup.modality_router", "model.layers.0.mlp.router")),
    ("linear", ("model.layers.0.attention.output", "model.layers.0.mlp.gate_proj", "decoder.layers.0.fc1",
                "model.layers.0.attn.proj_out", "model.embedding_model.layers.0.up_proj")),
]  # fmt: skip


@pytest.mark.parametrize(("role", "module"), [(role, module) for role, modules in BY_NAME for module in modules])
def test_role_by_name(role: str, module: str) -> None:
    assert role_by_name(module) == role
    assert model_of({"model_type": "unheard_of"}).role(module) == role


def test_numbers_in_patterns_are_whole_parts() -> None:
    assert pattern_of("h.10.attn.w1.0") == "h.#.attn.w1.#"
    assert pattern_of("12") == "#"


def test_included_by_name_a_guess_gives_way_and_a_table_does_not() -> None:
    model = model_of({"model_type": "unheard_of"})
    assert model.never("transformer.wte") == "embedding"
    assert model.never("model.layers.0.self_attn.q_norm") is None
    assert model_of({"architectures": ["GPT2LMHeadModel"]}).never("transformer.h.0.mlp.c_fc")
