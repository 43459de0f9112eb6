"""Which weights are quantized and which are kept, and why; which ones share a tensor scale."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from halfbyte.errors import CheckpointError, InputError
from halfbyte.models.families import BASELINE, TABLES, Family

EXPERTS = re.compile(r"\.(shared_)?experts\.")
LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|block|layer|h)\.(\d+)\.")

PARTNERS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Last parts of module names that servers fuse into one matrix, which has one tensor scale."""

FUSED = {
    "q_proj": ("qkv_proj", "qkv", "Wqkv", "query_key_value"),
    "gate_proj": ("gate_up_proj", "w1"),
}
"""What a module is called where its partners are fused on disk already: both at once is a contradiction."""


@dataclass(frozen=True)
class Rules:
    """What the caller wants quantized. Patterns with * ? [ match whole names, others any part of a name."""

    experts_only: bool = False
    include: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    keep_first: int = 0
    keep_last: int = 0

    def __post_init__(self) -> None:
        if self.experts_only and self.include:
            raise InputError("--experts-only and --include exclude each other: include '*.experts.*' says the same")
        if not all((*self.include, *self.keep)):
            raise InputError("an empty pattern fits every module; give part of a name, or '*'")
        if self.keep_first < 0 or self.keep_last < 0:
            raise InputError("the number of layers to keep cannot be negative")


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern fits a module's name or that of its weight."""
    if any(special in pattern for special in "*?["):
        return any(fnmatch.fnmatchcase(candidate, pattern) for candidate in (name, f"{name}.weight"))
    return pattern in f"{name}.weight"


def layer_index(module: str) -> int | None:
    """The number of the layer that a module is in."""
    found = LAYER.search(module)
    return None if found is None else int(found.group(1))


class Selector:
    """Decides module by module. Each answer is None (quantize) or the reason to keep."""

    def __init__(self, rules: Rules, family: Family, layers: int | None, tied: bool) -> None:
        self.rules, self.family, self.layers, self.tied = rules, family, layers, tied
        if (rules.keep_first or rules.keep_last) and layers is None:
            raise InputError("keeping first or last layers needs num_hidden_layers in config.json")
        self._unused = set(rules.include) | set(rules.keep)

    def reason(self, module: str, columns: int, block: int, defaults: bool = True) -> str | None:
        """Why a module is kept. The caller's words count before the table's; without `defaults` the table is silent."""
        rules = self.rules
        for pattern in rules.keep:
            if matches(module, pattern):
                self._unused.discard(pattern)
                return f"--keep {pattern}"
        included = [pattern for pattern in rules.include if matches(module, pattern)]
        self._unused.difference_update(included)
        if rules.include and not included:
            return "not included"
        if rules.experts_only and not EXPERTS.search(module):
            return "no expert"
        layer = layer_index(module)
        if (edge := self.layer_reason(layer)) is not None:
            return edge
        for rule, why in TABLES if defaults else ():
            if rule.search(module):
                return why
        if self.tied and module.endswith("lm_head"):
            return "output head tied to the embedding"
        default = None if included or not defaults else self._default(module, layer)
        if default is not None:
            return default
        if columns % block:
            return f"width {columns} is no multiple of {block}"
        return None

    def layer_reason(self, layer: int | None) -> str | None:
        """Why a layer is kept as one of the first or last."""
        if layer is None or self.layers is None or layer >= self.layers:
            return None
        if layer < self.rules.keep_first:
            return f"one of the first {self.rules.keep_first} layers"
        if layer >= self.layers - self.rules.keep_last:
            return f"one of the last {self.rules.keep_last} layers"
        return None

    def _default(self, module: str, layer: int | None) -> str | None:
        for pattern, why in (*BASELINE, *self.family.keep):
            if pattern.search(module):
                return why
        if layer is not None and self.layers is not None and layer >= self.layers:
            return "multi token prediction: beyond num_hidden_layers"
        if self.family.only is not None and not self.family.only.search(module):
            return f"{self.family.name} converts experts only"
        return None

    def unused(self) -> list[str]:
        """Patterns that matched nothing: as a rule a misspelt name."""
        return sorted(self._unused)


def share_scales(
    modules: Sequence[str], quantized: Callable[[str], bool], optional: Iterable[str] = (), strict: bool = False
) -> tuple[list[tuple[str, ...]], dict[str, str]]:
    """Groups of quantized modules that share one tensor scale, and those that must be kept because a partner is.

    Modules without partners form no group. A quantized module whose partner is not in the checkpoint is an error that
    names both, unless its kind never has one in this model (an up_proj without gates; `strict` takes no such hint from
    what is absent, because the modules are not all of a model).
    """
    names = set(modules)
    shapes = set() if strict else {re.sub(r"\d+", "#", module) for module in modules}
    groups: list[tuple[str, ...]] = []
    kept: dict[str, str] = {}
    done: set[tuple[str, int]] = set()
    for module in modules:
        prefix, _, end = module.rpartition(".")
        number = PARTNER_OF.get(end)
        if number is None or (prefix, number) in done:
            continue
        done.add((prefix, number))
        members = [f"{prefix}.{name}" if prefix else name for name in PARTNERS[number]]
        present = [member for member in members if member in names]
        wanted = [member for member in present if quantized(member)]
        if not wanted:
            continue
        _refuse_duplicates(names, prefix, wanted)
        if len(present) < len(members):
            missing = _missing(prefix, number, present, members, names, shapes, set(optional))
            if missing is not None:
                raise CheckpointError(
                    f"{wanted[0]} shares its scale with {missing}, which is not in the checkpoint; add the missing "
                    f"tensor, or keep {wanted[0]} unquantized (--keep)"
                )
        if len(wanted) < len(present):
            odd = next(member for member in present if member not in wanted)
            kept |= dict.fromkeys(wanted, f"its partner {odd} is kept")
        elif len(wanted) > 1:
            groups.append(tuple(wanted))
    return groups, kept


PARTNER_OF: Mapping[str, int] = {name: number for number, names in enumerate(PARTNERS) for name in names}


def _refuse_duplicates(names: set[str], prefix: str, wanted: Sequence[str]) -> None:
    for member in wanted:
        for other in FUSED.get(member.rpartition(".")[2], ()):
            if f"{prefix}.{other}" in names:
                raise CheckpointError(f"{member} and {prefix}.{other} are both in the checkpoint: one is a duplicate")


def _missing(
    prefix: str,
    number: int,
    present: Sequence[str],
    members: Sequence[str],
    names: set[str],
    shapes: set[str],
    optional: set[str],
) -> str | None:
    """The first partner that should be there and is not."""
    here = {member.rpartition(".")[2] for member in present}
    if here == {"q_proj"} and f"{prefix}.kv_a_proj_with_mqa" in names:
        return None  # latent attention without a compressed query
    if here == {"kv_a_proj_with_mqa"} and f"{prefix}.q_proj" in names:
        return None
    for member in members:
        end = member.rpartition(".")[2]
        if member in present or end in optional:
            continue
        if here == {"up_proj"} and shapes and re.sub(r"\d+", "#", member) not in shapes:
            continue  # a model without gates
        return member
    return None
