"""Where factors of single channels can move into what comes before, without a change of the model's outputs.

A linear layer that reads x can read x/s instead if its columns are multiplied by s and what makes x is divided by s:
the weight of a norm, or the rows (and the bias) of a linear layer whose outputs reach x by products and sums alone. The
table says where that is so; a model type that it does not have is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from halfbyte.errors import UnsupportedError
from halfbyte.models.config import setting, text_part

Kind = Literal["attention norm", "values", "mlp norm", "up"]
"""input_layernorm → q, k, v; v → o; post_attention_layernorm → gate, up; up → down."""

ALL: tuple[Kind, ...] = ("attention norm", "values", "mlp norm", "up")
NO_NORMS: tuple[Kind, ...] = ("values", "up")
"""Norms that multiply by 1 + w: w would not stay exact."""
ROUTED: tuple[Kind, ...] = ("attention norm", "values")
"""Behind the second norm, a router reads x as well."""

KINDS: Mapping[str, tuple[Kind, ...]] = {
    "llama": ALL,
    "mistral": ALL,
    "qwen2": ALL,
    "qwen3": ALL,
    "smollm3": ALL,
    "granite": ALL,
    "seed_oss": ALL,
    "gemma": NO_NORMS,
    "gemma2": NO_NORMS,
    "gemma3_text": NO_NORMS,
    "mixtral": ROUTED,
    "qwen2_moe": ROUTED,
    "qwen3_moe": ROUTED,
}
"""Model type → what can be folded. Each row was tried: logits do not change."""

PLACES: Mapping[Kind, tuple[str, tuple[str, ...]]] = {
    "attention norm": ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "values": ("self_attn.v_proj", ("self_attn.o_proj",)),
    "mlp norm": ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    "up": ("mlp.up_proj", ("mlp.down_proj",)),
}
"""What takes the factors, and the linear layers that read its output."""

LAYER = re.compile(r"(.*\blayers\.\d+)\.")


@dataclass(frozen=True)
class Fold:
    """One place where factors can go."""

    kind: Kind
    origin: str
    """The norm or the linear layer that is divided by the factors."""
    into: tuple[str, ...]
    """The linear layers whose columns are multiplied by them."""
    repeats: int = 1
    """How often in a row each head of the origin is read: grouped queries share a head of values."""
    head: int = 0
    """Width of a head; 0: all of it is one."""

    @property
    def is_norm(self) -> bool:
        return self.kind in ("attention norm", "mlp norm")


def _number(layer: str) -> tuple[str, int]:
    """Layers in their order, whatever the order of the modules."""
    head, _, number = layer.rpartition(".")
    return head, int(number)


def folds(config: Mapping[str, Any], modules: Collection[str]) -> Iterator[Fold]:
    """The places of a model, layer by layer. modules: its linear layers; a fold has all of its own among them.

    Raises an UnsupportedError for a model type that the table does not have.
    """
    model_type = next(
        (found for part in (config, text_part(config)) if (found := str(part.get("model_type"))) in KINDS), None
    )
    if model_type is None:
        raise UnsupportedError(
            f"--smooth: where factors can be folded is not known of the model type {config.get('model_type')!r}; "
            f"known: {', '.join(KINDS)}"
        )
    heads, key_heads = setting(config, "num_attention_heads"), setting(config, "num_key_value_heads")
    heads = heads if type(heads) is int and heads > 0 else 1
    repeats = heads // key_heads if type(key_heads) is int and key_heads > 0 and heads % key_heads == 0 else 1
    width = setting(config, "head_dim") or int(setting(config, "hidden_size") or 0) // heads
    layers = {at[1] for module in modules if (at := LAYER.match(module))}
    for layer in sorted(layers, key=_number):
        for kind in KINDS[model_type]:
            origin, into = PLACES[kind]
            fold = Fold(kind, f"{layer}.{origin}", tuple(f"{layer}.{name}" for name in into))
            if kind == "values":
                fold = Fold(kind, fold.origin, fold.into, repeats, int(width))
            if all(name in modules for name in fold.into) and (fold.is_norm or fold.origin in modules):
                yield fold
