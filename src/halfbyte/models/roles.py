"""What a module is, and how far its name tells. The table of architectures knows; names are the rule where it does not.

Name rules lean to keeping: a head or a tower that is quantized by mistake breaks a model, a linear layer that is kept
costs memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, get_args

Role = Literal[
    "linear", "head", "router", "tower", "projector", "table", "convolution", "transposed", "direct", "shared", "norm",
    "other",
]  # fmt: skip
"""linear: what is quantized. transposed: stored as [inputs, outputs]. direct: a linear layer whose weight the model
reads itself. shared: several layers have the same weight. table: rows are looked up. other: no linear layer."""

ROLES: tuple[Role, ...] = get_args(Role)

REASONS: Mapping[Role, str] = {
    "head": "output head",
    "router": "router",
    "tower": "vision or audio tower",
    "projector": "projector",
    "table": "embedding",
    "convolution": "convolution",
    "transposed": "stored transposed (Conv1D), which no reader takes in FP4",
    "direct": "the model reads this weight without calling its module",
    "shared": "one weight for several layers, which readers do not tie when it is packed",
    "norm": "norm",
    "other": "no linear layer in this architecture",
}
"""Why a module of that role stays unquantized."""

NEVER: tuple[Role, ...] = ("table", "convolution", "transposed", "norm", "other")
"""Roles that no reader builds a linear layer of: not quantized whatever is included."""


def part(*names: str) -> str:
    """Pattern: one of these as a whole dotted part."""
    return rf"(^|\.)({'|'.join(names)})(\.|$)"


def last(*names: str) -> str:
    """Pattern: one of these as the last dotted part."""
    return rf"(^|\.)({'|'.join(names)})$"


def once(*names: str) -> str:
    """Pattern: one of these as the last dotted part of a name without numbers: a module that no layer repeats."""
    return rf"^([^.\d][^.]*\.)*({'|'.join(names)})$"


TABLE = r"(?<!un)(?<!patch_)embed(?!_out)[^.]*$|" + last("wte", "wpe", "vte", "shared", "relative_attention_bias")
HEAD = "|".join(
    (
        last("lm_head", "embed_out", "output_layer", "score", "classifier", "qa_outputs", "lm_head_\\w+"),
        once("output", "proj_out", "decoder", "head", "unembed", "reward", "v_head", "value_head"),
        last("pre_classifier", "sop_classifier", "seq_relationship"),
        part("lm_head", "cls", "lm_predictions", "generator_lm_head", "codec_head", "discriminator_predictions"),
        part("generator_predictions", r"\w*(classification|regression|reward|score|ranking)_head"),
    )
)
ROUTER = last("gate", "router", "wg", "shared_expert_gate", "modality_router", "gate_network") + "|" + part("router")
CONVOLUTION = r"conv1d|" + last("conv", "conv2d", "patch_embed")
NORM = r"norm[^.]*$|" + last(r"ln_\w+")
TOWER = part(
    "visual", "vision_tower", "vision_model", "vision_encoder", "vision", "vision_backbone", "visual_tokenizer",
    "visual_encoder", "image_encoder", "protein_encoder", "codec_model", "img_processor",
    "embed_tokens_extend", "vision_embed_tokens", "sam_model", "vit", "vpm", "vqmodel",
    "audio_tower", "audio_model", "audio_encoder", "audio", "audio_embed", "speech_encoder", "speech_tower",
    "sound_encoder", "apm", "tts", "talker", "token2wav", "code2wav", "embed_vision", "embed_audio", "qformer",
    "patch_embed", "patch_embedding", "patch_embeddings",
)  # fmt: skip
PROJECTOR = part(
    r"[^.]*projector[^.]*", "aligner", "mlp1", "connector", "resampler", "patch_merger", "vision_language_adapter",
    "vision_proj", "img_projection", "image_projection", "visual_projection", "audio_projection", "vl_connector",
)  # fmt: skip

SENSE = "(vision|visual|image|img|video|audio|speech|sound|voice|acoustic|mm|multi_?modal)"
GUESSED: Mapping[Role, str] = {
    "table": r"embed(ding)?s?\.\d+$",
    "head": once(r"\w*_heads?(\.\d+)?") + "|" + part("lm_heads", "classifier", "score"),
    "router": part("modality_router"),
    "tower": part(rf"{SENSE}_(tower|model|encoder|decoder|backbone|tokenizer|transformer|branch)(_\w+)?", "vocoder"),
    "projector": part(
        rf"{SENSE}_(proj|projection|adapt[eo]r|merger|aligner)(_\w+)?", "abstractor", "perceiver", "merger"
    ),
}
"""What names tell beside: of modules that no table has, a guess is enough to keep them."""

BY_NAME: tuple[tuple[Role, re.Pattern[str]], ...] = (
    ("table", re.compile(TABLE)),
    ("head", re.compile(HEAD)),
    ("norm", re.compile(NORM)),
    ("router", re.compile(ROUTER)),
    ("convolution", re.compile(CONVOLUTION)),
    ("tower", re.compile(TOWER)),
    ("projector", re.compile(PROJECTOR)),
    *((role, re.compile(pattern)) for role, pattern in GUESSED.items()),
)


def role_by_name(module: str) -> Role:
    """What a module seems to be by its name alone; linear where nothing speaks against it.

    >>> role_by_name("transformer.wte"), role_by_name("model.layers.0.mlp.up_proj"), role_by_name("vpm.blocks.0.fc1")
    ('table', 'linear', 'tower')
    """
    return next((role for role, pattern in BY_NAME if pattern.search(module)), "linear")
