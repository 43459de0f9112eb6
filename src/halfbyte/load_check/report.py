"""What a client's loader says of a checkpoint, and how it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from halfbyte.models.names import pattern_of

Client = Literal["transformers", "vllm"]
CLIENTS: tuple[Client, ...] = get_args(Client)

NAMES = {"transformers": "transformers", "vllm": "vLLM"}
"""How the clients write themselves."""

SHOWN = 6
"""Kinds of names in one sentence; the rest is counted."""


@dataclass(frozen=True)
class Mismatch:
    """A weight whose stored shape is not the one that its module has."""

    name: str
    stored: tuple[int, ...]
    wanted: tuple[int, ...]

    @property
    def text(self) -> str:
        return f"{self.name} is {_times(self.stored)} and should be {_times(self.wanted)}"


@dataclass(frozen=True)
class LoadReport:
    """One checkpoint in one client. Names are those at run time, where the client renames."""

    client: Client
    version: str
    tensors: int = 0
    """How many the checkpoint has."""
    missing: tuple[str, ...] = ()
    """Weights of the model that no tensor fills."""
    unexpected: tuple[str, ...] = ()
    """Tensors that fill no weight."""
    mismatched: tuple[Mismatch, ...] = ()
    error: str | None = None
    """Why the client cannot load the checkpoint at all, in one line."""

    @property
    def clean(self) -> bool:
        """Whether every tensor has its place and every weight its tensor."""
        return self.error is None and not (self.missing or self.unexpected or self.mismatched)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "clean": self.clean}

    def sentences(self) -> list[str]:
        """What to print: one sentence if all is well, else one for each kind of trouble."""
        return list(self._sentences())

    def _sentences(self) -> Iterator[str]:
        who = f"{NAMES[self.client]} {self.version}"
        if self.clean:
            yield f"{who}: each of the {self.tensors} tensors has its place in the model, and none is missing"
        if self.error is not None:
            yield f"{who} cannot load it: {self.error}"
        if self.missing:
            yield f"{who} finds no tensor for {_count(self.missing, 'weight')}: {grouped(self.missing)}"
        if self.unexpected:
            yield f"{who} has no place for {_count(self.unexpected, 'tensor')}: {grouped(self.unexpected)}"
        if self.mismatched:
            first = self.mismatched[0]
            names = [mismatch.name for mismatch in self.mismatched]
            yield f"{who} wants another shape for {_count(names, 'tensor')}: {grouped(names)}; {first.text}"


def grouped(names: Iterable[str]) -> str:
    """Names with # for numbers, each kind once with its count, the most frequent first.

    >>> grouped(["layers.0.up", "layers.1.up", "head"])
    'layers.#.up (2), head'
    """
    counts = Counter(pattern_of(name) for name in names).most_common()
    told = [kind if count == 1 else f"{kind} ({count})" for kind, count in counts[:SHOWN]]
    left = sum(count for _, count in counts[SHOWN:])
    return ", ".join(told) + (f" and {left} more" if left else "")


def _count(names: Iterable[str], noun: str) -> str:
    number = len(list(names))
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "a scalar"
