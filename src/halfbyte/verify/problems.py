"""What verify finds: problems, the error of each weight, and a summary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from halfbyte.models.names import without_numbers

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong (error), or that some reader may not accept (warning)."""

    level: Level
    rule: str
    """A short name for the kind of problem, the same in every report: "shared-scale", "missing-part" and so on."""
    name: str
    """The tensor, module or file that it concerns."""
    text: str
    """What is wrong, with the numbers, and what a reader makes of it."""


@dataclass(frozen=True)
class WeightError:
    """One weight of the checkpoint against the same weight of its source."""

    name: str
    kind: str
    """How it is stored: "nvfp4 (modelopt)", "bf16" and so on."""
    shape: tuple[int, ...]
    relative: float
    """Root of the squared error over that of the squared source; 0 where all values are equal, NaN where one is NaN."""
    largest: float
    """Largest absolute difference."""


@dataclass
class Report:
    """Everything that one run found."""

    path: str
    against: str | None = None
    tensors: int = 0
    bytes: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    """How many weights are stored in each way."""
    problems: list[Problem] = field(default_factory=list)
    errors: list[WeightError] = field(default_factory=list)
    """Every weight that was compared by value, worst first."""
    equal: int = 0
    """Tensors whose bytes are those of the source."""

    def add(self, level: Level, rule: str, name: str, text: str) -> None:
        self.problems.append(Problem(level, rule, name, text))

    def extend(self, problems: Iterable[Problem]) -> None:
        self.problems.extend(problems)

    def count(self, level: Level) -> int:
        return sum(problem.level == level for problem in self.problems)

    def alike(self) -> list[list[Problem]]:
        """Problems in groups that differ in numbers only, errors first; a large model may have thousands of a kind."""
        groups: dict[tuple[str, ...], list[Problem]] = {}
        for problem in sorted(self.problems, key=lambda problem: problem.level):  # "error" before "warning"
            key = problem.level, problem.rule, without_numbers(problem.name), without_numbers(problem.text)
            groups.setdefault(key, []).append(problem)
        return list(groups.values())

    @property
    def clean(self) -> bool:
        """No errors; warnings are allowed."""
        return self.count("error") == 0

    @property
    def last_line(self) -> str:
        found = f"{number(self.count('error'), 'problem')}, {number(self.count('warning'), 'warning')}"
        stored = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        return f"{self.path}: {found} in {self.tensors} tensors ({stored or 'unquantized: none of them is'})"

    def as_json(self) -> dict[str, object]:
        """The whole report, for a file."""
        return {
            "path": self.path,
            "against": self.against,
            "clean": self.clean,
            "tensors": self.tensors,
            "bytes": self.bytes,
            "kinds": self.kinds,
            "summary": self.last_line,
            "problems": [vars(problem) for problem in self.problems],
            "equal": self.equal,
            "errors": [vars(error) | {"shape": list(error.shape)} for error in self.errors],
        }


def number(count: int, noun: str) -> str:
    """So many of them: 1 row, 2 rows."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
