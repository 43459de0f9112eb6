"""config_groups of a quantization_config: which group describes which module.

Both layouts have them. A target is a module's name, `re:` and an expression that is matched from the start of the name,
or the name of a class, of which only Linear can be told without the model's code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from halfbyte.layouts.description import Json, texts

LINEAR = "Linear"
CLASS = re.compile(r"[A-Z]\w*")
"""What names of classes look like; names of modules do not."""


@dataclass(frozen=True)
class Group:
    """One entry of config_groups."""

    name: str
    targets: tuple[str, ...]
    weights: Json | None
    inputs: Json | None
    format: str | None
    """How the group's weights are packed, where it says so itself."""

    @property
    def is_attention(self) -> bool:
        """Whether it speaks of keys and values, not of weights."""
        return self.weights is None or (len(self.targets) == 1 and self.targets[0].endswith("Attention"))


def read_groups(config: Json) -> list[Group]:
    """The groups that can be read; entries of other types are left out."""
    given = config.get("config_groups")
    found = []
    for name, group in given.items() if isinstance(given, dict) else ():
        if isinstance(group, dict):
            said = group.get("format")
            found.append(
                Group(
                    str(name),
                    texts(group.get("targets")),
                    _scheme(group.get("weights")),
                    _scheme(group.get("input_activations")),
                    said if isinstance(said, str) else None,
                )
            )
    return found


def group_of(module: str, groups: Sequence[Group]) -> Group | None:
    """The group of a linear layer: by name first, then by expression, then as Linear. None: no group targets it."""
    for fits in (_by_name, _by_expression, _by_class):
        for group in groups:
            if any(fits(module, target) for target in group.targets):
                return group
    return None


def idle_targets(groups: Sequence[Group], modules: Sequence[str]) -> Iterator[tuple[Group, str]]:
    """Targets that match none of the modules. Classes cannot be judged."""
    for group in groups:
        for target in group.targets:
            if CLASS.fullmatch(target):
                continue
            if not any(_by_name(module, target) or _by_expression(module, target) for module in modules):
                yield group, target


def _scheme(value: object) -> Json | None:
    return value if isinstance(value, Mapping) else None


def _by_name(module: str, target: str) -> bool:
    return module == target


def _by_expression(module: str, target: str) -> bool:
    if not target.startswith("re:"):
        return False
    try:
        return re.match(target.removeprefix("re:"), module) is not None
    except re.error:
        return False


def _by_class(module: str, target: str) -> bool:
    return target == LINEAR
