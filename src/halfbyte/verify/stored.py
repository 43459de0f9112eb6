"""A checkpoint's tensors, sorted: quantized weights, plain tensors, and strays that belong to no weight."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from halfbyte.checkpoint.io.index import Checkpoint, Tensor
from halfbyte.layouts.storage import StoredWeight, companion_suffixes, find_stored

FLOATS = ("BF16", "F16", "F32", "F64")
"""Dtypes of plain tensors that hold numbers."""

StoredTensors = StoredWeight[Tensor]


@dataclass(frozen=True)
class Contents:
    """A checkpoint's tensors, each in exactly one place."""

    quantized: Mapping[str, StoredTensors]
    plain: Mapping[str, Tensor]
    """Unquantized tensors by name."""
    stray: Mapping[str, Tensor]
    """Scales and codes that belong to no weight."""
    unreadable: Mapping[str, StoredTensors] = field(default_factory=dict)
    """Quantized weights that are there, but damaged."""

    def without(self, names: Container[str]) -> Contents:
        """The same, with the weights of these names, or with tensors of these names, counted as unreadable."""
        damaged = {
            name: weight
            for name, weight in self.quantized.items()
            if name in names or any(part.name in names for part in weight.parts.values())
        }
        sound = {name: weight for name, weight in self.quantized.items() if name not in damaged}
        return Contents(sound, self.plain, self.stray, damaged)


def read_contents(checkpoint: Checkpoint) -> Contents:
    """Sort every tensor of a checkpoint into quantized weights, plain tensors and strays."""
    tensors = checkpoint.tensors
    quantized = {weight.name: weight for weight in find_stored(tensors)}
    used = {part.name for weight in quantized.values() for part in weight.parts.values()}
    rest = {name: tensor for name, tensor in tensors.items() if name not in used}
    companions = companion_suffixes()
    stray = {
        name: tensor
        for name, tensor in rest.items()
        if name.endswith(companions) or (name.endswith(".scale") and tensor.dtype == "F8_E8M0")
    }
    plain = {name: tensor for name, tensor in rest.items() if name not in stray}
    return Contents(quantized, plain, stray)
