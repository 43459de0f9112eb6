"""Tiny random checkpoints of architectures whose run-time names, towers or fused layers are their own.

Most are built by transformers. EXAONE and Qwen-1 are not among its models: their names and shapes are written here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny_models import (
    HEAD,
    HEADS,
    HIDDEN,
    INNER,
    KEY_HEADS,
    LAYERS,
    VOCABULARY,
    Weights,
    read_safetensors,
    write_checkpoint,
    write_safetensors,
)

Config = dict[str, Any]

TEXT: Config = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
VISION: Config = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PATCHES: Config = {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


def _saved(directory: Path, architecture: str, config: Any, tower: str = "") -> Path:
    """A model of transformers with random weights, written as it writes them.

    tower: what releases call the tower that newer versions of transformers write as `vision_tower`.
    """
    torch.manual_seed(7)
    config.architectures = [architecture]
    with torch.no_grad():
        model = getattr(transformers, architecture)(config).to(torch.bfloat16)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * max(parameter.shape[-1], 1) ** -0.5)
    model.save_pretrained(directory)
    if tower:
        file = directory / "model.safetensors"
        tensors = read_safetensors(file)
        write_safetensors(file, {_renamed(name, "vision_tower", tower): values for name, values in tensors.items()})
    return directory


def _renamed(name: str, before: str, after: str) -> str:
    return after + name.removeprefix(before) if name.startswith(f"{before}.") else name


def llava(directory: Path) -> Path:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**VISION),
        image_token_index=9,
        vision_feature_layer=-1,
    )
    return _saved(directory, "LlavaForConditionalGeneration", config, "vision_tower.vision_model")


def pixtral(directory: Path) -> Path:
    """Llava's class with the tower that SGLang has for it."""
    config = transformers.LlavaConfig(
        text_config=transformers.MistralConfig(**TEXT),
        vision_config=transformers.PixtralVisionConfig(**VISION | {"head_dim": 32}),
        image_token_index=9,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return _saved(directory, "LlavaForConditionalGeneration", config)


def qwen2_vl(directory: Path) -> Path:
    vision = PATCHES | {"embed_dim": 64, "hidden_size": HIDDEN, "mlp_ratio": 2, "in_chans": 3}
    text = TEXT | {"rope_parameters": ROTARY}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
    return _saved(directory, "Qwen2VLForConditionalGeneration", config)


def qwen2_5_vl(directory: Path) -> Path:
    vision = PATCHES | {"hidden_size": 64, "out_hidden_size": HIDDEN, "intermediate_size": 128, "window_size": 56}
    text = TEXT | {"rope_parameters": ROTARY}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision | {"fullatt_block_indexes": [1]})
    return _saved(directory, "Qwen2_5_VLForConditionalGeneration", config)


def gemma3(directory: Path) -> Path:
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**TEXT, sliding_window=32),
        vision_config=transformers.SiglipVisionConfig(**VISION, vision_use_head=False),
        mm_tokens_per_image=1,
    )
    return _saved(directory, "Gemma3ForConditionalGeneration", config, "vision_tower.vision_model")


def mistral3(directory: Path) -> Path:
    config = transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**TEXT),
        vision_config=transformers.PixtralVisionConfig(**VISION | {"head_dim": 32}),
        tie_word_embeddings=False,
    )
    return _saved(directory, "Mistral3ForConditionalGeneration", config)


def internvl(directory: Path) -> Path:
    vision = VISION | {"image_size": [28, 28], "patch_size": [14, 14]}
    config = transformers.InternVLConfig(
        text_config=transformers.Qwen2Config(**TEXT),
        vision_config=transformers.InternVLVisionConfig(**vision),
        downsample_ratio=0.5,
    )
    return _saved(directory, "InternVLForConditionalGeneration", config)


def gpt_neox(directory: Path) -> Path:
    config = transformers.GPTNeoXConfig(
        **{key: TEXT[key] for key in TEXT if key not in ("num_key_value_heads", "head_dim")}
    )
    return _saved(directory, "GPTNeoXForCausalLM", config)


def falcon(directory: Path) -> Path:
    sizes = {key: TEXT[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = transformers.FalconConfig(**sizes, new_decoder_architecture=True, num_kv_heads=2, bias=False)
    return _saved(directory, "FalconForCausalLM", config)


def mamba(directory: Path) -> Path:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=2, state_size=16)
    return _saved(directory, "MambaForCausalLM", config)


def mamba2(directory: Path) -> Path:
    config = transformers.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=32,
        state_size=16,
        n_groups=1,
    )
    return _saved(directory, "Mamba2ForCausalLM", config)


def lfm2(directory: Path) -> Path:
    sizes = {key: TEXT[key] for key in TEXT if key != "head_dim"} | {"block_auto_adjust_ff_dim": False}
    sizes |= {"conv_dim": HIDDEN, "conv_dim_out": HIDDEN, "conv_L_cache": 3, "block_dim": HIDDEN}
    sizes |= {"block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0}
    config = transformers.Lfm2Config(**sizes, layer_types=["conv", "full_attention"])
    return _saved(directory, "Lfm2ForCausalLM", config)


def olmo2(directory: Path) -> Path:
    sizes = {key: TEXT[key] for key in TEXT if key != "head_dim"}
    return _saved(directory, "Olmo2ForCausalLM", transformers.Olmo2Config(**sizes))


def phi3(directory: Path) -> Path:
    sizes = {key: TEXT[key] for key in TEXT if key != "head_dim"}
    return _saved(directory, "Phi3ForCausalLM", transformers.Phi3Config(**sizes | {"pad_token_id": 0}))


def qwen3_5(directory: Path) -> Path:
    text = TEXT | {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
    text |= {"linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    return _saved(directory, "Qwen3_5ForCausalLM", transformers.Qwen3_5TextConfig(**text))


EXAONE_CONFIG = """from transformers import PretrainedConfig


class ExaoneConfig(PretrainedConfig):
    model_type = "exaone"
"""


def exaone(directory: Path) -> Path:
    """EXAONE 3: remote code, so the names are its own."""
    weights = Weights(3)
    weights.matrix("transformer.wte.weight", VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        at = f"transformer.h.{layer}"
        for part, rows in (("q", HEADS * HEAD), ("k", KEY_HEADS * HEAD), ("v", KEY_HEADS * HEAD)):
            weights.matrix(f"{at}.attn.attention.{part}_proj.weight", rows, HIDDEN)
        weights.matrix(f"{at}.attn.attention.out_proj.weight", HIDDEN, HEADS * HEAD)
        weights.matrix(f"{at}.mlp.c_fc_0.weight", INNER, HIDDEN)
        weights.matrix(f"{at}.mlp.c_fc_1.weight", INNER, HIDDEN)
        weights.matrix(f"{at}.mlp.c_proj.weight", HIDDEN, INNER)
        weights.norm(f"{at}.ln_1.weight", HIDDEN)
        weights.norm(f"{at}.ln_2.weight", HIDDEN)
    weights.norm("transformer.ln_f.weight", HIDDEN)
    weights.matrix("lm_head.weight", VOCABULARY, HIDDEN)
    config = TEXT | {
        "model_type": "exaone",
        "architectures": ["ExaoneForCausalLM"],
        "num_layers": LAYERS,
        "activation_function": "silu",
        "layer_norm_epsilon": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "auto_map": {"AutoConfig": "configuration_exaone.ExaoneConfig"},
    }
    write_checkpoint(directory, weights.tensors, config)
    (directory / "configuration_exaone.py").write_text(EXAONE_CONFIG)
    return directory


INTERNVL_CONFIG = """from transformers import PretrainedConfig, Qwen2Config


class InternVLChatConfig(PretrainedConfig):
    model_type = "internvl_chat"

    def __init__(self, llm_config=None, vision_config=None, **more):
        self.llm_config = Qwen2Config(**(llm_config or {"architectures": ["Qwen2ForCausalLM"]}))
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        super().__init__(**more)

    def get_text_config(self, *_, **__):
        return self.llm_config
"""


def internvl_chat(directory: Path) -> Path:
    """InternVL by its own code: a tower, a projector called mlp1, and a Qwen-2 under language_model."""
    weights, text = Weights(5), "language_model.model"
    weights.matrix(f"{text}.embed_tokens.weight", VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        at = f"{text}.layers.{layer}"
        for part, rows in (("q", HEADS * HEAD), ("k", KEY_HEADS * HEAD), ("v", KEY_HEADS * HEAD)):
            weights.matrix(f"{at}.self_attn.{part}_proj.weight", rows, HIDDEN)
            weights.norm(f"{at}.self_attn.{part}_proj.bias", rows)
        weights.matrix(f"{at}.self_attn.o_proj.weight", HIDDEN, HEADS * HEAD)
        for part in ("gate", "up"):
            weights.matrix(f"{at}.mlp.{part}_proj.weight", INNER, HIDDEN)
        weights.matrix(f"{at}.mlp.down_proj.weight", HIDDEN, INNER)
        weights.norm(f"{at}.input_layernorm.weight", HIDDEN)
        weights.norm(f"{at}.post_attention_layernorm.weight", HIDDEN)
    weights.norm(f"{text}.norm.weight", HIDDEN)
    weights.matrix("language_model.lm_head.weight", VOCABULARY, HIDDEN)
    width, inner = VISION["hidden_size"], VISION["intermediate_size"]
    eyes = "vision_model.embeddings"
    weights.matrix(f"{eyes}.patch_embedding.weight", width, 3 * 14 * 14)
    weights.norm(f"{eyes}.patch_embedding.bias", width)
    weights.matrix(f"{eyes}.class_embedding", 1, width)
    weights.matrix(f"{eyes}.position_embedding", 5, width)
    for name, shape in (
        (f"{eyes}.patch_embedding.weight", (width, 3, 14, 14)),
        (f"{eyes}.class_embedding", (1, 1, width)),
        (f"{eyes}.position_embedding", (1, 5, width)),
    ):
        weights.tensors[name] = weights.tensors[name].reshape(shape)
    for layer in range(VISION["num_hidden_layers"]):
        at = f"vision_model.encoder.layers.{layer}"
        sizes = {
            "attn.qkv": (3 * width, width),
            "attn.proj": (width, width),
            "mlp.fc1": (inner, width),
            "mlp.fc2": (width, inner),
        }
        for name, (rows, columns) in sizes.items():
            weights.matrix(f"{at}.{name}.weight", rows, columns)
            weights.norm(f"{at}.{name}.bias", rows)
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "ls1", "ls2"):
            weights.norm(f"{at}.{name}", width)
    for name, rows in (("mlp1.0", 4 * width), ("mlp1.1", HIDDEN), ("mlp1.3", HIDDEN)):
        weights.norm(f"{name}.bias", rows)
    weights.norm("mlp1.0.weight", 4 * width)
    weights.matrix("mlp1.1.weight", HIDDEN, 4 * width)
    weights.matrix("mlp1.3.weight", HIDDEN, HIDDEN)
    vision = VISION | {"model_type": "intern_vit_6b", "architectures": ["InternVisionModel"], "qkv_bias": True}
    vision |= {"qk_normalization": False, "norm_type": "layer_norm", "layer_norm_eps": 1e-6, "num_channels": 3}
    vision |= {"hidden_act": "gelu", "initializer_factor": 1.0, "drop_path_rate": 0.0, "dropout": 0.0}
    config = {
        "model_type": "internvl_chat",
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
        "llm_config": TEXT | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16"},
        "vision_config": vision,
        "downsample_ratio": 0.5,
        "force_image_size": 28,
        "select_layer": -1,
        "template": "internvl2_5",
        "ps_version": "v2",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    write_checkpoint(directory, weights.tensors, config)
    (directory / "configuration_internvl_chat.py").write_text(INTERNVL_CONFIG)
    return directory


MODELS: dict[str, Callable[[Path], Path]] = {
    maker.__name__: maker
    for maker in (
        llava, pixtral, qwen2_vl, qwen2_5_vl, gemma3, mistral3, internvl, gpt_neox, falcon, mamba, mamba2, lfm2, olmo2,
        phi3, qwen3_5, exaone, internvl_chat,
    )
}  # fmt: skip
