"""What the rules of `shrink` miss, by model type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
HALF_SECTIONS = SECTIONS | {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
HYBRID = ["linear_attention", "full_attention"]
SPARSE = ["dense", "sparse"]

TOP_TWO = {"num_experts_per_tok": 2, "num_experts_per_token": 2, "n_group": 1, "num_expert_group": 1}
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
WIDE = {"attention_hidden_size": 128, "attention_head_dim": 64}
NESTED = {f"text_config.{name}": value for name, value in INDEXER.items()}

ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 200}},
    "emu3": {"vocabulary_map": {"<image>": 200, "<|extra_200|>": 201}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "ReformerModelWithLMHead": {"is_decoder": True},
}
"""Class or model type → what its config needs where the defaults are not enough to make one."""

FIXES: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": TOP_TWO,
    "blip-2": {"image_token_index": 250},
    "codegen": {"n_head": 4, "rotary_dim": 8},
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_ocr2": {"text_config.mlp_layer_types": SPARSE, "text_config.num_experts_per_tok": 2},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "diffusion_gemma": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 96,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_vl_moe": {"text_config.rope_parameters": SECTIONS | {"mrope_section": [5, 5, 6]}},
    "esm": {"vocab_size": 256, "pad_token_id": 1, "mask_token_id": 2},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 16},
    "glm4v": {"text_config.rope_parameters": SECTIONS},
    "glm46v": {"text_config.rope_parameters": SECTIONS},
    "glm4v_moe": {"text_config.rope_parameters": HALF_SECTIONS},
    "glm_ocr": {"text_config.rope_parameters": SECTIONS},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[0, 0], [1, 1]]},
    "granitemoehybrid": {"layer_types": HYBRID},
    "hunyuan_vl": {"text_config.rope_parameters": SECTIONS | {"mrope_section": [4, 4, 4, 4]}},
    "instructblip": {"image_token_index": 250},
    "instructblipvideo": {"video_token_index": 250},
    "kimi_linear": TOP_TWO,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "n_groups": 1},
    "mobilebert": {"embedding_size": 128, "hidden_size": 128, "intra_bottleneck_size": 64, "true_hidden_size": 64},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "moonshine_streaming": {"num_key_value_heads": 2},
    "nemotron": {"num_key_value_heads": 2},
    "paddleocr_vl": {"text_config.rope_parameters": SECTIONS},
    "qwen2_vl": {"text_config.rope_parameters": SECTIONS},
    "qwen2_5_vl": {"text_config.rope_parameters": SECTIONS},
    "qwen2_5_omni": {
        "thinker_config.text_config.rope_parameters": SECTIONS,
        "thinker_config.vision_start_token_id": 199,
    },
    "qwen2_5_omni_thinker": {"text_config.rope_parameters": SECTIONS, "vision_start_token_id": 199},
    "qwen3_omni_moe": {
        "talker_config.text_config.shared_expert_intermediate_size": 96,
        "talker_config.spatial_merge_size": 2,
    },
    "qwen4_exp": NESTED,
    "qwen4_exp_text": INDEXER,
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (4, 4), "max_position_embeddings": 16},
    "step3p7": {"text_config.sliding_window": 32},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2} | WIDE,
    "zamba2": WIDE | {"n_mamba_heads": 4},
}
"""Dotted name of a setting → its value, after the rules."""


def repair(model_type: str, data: dict[str, Any]) -> dict[str, Any]:
    """A config's data with the fixes of its model type."""
    for path, value in FIXES.get(model_type, {}).items():
        *way, name = path.split(".")
        part = data
        for step in way:
            part = part[step]
        part[name] = value
    return data
