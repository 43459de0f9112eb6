"""Exclude lists that four different readers take the same way.

One reader matches exactly, then by plain substring; another by whole dotted parts; another by file-name patterns. Full
module names are safe in all of them, as long as no listed name is part of the name of a quantized module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from halfbyte.errors import InputError
from halfbyte.layouts.description import Reader
from halfbyte.models.partners import served_name


def exclude_list(excluded: Iterable[str], quantized: Sequence[str]) -> list[str]:
    """The names to list, sorted.

    vLLM's reader of Model-Optimizer files excludes every module whose name contains a listed one:
    `model.layers.0.mlp.gate` would take `model.layers.0.mlp.gate_up_proj` along. A list that does so is refused.
    """
    names = sorted(set(excluded))
    swallowed = clashes(names, quantized)
    if swallowed:
        name, module = swallowed[0]
        raise InputError(
            f"{name} stays unquantized, but its name is part of {module}, which is quantized: readers that match "
            f"exclude lists by substring would take both. Keep {module} too (--keep)"
        )
    return names


def asked_for(modules: Iterable[str], reader: Reader) -> dict[str, str]:
    """Name that a reader asks for → the first of the modules that it stands for."""
    asked: dict[str, str] = {}
    for module in modules:
        asked.setdefault(served_name(module) if reader.asks_for_fused else module, module)
    return asked


def clashes(names: Sequence[str], quantized: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs (listed name, quantized module) in which a plain substring match would swallow the module."""
    found = []
    served = {served_name(module) for module in quantized}
    haystack = "\n".join([*quantized, *sorted(served - set(quantized))])
    for name in names:
        if name in haystack:
            at = haystack.index(name)
            start = haystack.rfind("\n", 0, at) + 1
            end = haystack.find("\n", at)
            found.append((name, haystack[start : end if end >= 0 else len(haystack)]))
    return found
