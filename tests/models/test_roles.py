"""What names tell of modules where nothing else is known."""

from __future__ import annotations

import pytest

from halfbyte.models.model import model_of
from halfbyte.models.names import pattern_of
from halfbyte.models.roles import role_by_name

BY_NAME = [
    ("table", ("shared", "transformer.vte", "transformer.wte", "model.embed_tokens", "model.tok_embeddings", "wpe",
               "block.0.layer.0.SelfAttention.relative_attention_bias", "model.embed_in")),
    ("head", ("output", "model.output", "proj_out", "embed_out", "lm_head", "lm_head.dense", "lm_head.decoder",
              "decoder", "cls.predictions.decoder", "classifier", "score", "head", "output_layer", "qa_outputs",
              "unembed", "model.lm_head_audio", "cls.seq.dense", "lm_predictions.dense", "generator_lm_head.0",
              "classification_head.dense", "pre_classifier", "discriminator_predictions.dense",
              "codec_head.1", "transformer.output_layer")),
    ("tower", ("vpm.blocks.0.fc1", "model.vision_backbone.x", "sam_model.layers.0.lin1", "visual_tokenizer.head.0",
               "audio_encoder.layers.0.fc1", "speech_encoder.x", "token2wav.x", "model.visual.blocks.0.attn.qkv")),
    ("projector", ("mlp1.1", "model.connector.proj", "resampler.attn.out_proj", "vision_projector.0", "patch_merger.x",
                   "model.vision_language_adapter.w_in", "model.img_projection.0")),
    ("router", ("model.layers.0.mlp.gate", "model.layers.0.altup.modality_router", "model.layers.0.mlp.router",
                "model.layers.0.mlp.wg", "model.layers.0.mlp.shared_expert_gate", "model.layers.0.mlp.gate_network",
                "model.layers.0.mlp.router.layer")),
    ("table", ("embeddings.xpath_tag_sub_embeddings.0", "audio_embeddings.7")),
    ("head", ("lm_heads.0", "model.action_head", "codebook0_head", "audio_heads.3", "classifier.dense", "score.0")),
    ("router", ("model.layers.0.moe.modality_router.proj",)),
    ("tower", ("model.video_encoder.0.fc1", "image_tower_high.blocks.0.fc1", "acoustic_tokenizer.fc", "vocoder.0.fc")),
    ("projector", ("mm_proj.0", "audio_proj_2.fc", "abstractor.layers.0.fc", "vision_adaptor.0", "merger.mlp.0")),
    ("convolution", ("model.layers.0.mixer.conv1d", "model.layers.0.short_conv1d_q", "model.layers.0.conv.conv",
                     "stem.conv2d", "model.patch_embed")),
    ("norm", ("model.layers.0.input_layernorm", "model.norm", "model.layers.0.self_attn.q_norm", "h.0.ln_1", "h.ln_f",
              "model.norm_2")),
    ("linear", ("model.layers.0.attention.output", "model.layers.0.mlp.gate_proj", "decoder.layers.0.fc1",
                "model.layers.0.attn.proj_out", "model.embedding_model.layers.0.up_proj",
                "model.layers.0.mlp.router_proj", "model.layers.0.attn.head", "layers.0.decoder",
                "layers.0.attn.v_head", "model.layers.0.norm_proj.fc", "model.shared.up_proj")),
]  # fmt: skip


TOWERS = (
    "visual", "vision_tower", "vision_model", "vision_encoder", "vision", "vision_backbone", "visual_tokenizer",
    "visual_encoder", "image_encoder", "protein_encoder", "codec_model", "img_processor", "embed_tokens_extend",
    "vision_embed_tokens", "sam_model", "vit", "vpm", "vqmodel", "audio_tower", "audio_model", "audio_encoder", "audio",
    "audio_embed", "speech_encoder", "speech_tower", "sound_encoder", "apm", "tts", "talker", "token2wav", "code2wav",
    "embed_vision", "embed_audio", "qformer", "patch_embed", "patch_embedding", "patch_embeddings",
)  # fmt: skip
PROJECTORS = (
    "projector", "mm_projector", "projector_2", "aligner", "mlp1", "connector", "resampler", "patch_merger",
    "vision_language_adapter", "vision_proj", "img_projection", "image_projection", "visual_projection",
    "audio_projection", "vl_connector",
)  # fmt: skip


@pytest.mark.parametrize(
    ("role", "part"), [("tower", part) for part in TOWERS] + [("projector", x) for x in PROJECTORS]
)
def test_parts_of_other_models_are_known_by_a_whole_part_of_the_name(role: str, part: str) -> None:
    assert role_by_name(f"{part}.layers.0.fc1") == role_by_name(f"model.{part}.0.fc1") == role
    assert role_by_name(f"model.layers.0.x{part}x.fc1") == ("projector" if "projector" in part else "linear")


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


@pytest.mark.parametrize(
    ("architecture", "module", "reason"),
    [
        ("LlamaForCausalLM", "lm_head", "output head"),
        ("Qwen3MoeForCausalLM", "model.layers.0.mlp.gate", "router"),
        (
            "LlavaForConditionalGeneration",
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1",
            "vision or audio tower",
        ),
        ("LlavaForConditionalGeneration", "multi_modal_projector.linear_1", "projector"),
        (
            "MambaForCausalLM",
            "backbone.layers.0.mixer.dt_proj",
            "the model reads this weight without calling its module",
        ),
        (
            "ZambaForCausalLM",
            "model.layers.2.shared_transf.self_attn.q_proj",
            "one weight for several layers, which readers do not tie when it is packed",
        ),
    ],
)
def test_what_is_kept_until_it_is_included(architecture: str, module: str, reason: str) -> None:
    model = model_of({"architectures": [architecture]})
    assert model.kept(module) == reason
    assert model.never(module) is None


@pytest.mark.parametrize(
    ("architecture", "module", "reason"),
    [
        ("LlamaForCausalLM", "model.embed_tokens", "embedding"),
        ("MambaForCausalLM", "backbone.layers.0.mixer.conv1d", "convolution"),
        ("GPT2LMHeadModel", "transformer.h.0.attn.c_attn", "stored transposed (Conv1D), which no reader takes in FP4"),
        ("LlamaForCausalLM", "model.layers.0.input_layernorm", "norm"),
        ("JetMoeForCausalLM", "model.layers.0.mlp.input_linear", "no linear layer in this architecture"),
    ],
)
def test_what_is_never_quantized(architecture: str, module: str, reason: str) -> None:
    model = model_of({"architectures": [architecture]})
    assert model.kept(module) == model.never(module) == reason
