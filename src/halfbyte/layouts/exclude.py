"""Exclude lists: what to write, and which quantized modules a list switches off in which reader.

One reader matches exactly, then by plain substring; another by whole dotted parts; another by file-name patterns
(`matching`). Full module names are safe in all of them, as long as no listed name is part of the name of a quantized
module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from halfbyte.errors import InputError
from halfbyte.layouts.description import Reader
from halfbyte.models.partners import ANY, FusedLayers


def exclude_list(
    excluded: Iterable[str], quantized: Sequence[str], readers: Sequence[Reader], fused: FusedLayers = ANY
) -> list[str]:
    """The names to list, sorted.

    vLLM's reader of Model-Optimizer files excludes every module whose name contains a listed one:
    `model.layers.0.mlp.gate` would take `model.layers.0.mlp.gate_up_proj` along. A list that does so is refused where a
    reader of the layout matches in that way.
    """
    names = sorted(set(excluded))
    by_substring = [reader.name for reader in readers if reader.matches_substrings]
    found = clashes(names, quantized, fused) if by_substring else []
    if found:
        name, module = found[0]
        raise InputError(
            f"{name} stays unquantized, but its name is part of {module}, which is quantized: {by_substring[0]} "
            f"matches exclude lists of this layout by substring and would take both. Keep {module} too (--keep)"
        )
    return names


def swallowed(
    quantized: Collection[str], excluded: Sequence[str], reader: Reader, fused: FusedLayers = ANY
) -> Iterator[tuple[str, str]]:
    """(module, name that the reader asks for) of quantized modules that a reader takes as excluded.

    A module that servers fuse with others is named once, by the first of them.
    """
    asked: dict[str, str] = {}
    names = frozenset(quantized)
    for module in quantized:
        asked.setdefault(fused.served_name(module, names) if reader.asks_for_fused else module, module)
    for name, module in asked.items():
        if reader.excludes(name, excluded):
            yield module, name


def culprit(name: str, excluded: Sequence[str], reader: Reader) -> str | None:
    """The single entry that excludes a name, if one does."""
    return next((entry for entry in excluded if reader.excludes(name, [entry])), None)


def clashes(names: Sequence[str], quantized: Sequence[str], fused: FusedLayers = ANY) -> list[tuple[str, str]]:
    """Pairs (listed name, quantized module) in which a plain substring match would swallow the module."""
    found = []
    known = frozenset(quantized)
    served = {fused.served_name(module, known) for module in quantized}
    haystack = "\n".join([*quantized, *sorted(served - known)])
    for name in names:
        if name in haystack:
            at = haystack.index(name)
            start = haystack.rfind("\n", 0, at) + 1
            end = haystack.find("\n", at)
            found.append((name, haystack[start : end if end >= 0 else len(haystack)]))
    return found
