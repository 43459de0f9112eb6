"""How four readers match a module against an exclude list, as they do it and not as one would wish.

They agree on full module names. They differ on everything else, which is why a pattern that works in one of them can
switch off a quantized layer in another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch, translate
from functools import cache

from halfbyte.models.partners import served_members

LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def vllm_modelopt(served: str, patterns: Sequence[str]) -> bool:
    """Exact, member by member; then plain substring; then file-name patterns."""
    patterns = [part for pattern in patterns for part in _split_star(pattern)]
    listed = set(patterns)
    if served in listed or all(member in listed for member in served_members(served)):
        return True
    if _is_experts(served) and any(served in pattern for pattern in patterns if "experts" in pattern):
        return True
    names = (served, served.removeprefix("language_model."))
    return any(any(pattern in name for name in names) or fnmatch(served, pattern) for pattern in patterns)


def _split_star(pattern: str) -> tuple[str, ...]:
    """A trailing X* is read as X and X.*; X alone then matches as a substring."""
    if len(pattern) > 1 and pattern[-1] == "*" and pattern[-2] != ".":
        return pattern[:-1], pattern[:-1] + ".*"
    return (pattern,)


def sglang_modelopt(served: str, patterns: Sequence[str]) -> bool:
    """Linear layers: dotted paths, member by member. All: patterns against the whole name and each dotted part."""
    if not _is_experts(served):
        if all(any(_on_path(pattern, member) for pattern in patterns) for member in served_members(served)):
            return True
        if "experts" in served and any(served in pattern for pattern in patterns if "experts" in pattern):
            return True
    names = (served, served.removeprefix("language_model."), *served.split("."))
    leaf = served.rpartition(".")[2].replace("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa")
    for pattern in patterns:
        if any(_sglang_pattern(pattern).fullmatch(name) for name in names):
            return True
        tail = pattern.rpartition(".")[2]
        if tail in LATENT and tail in leaf:
            return True
    return False


def _is_experts(served: str) -> bool:
    return served.endswith(".experts")


def _on_path(pattern: str, module: str) -> bool:
    """Whether a listed path is a run of whole dotted parts of a module's name."""
    return f".{pattern.rstrip('.')}." in f".{module.rstrip('.')}."


@cache
def _sglang_pattern(pattern: str) -> re.Pattern[str]:
    """Dots are literal, a star is anything, all else is a regular expression; one that is none matches only itself."""
    try:
        return re.compile(pattern.replace(".", r"\.").replace("*", ".*"))
    except re.error:
        return re.compile(re.escape(pattern))


def tensorrt_llm(module: str, patterns: Sequence[str]) -> bool:
    """Case-sensitive file-name patterns against the module's own name; `re:` starts a regular expression."""
    names, expressions = _sorted_out(tuple(patterns))
    return module in names or any(expression.match(module) for expression in expressions)


@cache
def _sorted_out(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Plain names, which are most of a list and need no search, and what does."""
    plain = frozenset(
        pattern for pattern in patterns if not pattern.startswith("re:") and not set(pattern) & set("*?[")
    )
    rest = (pattern for pattern in patterns if pattern not in plain)
    return plain, tuple(
        _expression(pattern) if pattern.startswith("re:") else re.compile(translate(pattern)) for pattern in rest
    )


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    """What follows `re:`; an expression that is none matches nothing."""
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error:
        return re.compile(r"(?!)")


def compressed_tensors(served: str, patterns: Sequence[str]) -> bool:
    """Exact module names, or `re:` expressions matched from the start; all members of a fused layer."""

    def one(module: str) -> bool:
        return any(
            _expression(pattern).match(module) is not None if pattern.startswith("re:") else pattern == module
            for pattern in patterns
        )

    if _is_experts(served):  # asked for by the names of the first expert
        return all(one(f"{served}.0.{leaf}") for leaf in ("gate_proj", "up_proj", "down_proj")) or all(
            one(f"{served}.0.{leaf}") for leaf in ("w1", "w2", "w3")
        )
    return one(served) or all(one(member) for member in served_members(served))
