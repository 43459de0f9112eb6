"""What the name of a module says: its layer, whether it is an expert, how it splits under tensor parallelism."""

from __future__ import annotations

import re

ROUTED = ".experts."
"""Part of the name of every routed expert."""

EXPERTS = re.compile(r"\.(shared_)?experts\.")
LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|block|layer|h)\.(\d+)\.")
ONE_EXPERT = re.compile(r"^(.*\.experts)\.\d+\.[^.]+$")

NUMBERED_EXPERT = re.compile(r"\.experts\.\d+\.")
FIRST_EXPERT = ".experts.0."
WHOLE_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

ROW_PARALLEL = ("o_proj", "down_proj", "w2")
"""Last parts of modules that servers cut along their width."""


def layer_index(module: str) -> int | None:
    """The number of the layer that a module is in."""
    found = LAYER.search(module)
    return None if found is None else int(found.group(1))


def is_expert(module: str) -> bool:
    """Whether a module belongs to an expert, routed or shared."""
    return EXPERTS.search(module) is not None


def routed_layer(module: str) -> str | None:
    """The expert layer of a routed expert's module: `model.layers.0.mlp.experts`. None for any other module."""
    layer, found, _ = module.partition(ROUTED)
    return f"{layer}.experts" if found else None


def same_projection(module: str) -> str:
    """One key for the same projection of all experts of a layer; any other module is its own key."""
    head, found, tail = module.partition(ROUTED)
    number, dot, rest = tail.partition(".")
    return f"{head}{found}*.{rest}" if found and dot and number.isdigit() else module


def pattern_of(name: str) -> str:
    """The name with # for each number that is a whole part of it: the same for a module in all layers and experts.

    >>> pattern_of("model.layers.12.mlp.experts.3.w1")
    'model.layers.#.mlp.experts.#.w1'
    """
    return WHOLE_NUMBER.sub("#", name)


def first_expert(name: str) -> str:
    """The same name in the first expert: what holds of one expert holds of all in its layer."""
    return NUMBERED_EXPERT.sub(FIRST_EXPERT, name, count=1) if ROUTED in name else name


def without_numbers(text: str) -> str:
    """A text with # for every number in it, also within words: what sentences about many modules have in common."""
    return re.sub(r"\d+", "#", text)


def is_row_parallel(module: str) -> bool:
    """Whether servers cut this module along its width."""
    return module.rpartition(".")[2] in ROW_PARALLEL
