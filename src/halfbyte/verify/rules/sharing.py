"""Scales that must be equal because readers fuse the weights they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from halfbyte.checkpoint.io.index import Tensor
from halfbyte.layouts.description import FLOATS
from halfbyte.models.partners import ANY, FusedLayers, fused_groups
from halfbyte.verify.problems import Problem
from halfbyte.verify.reading import read_whole
from halfbyte.verify.stored import Contents, StoredTensors

CONSEQUENCE = "servers use one of them for the whole fused layer, which is then wrong by the ratio, or refuse"


def sharing_problems(path: Path, contents: Contents, fused: FusedLayers = ANY) -> Iterator[Problem]:
    """All members of a fused layer quantized alike or not at all; their tensor and input scales equal to the bit."""
    for group in _groups(contents, fused):
        quantized = {module: weight for module, weight in group.items() if weight is not None}
        if not quantized:
            continue
        first = next(iter(quantized.values()))
        for module, weight in group.items():
            if weight is None:
                text = f"unquantized, but {first.name}, with which servers fuse it, is {first.storage.name}"
                yield Problem("error", "fused-mix", module, text)
            elif weight.storage is not first.storage:
                text = f"{weight.storage.name}, but {first.name}, with which servers fuse it, is {first.storage.name}"
                yield Problem("error", "fused-mix", weight.name, text)
        scaled = [weight for weight in quantized.values() if weight.storage.has_tensor_scale]
        yield from _equal(path, [weight.parts.get(weight.storage.global_role) for weight in scaled])
        yield from _equal(path, [weight.parts.get(weight.storage.input_role) for weight in scaled])


def scalar_problems(path: Path, contents: Contents) -> Iterator[Problem]:
    """Tensor and input scales that are not positive and finite, or whose size suggests the reciprocal."""
    for weight in contents.quantized.values():
        for role in (weight.storage.global_role, weight.storage.input_role):
            part = weight.parts.get(role)
            if part is None or part.dtype not in FLOATS:
                continue
            value = float(read_whole(path, part).reshape(-1)[0])
            if not np.isfinite(value) or value <= 0:
                yield Problem("error", "scalar", part.name, f"is {value:g}; a scale is positive and finite")
            elif role == weight.storage.global_role:
                largest = 6 * 448 * (1 / value if weight.storage.divides else value)
                if largest > 65504:
                    text = f"is {value:g}: weights up to {largest:.3g} could be meant; is it the reciprocal?"
                    yield Problem("warning", "scalar", part.name, text)


def _groups(contents: Contents, fused: FusedLayers) -> Iterator[Mapping[str, StoredTensors | None]]:
    """Module → quantized weight, or None for a member that is stored plain; one set for each fused layer."""
    plain = {name.removesuffix(".weight"): None for name in contents.plain if name.endswith(".weight")}
    stored: dict[str, StoredTensors | None] = {**plain, **contents.quantized}
    for members in fused_groups(stored, fused):
        yield {module: stored[module] for module in members if module in stored}


def _equal(path: Path, scalars: Sequence[Tensor | None]) -> Iterator[Problem]:
    """Scalars that are present must be equal to the bit."""
    present = [part for part in scalars if part is not None]
    if not present:
        return
    first = present[0]
    reference = read_whole(path, first).reshape(-1)[0]
    for part in present[1:]:
        value = read_whole(path, part).reshape(-1)[0]
        if value.tobytes() != reference.tobytes():
            text = f"is {float(value):.9g}, but {first.name} is {float(reference):.9g}: {CONSEQUENCE}"
            yield Problem("error", "shared-scale", part.name, text)
