"""What transformers cannot do with packed weights of an architecture, told from the table before a byte is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from halfbyte.models.architectures import Rename, table_version
from halfbyte.models.model import Model
from halfbyte.models.names import ROUTED, pattern_of

BY_ROWS = frozenset(("Chunk", "Split", "Concatenate"))
"""Operations that move whole rows: codes and scales of MXFP4 survive them, a tensor scale does not."""

SHOWN = 4
"""Patterns that a sentence names."""


def transformers_limits(model: Model, format: str, quantized: Iterable[str], plain: Iterable[str]) -> list[str]:
    """What transformers will not do with these modules quantized and those plain, in sentences. For layouts that it
    reads.
    """
    if model.architecture is None:
        return []
    return list(_limits(model, format, _first_of_each(quantized), _first_of_each(plain)))


def single_experts(model: Model, modules: Iterable[str]) -> list[str]:
    """What is to say of experts that were taken apart, if transformers wants them in one tensor, packed or not."""
    architecture = model.architecture
    if architecture is None or not architecture.exact:
        return []
    lone = [module for module in _first_of_each(modules) if ROUTED in module and not architecture.finds(module)]
    reader = f"transformers ({table_version()})"
    return [f"{reader} wants the experts of {model.name} in one tensor and will not load {_list(lone)}"] if lone else []


def _first_of_each(modules: Iterable[str]) -> list[str]:
    """One module of each pattern."""
    found: dict[str, str] = {}
    for module in modules:
        found.setdefault(pattern_of(module), module)
    return list(found.values())


def _limits(model: Model, format: str, quantized: Sequence[str], plain: Sequence[str]) -> Iterator[str]:
    architecture = model.architecture
    if architecture is None:
        return
    read, reshaped = [], []
    for module in quantized:
        there = model.run_time(module)
        if architecture.reads_at_start(there.names):
            read.append(module)
        elif there.is_reshaped and not (format == "mxfp4" and set(there.operations) <= BY_ROWS):
            reshaped.append(module)
    packed = tuple(f"{name}.weight_packed" for module in quantized for name in model.run_time(module).names)
    lost = [rule for rule in architecture.renames if rule.of_weights and not _survives(rule, packed)]
    left = [module for module in plain if model.run_time(module).rule in lost]
    splits = [rule for rule in lost if len(rule.put) > 1]
    reader = f"transformers ({table_version()})"
    if read:
        way_out = f". To load it there, keep them: {_keep(read)}" if len(read) < len(quantized) else ""
        why = f"its own initialisation reads these weights{way_out}"
        yield f"{reader} cannot load {model.name} with {_list(read)} packed: {why}"
    if reshaped:
        by_rows = all(set(model.run_time(module).operations) <= BY_ROWS for module in reshaped)
        yield (
            f"{reader} splits or joins {_list(reshaped)} while loading {model.name}, which it cannot do to weights "
            f"with a tensor scale{'; it loads MXFP4 (--to mxfp4)' if by_rows and format == 'nvfp4' else ''}"
        )
    yield from single_experts(model, quantized)
    if splits and not left:
        yield (
            f"{reader} cannot load {model.name} in this layout: its rule that splits a weight into "
            f"{' and '.join(splits[0].put)} fails in a quantized checkpoint where that weight is not packed"
        )
    if left:
        yield (
            f"{reader} splits or joins {_list(left)} while loading {model.name}, which it leaves out for unquantized "
            "weights of a quantized checkpoint: it will not load them"
        )


def _survives(rule: Rename, packed: Sequence[str]) -> bool:
    """Whether transformers keeps a rule for unquantized weights in a quantized checkpoint: where packed weights are
    among the targets, it adds a rule for them; else it turns the rule into one for packed weights.
    """
    return any(name.endswith(f"{rule.put[0]}_packed") for name in packed)


def _list(modules: Sequence[str]) -> str:
    """The patterns of modules in words."""
    patterns = list(dict.fromkeys(pattern_of(module) for module in modules))
    more = len(patterns) - SHOWN
    return ", ".join(patterns[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _keep(modules: Sequence[str]) -> str:
    """The option that keeps modules, by the last parts of their names."""
    leaves = dict.fromkeys(f"'*.{module.rpartition('.')[2]}'" for module in modules)
    return f"--keep {' '.join(leaves)}"
