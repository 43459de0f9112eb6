"""Scales of a quantized cache of keys and values: the names that each layout's readers want.

Every attention layer has two, for keys and for values; both multiply. Model-Optimizer hangs them on the projections
(`self_attn.k_proj.k_scale`), compressed-tensors on the attention itself (`self_attn.k_scale`). vLLM 0.32 and SGLang
0.5.23 read both forms; transformers and TensorRT-LLM read only that of their layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

FORMS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?P<attention>.+)\.(?P<part>[kv])_proj\.(?P=part)_scale",
        r"(?P<attention>.+)\.qkv_proj\.(?P<part>[kv])_scale",
        r"(?P<attention>.+)\.(?P<part>[kv])_proj\.output_scale",
        r"(?P<attention>.+)\.(?P<part>[kv])_scale",
    )
)
OTHER_FORMS = re.compile(r"\.(kv_scale|[kv]_cache\.scale|[qkv]_zero_point|q_scale)$")
"""Further tensors of such a cache, which readers take under these names or not at all."""

UNDER_PROJECTIONS = ("self_attn", "mixer")
"""Attention modules whose projections vLLM and SGLang look at for scales."""


class CacheScale(NamedTuple):
    """One scale: of which attention module, for keys ("k") or values ("v")."""

    attention: str
    part: str


class Tensor(NamedTuple):
    """Name and shape of a tensor."""

    name: str
    shape: tuple[int, ...]


def cache_scale(name: str) -> CacheScale | None:
    """What a tensor is the cache scale of, whatever layout its name is from; None for any other tensor.

    >>> cache_scale("model.layers.0.self_attn.k_proj.k_scale")
    CacheScale(attention='model.layers.0.self_attn', part='k')
    >>> cache_scale("model.layers.0.self_attn.v_scale")
    CacheScale(attention='model.layers.0.self_attn', part='v')
    """
    for form in FORMS:
        found = form.fullmatch(name)
        if found is not None:
            return CacheScale(found["attention"], found["part"])
    return None


def is_cache_tensor(name: str) -> bool:
    """Whether a tensor belongs to a quantized cache, in a form that is understood or another."""
    return cache_scale(name) is not None or OTHER_FORMS.search(name) is not None


def on_projections(scale: CacheScale) -> Tensor:
    """Model-Optimizer's form; that of compressed-tensors where servers do not look at the projections."""
    attention, part = scale
    if attention.rpartition(".")[2] in UNDER_PROJECTIONS:
        return Tensor(f"{attention}.{part}_proj.{part}_scale", ())
    return Tensor(f"{attention}.{part}_scale", ())


def on_attention(scale: CacheScale) -> Tensor:
    """The form of compressed-tensors."""
    return Tensor(f"{scale.attention}.{scale.part}_scale", (1,))


PLACES = {"modelopt": on_projections, "compressed-tensors": on_attention}
"""Layout → the tensor of a scale. Layouts that are not here take the names of the source."""

PER_HEAD = ("compressed-tensors",)
"""Layouts that have a place for one scale per head."""


@dataclass
class Moves:
    """What becomes of the cache scales of a checkpoint."""

    moved: dict[str, Tensor] = field(default_factory=dict)
    """Source tensor → name and shape that it gets."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Source tensor → why nothing of it is written."""
    unknown: list[str] = field(default_factory=list)
    """Source tensors that belong to such a cache in a form that is copied as it is."""


def move_cache_scales(tensors: Mapping[str, Sequence[int]], layout: str | None) -> Moves:
    """Where the cache scales among tensors (name → shape) go in a layout; None: to a checkpoint without one.

    A name that is right already stays. If two tensors are the same scale, the one under the right name is taken, else
    the first.
    """
    moves = Moves()
    if layout is None:
        reason = "belongs to a quantized cache of keys and values, which no config of a BF16 checkpoint asks for"
        moves.dropped = {name: reason for name in tensors if is_cache_tensor(name)}
        return moves
    if layout not in PLACES:
        return moves
    taken: dict[str, str] = {}
    for name, shape in tensors.items():
        scale = cache_scale(name)
        if scale is None:
            if is_cache_tensor(name):
                moves.unknown.append(name)
            continue
        place = PLACES[layout](scale)
        if prod(shape) != 1:
            if layout not in PER_HEAD:
                moves.dropped[name] = f"one scale per head of the cache, for which the {layout} layout has no place"
                continue
            place = Tensor(place.name, tuple(shape))
        if place.name != name and place.name in tensors:
            moves.dropped[name] = f"the same scale of the cache as {place.name}"
        elif place.name in taken:
            moves.dropped[name] = f"the same scale of the cache as {taken[place.name]}"
        else:
            taken[place.name] = name
            moves.moved[name] = place
    return moves
