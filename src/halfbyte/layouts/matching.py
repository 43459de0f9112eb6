"""How four readers match a module against an exclude list, as they do it and not as one would wish.

They agree on full module names. They differ on everything else, which is why a pattern that works in one of them can
switch off a quantized layer in another. Lists may hold thousands of full names, so each is sorted out once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch, translate
from functools import cache, lru_cache

from halfbyte.models.partners import served_sets

LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
FULL_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")
"""An entry of a list that no reader takes for a pattern."""


@dataclass(frozen=True)
class SortedList:
    """An exclude list, sorted out."""

    entries: frozenset[str]
    names: frozenset[str]
    """Entries that are full names, or whole dotted parts of one."""
    patterns: tuple[str, ...]
    """All other entries."""
    experts: tuple[str, ...]
    """Entries of either kind that speak of experts."""
    latent: frozenset[str]
    """Last parts of entries that are projections of latent attention."""


@lru_cache(maxsize=64)
def _sorted_out(entries: tuple[str, ...]) -> SortedList:
    names = frozenset(entry for entry in entries if FULL_NAME.fullmatch(entry))
    return SortedList(
        entries=frozenset(entries),
        names=names,
        patterns=tuple(entry for entry in entries if entry not in names),
        experts=tuple(entry for entry in entries if "experts" in entry),
        latent=frozenset(entry.rpartition(".")[2] for entry in entries) & frozenset(LATENT),
    )


def vllm_modelopt(served: str, patterns: Sequence[str]) -> bool:
    """Exact, member by member; then plain substring; then file-name patterns."""
    listed = _sorted_out(_split_stars(tuple(patterns)))
    if served in listed.entries or any(listed.entries.issuperset(members) for members in served_sets(served)):
        return True
    if _is_experts(served) and any(served in entry for entry in listed.experts):
        return True
    return any(entry in served for entry in listed.entries) or any(fnmatch(served, entry) for entry in listed.patterns)


@lru_cache(maxsize=64)
def _split_stars(entries: tuple[str, ...]) -> tuple[str, ...]:
    """A trailing X* is read as X and X.*; X alone then matches as a substring."""
    result: list[str] = []
    for entry in entries:
        starred = len(entry) > 1 and entry[-1] == "*" and entry[-2] != "."
        result += (entry[:-1], entry[:-1] + ".*") if starred else (entry,)
    return tuple(result)


def sglang_modelopt(served: str, patterns: Sequence[str]) -> bool:
    """Linear layers: dotted paths, member by member. All: patterns against the whole name and each dotted part."""
    listed = _sorted_out(tuple(patterns))
    if not _is_experts(served):
        if any(all(_on_path(member, listed) for member in members) for members in served_sets(served)):
            return True
        if "experts" in served and any(served in entry for entry in listed.experts):
            return True
    asked = {served, served.removeprefix("language_model."), *served.split(".")}
    if asked & listed.names:
        return True
    leaf = served.rpartition(".")[2].replace("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa")
    if any(tail in leaf for tail in listed.latent):
        return True
    return any(_sglang_pattern(entry).fullmatch(name) for entry in listed.patterns for name in asked)


def _is_experts(served: str) -> bool:
    return served.endswith(".experts")


def _on_path(module: str, listed: SortedList) -> bool:
    """Whether a listed path is a run of whole dotted parts of a module's name."""
    if any(run in listed.names for run in _runs(module)):
        return True
    return any(f".{entry.rstrip('.')}." in f".{module.rstrip('.')}." for entry in listed.patterns)


def _runs(module: str) -> Iterator[str]:
    """Every run of whole dotted parts: a.b gives a, a.b and b."""
    parts = module.rstrip(".").split(".")
    for start in range(len(parts)):
        for stop in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:stop])


@cache
def _sglang_pattern(pattern: str) -> re.Pattern[str]:
    """Dots are literal, a star is anything, all else is a regular expression; one that is none matches only itself."""
    try:
        return re.compile(pattern.replace(".", r"\.").replace("*", ".*"))
    except re.error:
        return re.compile(re.escape(pattern))


def tensorrt_llm(module: str, patterns: Sequence[str]) -> bool:
    """Case-sensitive file-name patterns against the module's own name; `re:` starts a regular expression."""
    listed = _sorted_out(tuple(patterns))
    return module in listed.names or any(_file_pattern(entry).match(module) for entry in listed.patterns)


@cache
def _file_pattern(pattern: str) -> re.Pattern[str]:
    return _expression(pattern) if pattern.startswith("re:") else re.compile(translate(pattern))


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    """What follows `re:`; an expression that is none matches nothing."""
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error:
        return re.compile(r"(?!)")


def compressed_tensors(served: str, patterns: Sequence[str]) -> bool:
    """Exact module names, or `re:` expressions matched from the start; all members of a fused layer."""
    listed = _sorted_out(tuple(patterns))

    def one(module: str) -> bool:
        return module in listed.names or any(
            _expression(entry).match(module) is not None if entry.startswith("re:") else entry == module
            for entry in listed.patterns
        )

    if _is_experts(served):  # asked for by the names of the first expert
        return all(one(f"{served}.0.{leaf}") for leaf in ("gate_proj", "up_proj", "down_proj")) or all(
            one(f"{served}.0.{leaf}") for leaf in ("w1", "w2", "w3")
        )
    return one(served) or any(all(map(one, members)) for members in served_sets(served))
