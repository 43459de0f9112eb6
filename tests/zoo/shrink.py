"""The default config of a class, made tiny by rule.

Every whole number of a config is looked up by its name in RULES, in the sub-configs too. Lists with one entry per layer
are cut to the layers that stay, of which there are enough to see each kind. `fixes.py` has what the rules miss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

HIDDEN, INNER, EXPERT_INNER, HEADS, HEAD, RANK = 64, 128, 96, 2, 32, 32
"""Multiples of 32, so that both formats divide them; experts are not square, so that a transposed one is noticed."""
VOCABULARY, WORDS = 256, 160
"""Words of the inputs are below WORDS; special tokens are above."""
POSITIONS, EXPERTS, LAYERS, MOST_LAYERS = 128, 4, 2, 8


def at_most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


def always(small: int) -> Callable[[int], int]:
    return lambda value: small


RULES = [
    (re.compile(pattern), small)
    for small, pattern in [
        (at_most(VOCABULARY), r".*vocab.*size.*|.*codebook_size|num_embeddings|num_embeds|.*hash_byte_group_vocab"),
        (at_most(1), r"n_groups?|topk_group|num_expert_group|mamba_n_?groups|num_query_groups"),
        (at_most(2), r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k"),
        (at_most(EXPERTS), r"n_routed_experts|(num|moe_num)(_local)?_experts|zero_expert_num"),
        (at_most(1), r"(n|num|moe_num)_shared_experts"),
        (at_most(1), r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|num_kv_shared_layers"),
        (at_most(HEADS), r".*(num_key_value_heads|kv_n_heads|num_kv_heads|kv_heads)"),
        (always(HEADS), r"linear_num_key_heads"),
        (always(2 * HEADS), r"linear_num_value_heads|mamba_(n|num)_heads"),
        (always(HEADS), r".*(attention|attn|cross|num|encoder|n|resampler)_heads?|num_attention_heads.*"),
        (always(INNER), r"mamba_d_ssm"),
        (always(32), r"base_channels"),
        (at_most(HIDDEN), r"upsample_groups"),
        (at_most(4), r"num_query_tokens|latent_query_num|num_filters"),
        (always(HIDDEN), r"upsample_initial_channel|hidden_dim"),
        (always(HEAD // 2), r"qk_(rope|nope)_head_dim|(partial_)?rotary_dim"),
        (always(HEAD), r"mamba_(d_head|head_?dim)"),
        (always(HEAD), r".*(head_dim|d_kv|d_head|dim_head|kv_channels|attention_head_size)"),
        (at_most(RANK), r"(q|kv|o)_lora_rank|.*_rank|.*lowrank"),
        (at_most(EXPERT_INNER), r"moe_intermediate_size|expert_ffn_hidden_size"),
        (at_most(EXPERT_INNER), r"(moe_)?shared_expert_intermediate_size|share_expert_dim"),
        (always(INNER), r"(.*_)?(intermediate_size.*|ffn_dim|d_ff|dff|dim_ff|ffn_hidden_size)"),
        (always(INNER), r"(.*_)?(mlp_dim|d_inner|feed_forward_size)"),
        (always(HIDDEN), r".*(hidden_size.*|d_model|n_embd|n_embed|embedding_size|embed_dim|emb_dim)"),
        (always(HIDDEN), r".*(projection_dim|_proj_dim|output_dim|input_dim|_channels)"),
        (always(HIDDEN), r"dim|emb_size|d_latents|embedding_dim|lru_width|decoder_dim"),
        (at_most(16), r"state_size|ssm_state_size|mamba_d_state|.*dt_rank|time_step_rank"),
        (at_most(POSITIONS), r".*(max.*position.*|n_positions|n_ctx|max_seq_len|model_max_length|context_length)"),
        (at_most(32), r"image_size|crop_size|img_size|input_size|resolution"),
        (at_most(8), r"patch_size"),
        (at_most(32), r".*window(_size)?|local_attention|.*chunk_size"),
        (at_most(16), r"index_topk|.*block_size"),
    ]
]
"""What a number becomes, by its name; the first that fits counts."""

KEPT = re.compile(
    r"chunk_size_feed_forward|num_channels|in_channels|out_channels|audio_channels|type_vocab_size|hidden_size_per_layer"
    r"|channel_multiplier|max_window_layers|num_codebooks|input_channels|.*conv_kernel.*|max_relative_positions"
    r"|speech_encoder_chunk_size|acoustic_tokenizer_chunk_size|num_hidden_groups|mask_.*|num_residual_layers|num_adapter_layers|spatial_vision_layer"
)
LAYER_COUNTS = re.compile(
    r"(.*_)?num_hidden_layers|(.*_)?num_layers|n_layers?|(.*_)?(encoder|decoder)_layers|depth|layers|num_blocks"
    r"|num_layers_per_stack|num_global_layers|resampler_depth|num_self_attends_per_block|conf_num_hidden_layers"
    r"|num_timestamp_prediction_layers|aligner_num_add_layers|speech_encoder_layers|t2u_(en|de)coder_layers"
)
INDICES = re.compile(r".*(_layer_ids|_indexes|_indices|_layers|_idxs)")
WIDTHS = re.compile(r"hidden_sizes|.*_dim|.*channels|.*conv_channel_size")
TOKEN = re.compile(r".*(token_id|token_index|_token|_id|_index|token_ids)")


def shrink(config: Any) -> Any:
    """The same config, changed in place, and its sub-configs."""
    special = iter(range(WORDS, VOCABULARY))
    for part in parts(config):
        _shrink_one(part, special)
    return config


def parts(config: Any) -> Iterator[Any]:
    """A config and the configs in it, each once."""
    seen: set[int] = set()
    waiting = [config]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += [
            value for value in vars(part).values() if hasattr(value, "model_type") and hasattr(value, "to_dict")
        ]


def _shrink_one(config: Any, special: Iterator[int]) -> None:
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    counts = {
        name: value
        for name, value in values.items()
        if type(value) is int and LAYER_COUNTS.fullmatch(name) and not KEPT.fullmatch(name)
    }
    layers = _layers(values, set(counts.values()))
    heads = values.get("num_attention_heads") or values.get("n_head") or values.get("num_heads")
    for name, value in values.items():
        new = value
        if type(value) is int and name in counts:
            new = min(value, layers.get(value, LAYERS))
        elif type(value) is int:
            new = _number(name, value, special)
            if "key_value_heads" in name or name in ("num_kv_heads", "kv_n_heads"):
                own = values.get(name.replace("key_value", "attention"), heads)
                new = HEADS if value == own else 1
            elif name == "head_dim" and value == values.get("qk_rope_head_dim"):
                new = HEAD // 2
        elif isinstance(value, (list, tuple)) and value:
            new = _listed(name, value, layers, special)
        elif isinstance(value, dict):
            new = _by_layer(_rotary(value), max(layers.values(), default=LAYERS))
        elif value is None and name == "head_dim":
            new = HEAD
        if new is not value:
            setattr(config, name, new)


def _number(name: str, value: int, special: Iterator[int]) -> int:
    if KEPT.fullmatch(name):
        return value
    if TOKEN.fullmatch(name):
        return next(special) if value >= WORDS else value
    for pattern, new in RULES:
        if pattern.fullmatch(name):
            return new(value) if value > 0 else value
    return value


def _layers(values: dict[str, Any], counts: set[int]) -> dict[int, int]:
    """Number of layers before → after: the first few, until every kind that a list has was seen."""
    result: dict[int, int] = {}
    for count in counts:
        kept = LAYERS
        for value in values.values():
            if isinstance(value, (list, tuple)) and len(value) == count and isinstance(value[0], (str, int)):
                seen = [str(entry) for entry in value]
                kept = max(kept, max(seen.index(kind) for kind in set(seen)) + 1)
        result[count] = min(kept, MOST_LAYERS, count)
    return result


def _listed(name: str, value: Any, layers: dict[int, int], special: Iterator[int]) -> Any:
    """A list with an entry per layer is cut; one of layer numbers loses those that are gone; widths become small."""
    kind = type(value)
    numbers = all(type(entry) is int for entry in value)
    if numbers and WIDTHS.fullmatch(name):
        return kind(min(entry, HIDDEN) for entry in value)
    if numbers and name == "depths":
        return kind([1] * len(value))
    if len(value) in layers and len(value) > 3:
        value = kind(value[: layers[len(value)]])
    if numbers and INDICES.fullmatch(name):
        last = max(layers.values(), default=LAYERS)
        return kind(entry for entry in value if entry < last) or kind([last - 1])
    return kind(_number(name, entry, special) for entry in value) if numbers else value


def shrink_overrides(data: dict[str, Any]) -> dict[str, Any]:
    """A config's data with its settings for single layers shrunk too; layers that are gone lose theirs."""
    own = data.get("per_layer_config")
    if own:
        kept = _by_layer(own, data["num_hidden_layers"])
        data["per_layer_config"] = {
            layer: {
                name: _number(name, value, iter(())) if type(value) is int else value for name, value in few.items()
            }
            for layer, few in kept.items()
        }
    for value in data.values():
        if isinstance(value, dict) and "model_type" in value:
            shrink_overrides(value)
    return data


def _by_layer(value: dict[Any, Any], layers: int) -> dict[Any, Any]:
    """Entries of layers that stay, where the keys are layer numbers."""
    if not value or not all(str(key).isdigit() for key in value):
        return value
    return {key: entry for key, entry in value.items() if int(key) < layers}


def _rotary(value: dict[str, Any]) -> dict[str, Any]:
    """Sections of multimodal rotary embeddings add up to half a head."""
    new: dict[str, Any] = {}
    for key, entry in value.items():
        if isinstance(entry, dict):
            new[key] = _rotary(entry)
        elif key == "mrope_section" and entry:
            sections = [part * (HEAD // 2) // sum(entry) for part in entry]
            sections[0] += HEAD // 2 - sum(sections)
            new[key] = sections
        elif key in ("short_factor", "long_factor"):
            new[key] = entry[: HEAD // 2]
        else:
            new[key] = entry
    return new
