"""Which tensors of a checkpoint form which quantized weights: found from names and dtypes, by the layouts' tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from halfbyte.layouts import LAYOUTS
from halfbyte.layouts.description import Claim, Json, Role, Storage
from halfbyte.models.experts import is_stack


class TensorHeader(Protocol):
    """What a file's header says of a tensor."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


T = TypeVar("T", bound=TensorHeader)


@dataclass(frozen=True)
class StoredWeight(Generic[T]):
    """A quantized weight: which tensors it has. Some may be missing."""

    name: str
    """The module ("model.layers.0.mlp.up_proj") or the stack ("model.layers.0.mlp.experts.down_proj")."""
    storage: Storage
    parts: Mapping[Role, T]

    @property
    def codes(self) -> T:
        return self.parts["codes"]

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def missing(self) -> list[str]:
        """Names of the tensors that it lacks."""
        return [self.name + rule.suffix for rule in self.storage.required if rule.role not in self.parts]


def all_storages() -> list[Storage]:
    """Every storage of every layout, those that are told from others by most tensors first."""
    found = {storage.name: storage for layout in LAYOUTS.values() for storage in (*layout.storages, *layout.read_only)}
    told = {
        name: sum(rule.tells != "nothing" for rule in storage.parts) + len(storage.without)
        for name, storage in found.items()
    }
    return sorted(found.values(), key=lambda storage: -told[storage.name])


def find_stored(tensors: Mapping[str, T]) -> Iterator[StoredWeight[T]]:
    """The quantized weights of a checkpoint, in the order of the tensors that hold their codes."""
    by_dtype: dict[str, list[Storage]] = {}
    for storage in all_storages():
        for dtype in storage.codes.dtypes:
            by_dtype.setdefault(dtype, []).append(storage)
    for name, tensor in tensors.items():
        for storage in by_dtype.get(tensor.dtype, ()):
            if _is_codes(name, tensor, storage):
                weight = name.removesuffix(storage.codes.suffix)
                if _is_told(weight, storage, tensors):
                    parts = {rule.role: tensors.get(weight + rule.suffix) for rule in storage.parts}
                    yield StoredWeight(
                        weight, storage, {role: part for role, part in parts.items() if part is not None}
                    )
                    break


def _is_codes(name: str, tensor: TensorHeader, storage: Storage) -> bool:
    """Whether a tensor could hold the codes of that storage, by its name."""
    if not storage.codes.suffix:  # a stack under its own name
        return is_stack(name) and not callable(storage.codes.shape) and len(tensor.shape) == len(storage.codes.shape)
    return name.endswith(storage.codes.suffix)


def _is_told(weight: str, storage: Storage, tensors: Mapping[str, T]) -> bool:
    """Whether the tensors beside the codes are those that tell this storage from others."""
    if any(weight + suffix in tensors for suffix in storage.without):
        return False
    for rule in storage.parts:
        if rule.tells == "nothing":
            continue
        part = tensors.get(weight + rule.suffix)
        if part is None or (rule.tells == "dtype" and part.dtype not in rule.dtypes):
            return False
    return True


def code_suffixes() -> tuple[str, ...]:
    """Endings of tensors that hold codes in some layout and never a plain weight."""
    return tuple({storage.codes.suffix for storage in all_storages()} - {"", ".weight"})


def companion_suffixes() -> tuple[str, ...]:
    """Endings of tensors that mean nothing without the weight they belong to."""
    every = {rule.suffix for storage in all_storages() for rule in storage.parts}
    return tuple(every - {"", ".weight", ".scale"})  # a .scale may be a parameter of its own


def unneeded_suffixes() -> tuple[str, ...]:
    """Endings of tensors that describe activations or shapes: a conversion may leave them out."""
    roles = ("input_multiplier", "input_divisor", "shape")
    return tuple({rule.suffix for storage in all_storages() for rule in storage.parts if rule.role in roles})


def read_config(config: Json) -> Claim:
    """What a quantization_config says; keys that are missing or of an unexpected type count as absent."""
    if not config:
        return Claim(None, False)
    method = str(config.get("quant_method", ""))
    for layout in LAYOUTS.values():
        if method.startswith(layout.quant_method) and (claim := layout.read_config(config)) is not None:
            return claim
    return Claim(method or None, False, beside=("fp8", "deepseek"))


def known_methods() -> tuple[str, ...]:
    """How the quant_method of every config begins that can be read."""
    return tuple(dict.fromkeys(layout.quant_method for layout in LAYOUTS.values()))
