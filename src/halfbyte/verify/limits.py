"""Checkpoints that are correct, but that some reader cannot use: by reader and reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from halfbyte.layouts.description import Layout
from halfbyte.models import Model
from halfbyte.models.names import ROUTED
from halfbyte.verify.problems import Problem
from halfbyte.verify.stored import Contents, StoredTensors


@dataclass(frozen=True)
class Limit:
    """What a reader cannot do."""

    reason: str
    """With the name of the reader."""
    concerns: Callable[[StoredTensors], bool]
    """Which weights it cannot use."""


def limits_of(model: Model, layout: Layout | None) -> Iterator[Limit]:
    """Every limit that is known for a model in a layout."""
    for limits in (model.family.expert_limits, {} if layout is None else layout.expert_limits):
        for format, reason in limits.items():
            yield Limit(reason, _experts_of(format))


def limit_problems(limits: Iterator[Limit], contents: Contents) -> Iterator[Problem]:
    """A warning for each limit that concerns some weight, with the first of them."""
    for limit in limits:
        concerned = [weight for weight in contents.quantized.values() if limit.concerns(weight)]
        if concerned:
            more = f" ({len(concerned)} weights)" if len(concerned) > 1 else ""
            yield Problem("warning", "reader", concerned[0].name, limit.reason + more)


def _experts_of(format: str) -> Callable[[StoredTensors], bool]:
    return lambda weight: weight.storage.format == format and ROUTED in weight.name
