"""Scales that must be equal because readers fuse the weights they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from halfbyte.models.partners import fused_groups
from halfbyte.verify.problems import Problem
from halfbyte.verify.stored import Weight, Weights
from halfbyte.verify.values import view

CONSEQUENCE = "servers use one of them for the whole fused layer, which is then wrong by the ratio, or refuse"


def sharing_problems(path: Path, weights: Weights) -> Iterator[Problem]:
    """All members of a fused layer quantized alike or not at all; their tensor and input scales equal to the bit."""
    for group in _groups(weights):
        quantized = {leaf: weight for leaf, weight in group.items() if weight is not None}
        if not quantized:
            continue
        first = next(iter(quantized.values()))
        for leaf, weight in group.items():
            if weight is None:
                text = f"unquantized, but {first.name}, with which servers fuse it, is {first.kind.name}"
                yield Problem("error", "fused-mix", f"{first.parent}.{leaf}", text)
            elif weight.kind is not first.kind:
                text = f"{weight.kind.name}, but {first.name}, with which servers fuse it, is {first.kind.name}"
                yield Problem("error", "fused-mix", weight.name, text)
        for role in ("global", "input"):
            yield from _equal(path, role, [weight for weight in quantized.values() if role in weight.parts])


def scalar_problems(path: Path, weights: Weights) -> Iterator[Problem]:
    """Tensor and input scales that no product survives, or whose size says that they are the wrong way up."""
    for weight in weights.quantized.values():
        for role in ("global", "input"):
            if role not in weight.parts or weight.parts[role].info.dtype not in ("F32", "BF16", "F16"):
                continue
            part = weight.parts[role]
            value = float(view(path, part).reshape(-1)[0])
            if not np.isfinite(value) or value <= 0:
                yield Problem("error", "scalar", part.name, f"is {value:g}; a scale is positive and finite")
            elif role == "global":
                largest = 6 * 448 * (1 / value if weight.kind.divisor else value)
                if largest > 65504:
                    text = f"is {value:g}: weights up to {largest:.3g} could be meant; is it the reciprocal?"
                    yield Problem("warning", "scalar", part.name, text)


def _groups(weights: Weights) -> Iterator[Mapping[str, Weight | None]]:
    """Leaf → quantized weight, or None for a member that is stored plain; only sets with two members or more."""
    plain = {name.removesuffix(".weight"): None for name in weights.plain if name.endswith(".weight")}
    for parent, layer in fused_groups((*weights.quantized, *plain)):
        found: dict[str, Weight | None] = {}
        for member in layer.members:
            if f"{parent}.{member}" in weights.quantized:
                found[member] = weights.quantized[f"{parent}.{member}"]
            elif f"{parent}.{member}" in plain:
                found[member] = None
        if len(found) > 1:
            yield found


def _equal(path: Path, role: str, members: list[Weight]) -> Iterator[Problem]:
    if not members:
        return
    first = members[0].parts[role]
    reference = view(path, first).reshape(-1)[:1]
    for weight in members[1:]:
        value = view(path, weight.parts[role]).reshape(-1)[:1]
        if value.tobytes() != reference.tobytes():
            text = f"is {float(value[0]):.9g}, but {first.name} is {float(reference[0]):.9g}: {CONSEQUENCE}"
            yield Problem("error", "shared-scale", weight.parts[role].name, text)
