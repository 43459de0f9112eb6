"""The table of architectures: what every module of a transformers class is, by name. No model code runs.

`architectures.json` is generated (`python -m tools.architectures.generate`). A checkpoint is looked up by the class
that its config names, then by its model type. Names on disk become names at run time by transformers' own rules, which
the table holds as regular expressions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from halfbyte.models.config import text_part
from halfbyte.models.experts import Stacking
from halfbyte.models.names import FIRST_EXPERT, NUMBERED_EXPERT, first_expert, pattern_of
from halfbyte.models.roles import Role

MERGE_EXPERTS = frozenset(("MergeModulelist", "Concatenate"))
"""Operations by which transformers stacks single experts while loading."""


@dataclass(frozen=True)
class Rename:
    """One rule that turns names on disk into names at run time."""

    find: re.Pattern[str]
    put: tuple[str, ...]
    scope: tuple[str, str] | None = None
    """(path of a part, prefix of the model): only names under that part, with or without the prefix."""
    operations: tuple[str, ...] | None = None
    """What is done to the values; None for a rule that only renames."""
    paired: bool = False
    """Whether each alternative of the expression has a target of its own."""
    of_weights: bool = False
    """Whether it is a rule for tensors called weight. In a quantized checkpoint transformers applies it to packed
    weights, and to unquantized ones no longer."""

    def apply(self, name: str) -> list[str] | None:
        """The names that a name becomes; None if the rule does not fit."""
        before, rest = "", name
        if self.scope is not None:
            inner, outer = (f"{path}." if path else "" for path in self.scope)
            if name.startswith(outer + inner):
                before = outer + inner
            elif name.startswith(inner):
                before = inner
            else:
                return None
            rest = name[len(before) :]
        found = self.find.search(rest)
        if found is None:
            return None
        group = next(key for key, value in found.groupdict().items() if value is not None)
        targets = (self.put[int(group[1:])],) if self.paired else self.put
        at = self.find.groupindex[group]
        return [before + rest.replace(found.group(0), _filled(target, found, at), 1) for target in targets]


def _filled(target: str, found: re.Match[str], at: int) -> str:
    """A target with its references to groups filled in; they count from the group that matched."""
    text = re.sub(r"\\(\d)", lambda number: found.group(at + int(number[1])) or "", target)
    return text.replace("\\", "")


@dataclass(frozen=True)
class RunTime:
    """What a tensor on disk becomes when transformers loads it."""

    names: tuple[str, ...]
    """Names at run time; several where the tensor is split."""
    operations: tuple[str, ...] = ()
    """What is done to the values on the way."""
    rule: Rename | None = None
    """The rule that does it."""

    @property
    def is_reshaped(self) -> bool:
        """Whether values move between tensors in a way that packed weights do not survive."""
        return bool(self.operations) and not (self.merges_experts and set(self.operations) <= MERGE_EXPERTS)

    @property
    def merges_experts(self) -> bool:
        """Whether single experts are stacked."""
        return "MergeModulelist" in self.operations


@dataclass(frozen=True)
class Architecture:
    """One class of the table."""

    name: str
    roles: Mapping[str, Role]
    """Pattern of a module at run time → what it is."""
    prefix: str
    """Where the model without its head sits."""
    tied: Mapping[str, str]
    """Pattern of a module → the one whose weight it has where the config ties them."""
    tied_by_default: bool
    stacks: Mapping[str, Stacking | None]
    """Pattern of a stack of experts at run time → how it lies there."""
    renames: tuple[Rename, ...] = ()
    read_at_start: tuple[str, ...] = ()
    """Patterns of linear layers that transformers cannot load packed: the class reads their weights while loading."""
    exact: bool = True
    """Whether this is the class that the config names, not another of its model type."""

    def heads(self) -> tuple[str, ...]:
        """Heads at run time, by full name."""
        return tuple(name for name, role in self.roles.items() if role == "head" and "#" not in name)

    def single_linears(self) -> tuple[str, ...]:
        """Linear layers at run time that no layer repeats, by full name."""
        kinds = ("linear", "head", "tower", "projector", "direct", "shared")
        return tuple(name for name, role in self.roles.items() if role in kinds and "#" not in name)

    def run_time(self, tensor: str) -> RunTime:
        """What a tensor on disk is called at run time."""
        found = self._run_time(first_expert(tensor))
        number = NUMBERED_EXPERT.search(tensor)
        if number is None or not any(FIRST_EXPERT in name for name in found.names):
            return found
        return replace(found, names=tuple(name.replace(FIRST_EXPERT, number[0], 1) for name in found.names))

    def module_at_run_time(self, module: str) -> RunTime:
        """What a module on disk is called at run time, by its weight."""
        found = self._modules.get(module)
        if found is None:
            there = self.run_time(f"{module}.weight")
            found = replace(there, names=tuple(name.removesuffix(".weight") for name in there.names))
            self._modules[module] = found
        return found

    @cached_property
    def _modules(self) -> dict[str, RunTime]:
        """What was found before."""
        return {}

    def _run_time(self, tensor: str) -> RunTime:
        known = self._names.get(tensor)
        if known is None:
            known = self._names[tensor] = self._renamed(tensor)
        return known

    @cached_property
    def _names(self) -> dict[str, RunTime]:
        """What was found before."""
        return {}

    def _renamed(self, tensor: str) -> RunTime:
        names: list[str] = [tensor]
        operations: tuple[str, ...] = ()
        rule = None
        for rename in self.renames:
            if rename.operations is None and (renamed := rename.apply(names[0])) is not None:
                names = renamed[:1]
        for rename in self.renames:
            if rename.operations is not None and (renamed := rename.apply(names[0])) is not None:
                names, operations, rule = renamed, rename.operations, rename
                break
        return RunTime(tuple(self._with_prefix(name) for name in names), operations, rule)

    def _with_prefix(self, name: str) -> str:
        """The name with the prefix of the class added or taken away where only that makes it known."""
        bare = name.removeprefix(f"{self.prefix}.")
        for known in (name, bare, f"{self.prefix}.{name}"):
            if self._knows(known):
                return known if self.exact else name
        return name

    def _knows(self, tensor: str) -> bool:
        pattern = pattern_of(tensor)
        return pattern in self.stacks or pattern.removesuffix(".weight") in self.roles

    def reads_at_start(self, names: Iterable[str]) -> bool:
        """Whether transformers cannot load one of these modules packed, by their names at run time."""
        return any(candidate in self.read_at_start for name in names for candidate in self._candidates(name))

    def _candidates(self, name: str) -> tuple[str, ...]:
        """Patterns under which the table may have a module. Classes of one model type differ in the first part."""
        pattern = pattern_of(name)
        bare = pattern.removeprefix(f"{self.prefix}.")
        rest = () if self.exact else (pattern.partition(".")[2], f"{self.prefix}.{pattern.partition('.')[2]}")
        return (pattern, bare, f"{self.prefix}.{pattern}", *rest)

    def finds(self, module: str) -> bool:
        """Whether transformers finds a place for a module on disk, single experts included that it stacks."""
        return all(self._knows(name) for name in self.run_time(f"{module}.weight").names)

    def repeated(self, role: Role, layers: int) -> list[str]:
        """Names of the modules of a role in layers 0 to `layers`, whether or not each layer has one."""
        patterns = [name for name, found in self.roles.items() if found == role and name.count("#") == 1]
        return [pattern.replace("#", str(layer)) for pattern in patterns for layer in range(layers)]

    def role(self, module: str) -> Role | None:
        """What a module is, by its name on disk; None where the table does not have it."""
        one = first_expert(module)
        if one not in self._roles_found:
            self._roles_found[one] = self._role(one)
        return self._roles_found[one]

    @cached_property
    def _roles_found(self) -> dict[str, Role | None]:
        """What was found before."""
        return {}

    def _role(self, module: str) -> Role | None:
        for name in self.run_time(f"{module}.weight").names:
            found = self._role_at_run_time(name.removesuffix(".weight"))
            if found is not None:
                return found
        return None

    def _role_at_run_time(self, module: str) -> Role | None:
        for candidate in self._candidates(module):
            if candidate in self.roles:
                return self.roles[candidate]
            if candidate in self.stacks or self._is_one_expert(candidate):
                return "linear"
        return None

    def _is_one_expert(self, pattern: str) -> bool:
        """Whether a module is one expert of a layer that is stacked at run time."""
        before, found, _ = pattern.rpartition(".experts.#.")
        return bool(found) and f"{before}.experts" in self._stacked_layers

    @cached_property
    def layer_stacks(self) -> int:
        """How many lists of layers hold linear layers: two for an encoder and a decoder."""
        return len({name.partition("#")[0] for name, role in self.roles.items() if role == "linear" and "#" in name})

    @cached_property
    def _stacked_layers(self) -> frozenset[str]:
        return frozenset(stack.rpartition(".")[0] for stack in self.stacks)


def find_architecture(config: Mapping[str, Any]) -> Architecture | None:
    """The row of the table for a config.json: by `architectures`, then by model type; None where there is none."""
    table = _table()
    rows = table["architectures"]
    named = config.get("architectures")
    for name in named if isinstance(named, list) else ():
        if isinstance(name, str) and name in rows:
            return _row(name, exact=True)
    for place in (config, text_part(config)):
        name = table["model_types"].get(str(place.get("model_type", "")))
        if name is not None:
            return _row(name, exact=not named and place is config)
    return None


def table_version() -> str:
    """The version of transformers that the table was made from."""
    return str(_table()["transformers"])


def from_description(name: str, description: Mapping[str, Any]) -> Architecture:
    """The row that a description by `describe_model` makes."""
    return _architecture(name, description, description["renames"], exact=True)


@cache
def _table() -> dict[str, Any]:
    text = files("halfbyte.models").joinpath("architectures.json").read_text(encoding="utf-8")
    parsed: dict[str, Any] = json.loads(text)
    return parsed


@cache
def _row(name: str, exact: bool) -> Architecture:
    table = _table()
    row = table["architectures"][name]
    return _architecture(name, row, table["renames"][row["renames"]], exact)


def _architecture(name: str, row: Mapping[str, Any], renames: list[Mapping[str, Any]], exact: bool) -> Architecture:
    return Architecture(
        name=name,
        roles={pattern: role for role, patterns in row["modules"].items() for pattern in patterns},
        prefix=row["prefix"],
        tied=dict(_modules(row["tied"])),
        tied_by_default=row["tied_by_default"],
        stacks=row["stacks"],
        renames=tuple(_rename(rule) for rule in renames),
        read_at_start=tuple(row.get("read_at_start", ())),
        exact=exact,
    )


def _modules(tied: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for target, source in tied.items():
        yield target.removesuffix(".weight"), source.removesuffix(".weight")


def _rename(rule: Mapping[str, Any]) -> Rename:
    scope, operations = rule.get("scope"), rule.get("operations")
    return Rename(
        re.compile(rule["find"]),
        tuple(rule["put"]),
        None if scope is None else (scope[0], scope[1] or ""),
        None if operations is None else tuple(operations),
        rule.get("paired", False),
        rule.get("of_weights", False),
    )
