"""What transformers cannot do with packed weights of an architecture, told from the table before a byte is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from halfbyte.models.architectures import table_version
from halfbyte.models.model import Model
from halfbyte.models.roles import pattern_of

SHOWN = 4
"""Patterns that a sentence names."""


def transformers_limits(model: Model, quantized: Iterable[str]) -> list[str]:
    """What transformers will not do with these modules quantized, in sentences. For layouts that it reads."""
    if model.architecture is None:
        return []
    patterns: dict[str, str] = {}
    for module in quantized:
        patterns.setdefault(pattern_of(module), module)
    return list(_limits(model, patterns.values()))


def _limits(model: Model, modules: Iterable[str]) -> Iterator[str]:
    architecture = model.architecture
    if architecture is None:
        return
    read, reshaped, unknown = [], [], []
    for module in modules:
        there = model.run_time(module)
        if not set(map(pattern_of, there.names)).isdisjoint(architecture.read_at_start):
            read.append(module)
        elif there.is_reshaped:
            reshaped.append(module)
        elif not model.is_known(module):
            unknown.append(module)
    reader = f"transformers ({table_version()})"
    if read:
        yield (
            f"{reader} cannot load {model.name} with {_list(read)} packed: its own initialisation reads these weights. "
            f"To load it there, keep them: {_keep(read)}"
        )
    if reshaped:
        yield (
            f"{reader} splits or joins {_list(reshaped)} while loading {model.name}, which it cannot do to packed "
            f"weights. To load it there, keep them: {_keep(reshaped)}"
        )
    if unknown:
        yield f"{reader} has no {_list(unknown)} in {model.name} and will not load them"


def _list(modules: Sequence[str]) -> str:
    """The patterns of modules in words."""
    patterns = list(dict.fromkeys(pattern_of(module) for module in modules))
    more = len(patterns) - SHOWN
    return ", ".join(patterns[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _keep(modules: Sequence[str]) -> str:
    """The option that keeps modules, by the last parts of their names."""
    leaves = dict.fromkeys(f"'*.{module.rpartition('.')[2]}'" for module in modules)
    return f"--keep {' '.join(leaves)}"
