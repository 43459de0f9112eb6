"""Configs to build architectures from: the default one of the class, what the default lacks for some of them, and
settings of published checkpoints that bring modules which the default does not have.
"""

from __future__ import annotations

from typing import Any

ROTARY = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
SPARSE_INDEX = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
}

LACKS: dict[str, dict[str, Any]] = {
    "AyaVisionForConditionalGeneration": {
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_attention_heads": 16}
    },
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "ChameleonForConditionalGeneration": {"vocabulary_map": {"<image>": 8711}},
    "CohereCompassForCausalLM": {"rope_parameters": ROTARY},
    "CohereCompassForConditionalGeneration": {
        "text_config": {"model_type": "cohere_compass_text", "rope_parameters": ROTARY}
    },
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 8}},
    "DeepseekOcr2ForConditionalGeneration": {"text_config": {"mlp_layer_types": ["dense"] + ["sparse"] * 63}},
    "DiffusionGemmaForBlockDiffusion": {
        "text_config": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 512}
    },
    "Dots1ForCausalLM": {"n_routed_experts": 8, "n_shared_experts": 1},
    "Emu3ForConditionalGeneration": {"vocabulary_map": {"<image>": 8711}},
    "EsmForMaskedLM": {"vocab_size": 33},
    "Gemma4AssistantForCausalLM": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "Granite4VisionForConditionalGeneration": {
        "deepstack_layer_map": [],
        "spatial_target_layers": [],
        "downsample_rate": "4/8",
    },
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"] * 16},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 128},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 128},
    "HunYuanVLForConditionalGeneration": {"text_config": {"model_type": "hunyuan_vl_text", "head_dim": 128}},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 16},
    "MinistralForCausalLM": {"head_dim": 128},
    "MoonshineStreamingForConditionalGeneration": {"num_key_value_heads": 8},
    "NemotronForCausalLM": {"num_key_value_heads": 8},
    "Qwen4ExpForCausalLM": SPARSE_INDEX,
    "Qwen4ExpForConditionalGeneration": {"text_config": SPARSE_INDEX},
    "ReformerModelWithLMHead": {"is_decoder": True},
}
"""Class → settings without which the default config builds no model."""

GATED = {"feed_forward_proj": "gated-gelu"}
DENSE_FIRST = {"mlp_only_layers": [0]}

ALSO: dict[str, tuple[dict[str, Any], ...]] = {
    "DebertaForMaskedLM": ({"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},),
    "DebertaV2ForMaskedLM": ({"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},),
    "DeepseekV2ForCausalLM": ({"first_k_dense_replace": 1, "q_lora_rank": None},),
    "DeepseekV3ForCausalLM": ({"q_lora_rank": None},),
    "LongT5ForConditionalGeneration": (GATED, {"encoder_attention_type": "transient-global"}),
    "Qwen2MoeForCausalLM": (DENSE_FIRST,),
    "Qwen3MoeForCausalLM": (DENSE_FIRST,),
    "T5ForConditionalGeneration": (GATED,),
    "UdopForConditionalGeneration": (GATED,),
}
"""Class → settings of published checkpoints; each makes a model with modules that the default one lacks."""


def configs(kind: Any) -> list[Any]:
    """The configs that a class is built from; the default one first."""
    return [_config(kind, settings) for settings in ({}, *ALSO.get(kind.__name__, ()))]


def _config(kind: Any, settings: dict[str, Any]) -> Any:
    config = kind.config_class(**LACKS.get(kind.__name__, {}), **settings)
    if kind.__name__ == "Qwen3OmniMoeForConditionalGeneration":
        config.talker_config.text_config.shared_expert_intermediate_size = 512
        config.talker_config.spatial_merge_size = 2
    return config
