"""Which modules are quantized and which are kept, and why: first the caller's rules, then the model."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from halfbyte.errors import InputError
from halfbyte.models import Model
from halfbyte.models.names import is_expert, layer_index


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
        for option in ("include", "keep"):
            check_names(option, getattr(self, option))
        if not all((*self.include, *self.keep)):
            raise InputError("an empty pattern fits every module; give part of a name, or '*'")
        if not (isinstance(self.keep_first, int) and isinstance(self.keep_last, int)):
            raise InputError(
                f"keep_first and keep_last are numbers of layers, not {self.keep_first!r}, {self.keep_last!r}"
            )
        if self.keep_first < 0 or self.keep_last < 0:
            raise InputError("the number of layers to keep cannot be negative")


def check_names(option: str, given: object) -> None:
    """Raise if an option is no tuple of names. A text alone would be taken for a name per letter."""
    if isinstance(given, str):
        raise InputError(f"{option} is a tuple of names, not one text: {option}=({given!r},)")
    if not isinstance(given, tuple | list) or not all(isinstance(name, str) for name in given):
        raise InputError(f"{option} is a tuple of names, not {given!r}")


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern fits a module's name or that of its weight."""
    if any(special in pattern for special in "*?["):
        return any(fnmatch.fnmatchcase(candidate, pattern) for candidate in (name, f"{name}.weight"))
    return pattern in f"{name}.weight"


class Selector:
    """Decides module by module. Each answer is None (quantize) or the reason to keep."""

    def __init__(self, rules: Rules, model: Model) -> None:
        self.rules, self.model = rules, model
        if (rules.keep_first or rules.keep_last) and model.layers is None:
            raise InputError("keeping first or last layers needs num_hidden_layers in config.json")
        self._unused = set(rules.include) | set(rules.keep)

    def reason(self, module: str, columns: int, block: int, defaults: bool = True) -> str | None:
        """Why a module is kept. The caller's rules count before what is known of the model; they fit its name on disk
        or at run time.

        `defaults`: whether the model's own answers count at all. They do not where the source has chosen already.
        """
        rules = self.rules
        names = dict.fromkeys((module, *self.model.run_time(module).names))
        for pattern in rules.keep:
            if any(matches(name, pattern) for name in names):
                self._unused.discard(pattern)
                return f"--keep {pattern}"
        included = [pattern for pattern in rules.include if any(matches(name, pattern) for name in names)]
        self._unused.difference_update(included)
        if rules.include and not included:
            return "not included"
        if rules.experts_only and not is_expert(module):
            return "no expert"
        found = self.layer_reason(layer_index(module))
        if found is None and defaults:
            found = self.model.never(module)
        if found is None:
            found = self.model.tied(module)
        if found is None and defaults and not included:
            found = self.model.kept(module)
        if found is not None:
            return found
        if columns % block:
            return f"width {columns} is no multiple of {block}"
        return None

    def layer_reason(self, layer: int | None) -> str | None:
        """Why a layer is kept as one of the first or last."""
        layers = self.model.layers
        if layer is None or layers is None or layer >= layers:
            return None
        if layer < self.rules.keep_first:
            return f"one of the first {self.rules.keep_first} layers"
        if layer >= layers - self.rules.keep_last:
            return f"one of the last {self.rules.keep_last} layers"
        return None

    def unused(self) -> list[str]:
        """Patterns that matched nothing: as a rule a misspelt name. A head that is in no file may be kept too."""
        heads = self.model.heads
        return sorted(
            pattern
            for pattern in self._unused
            if pattern in self.rules.include or not any(matches(head, pattern) for head in heads)
        )
