"""A plan in the making: what becomes of each weight, before the outputs have places."""

from __future__ import annotations

from dataclasses import dataclass, field

from halfbyte.checkpoint.io.index import Checkpoint, Tensor
from halfbyte.checkpoint.io.views import SourceMatrix
from halfbyte.checkpoint.plan.source_weights import SourceWeight
from halfbyte.checkpoint.plan.target import Target
from halfbyte.checkpoint.plan.types import Action
from halfbyte.layouts.description import Part
from halfbyte.models import Model


@dataclass
class Draft:
    """Weights sorted by what becomes of them, and what every source tensor is used for."""

    checkpoint: Checkpoint
    model: Model
    target: Target
    converted: list[SourceWeight] = field(default_factory=list)
    decoded: list[SourceWeight] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    gathered: list[tuple[Tensor, Part, SourceMatrix]] = field(default_factory=list)
    owned: dict[str, str] = field(default_factory=dict)
    """Source tensor → the module that it becomes part of."""
    dropped: dict[str, str] = field(default_factory=dict)
    moved: dict[str, Part] = field(default_factory=dict)
    """Source tensor that is copied under another name or in another shape → what it becomes."""
    groups: list[tuple[str, ...]] = field(default_factory=list)
    ignore: tuple[str, ...] = ()
    """Names to exclude as the caller gave them."""
    notes: list[str] = field(default_factory=list)
    """What the user should know of things that are decided on the way."""

    def claim(self, weight: SourceWeight) -> None:
        for name in (weight.tensor.name, *weight.belongs):
            self.owned[name] = weight.module
        for name in weight.dropped:
            self.dropped[name] = f"activation scale of {weight.module} in the source's own format"


def action_of(weight: SourceWeight, target: Target) -> Action:
    """What is done to a weight that is converted."""
    if target.format is None:
        return "decode"
    if weight.kind == target.format.name:
        return "relayout"
    return "cast" if weight.kind == "mxfp4" else "quantize"
