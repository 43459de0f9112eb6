"""Mutations that a person has read and found to change nothing that a test may hold, each with the reason."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from tools.mutate.changes import Mutation

LIST = Path(__file__).parent / "reviewed.toml"


@dataclass(frozen=True)
class Reviewed:
    """Changes of one line of one function, or (without a file) of every line that has the text."""

    file: str
    function: str
    line: str
    changes: tuple[str, ...]
    reason: str

    def has(self, mutation: Mutation) -> bool:
        if not self.file:
            return self.line in mutation.line and mutation.change in self.changes
        place = (mutation.path.as_posix(), mutation.function, mutation.line)
        return place == (self.file, self.function, self.line) and mutation.change in self.changes


def reviewed(path: Path = LIST) -> list[Reviewed]:
    entries = tomllib.loads(path.read_text())["reviewed"]
    return [
        Reviewed(
            entry.get("file", ""), entry.get("function", ""), entry["line"], tuple(entry["changes"]), entry["reason"]
        )
        for entry in entries
    ]
