"""Which tensors reach which weights: every operation of torch is watched while a loader runs.

A loader may fuse, split, transpose or drop tensors, each in its own way. Here a tensor's name travels with its values,
from storage to storage, through whatever is done to them; what is written into a weight is counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Flow:
    """What was seen: the names whose values lie in a storage, and how many numbers were written into it."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._names: dict[int, set[str]] = defaultdict(set)
        self._written: dict[int, int] = defaultdict(int)
        self._kept: list[Any] = []
        self._read: set[str] = set()
        for name, tensor in tensors.items():
            self._names[self._key(tensor)] = {name}

    def written(self, weight: Any) -> int:
        """How many numbers were written into a weight, at most as many as it has."""
        return min(self._written.get(self._key(weight), 0), int(weight.numel()))

    def names_in(self, weights: list[Any]) -> set[str]:
        """The tensors whose values lie in one of the weights, or were read as a number."""
        return self._read.union(*(self._names.get(self._key(weight), set()) for weight in weights))

    def note(self, inputs: list[Any], targets: list[Any], outputs: list[Any]) -> None:
        """One operation of torch: names go from its inputs to what it writes and returns."""
        names = set().union(*(self._names.get(self._key(tensor), set()) for tensor in inputs))
        if names and not outputs:  # .item(): a loader that fills a weight with the number it read
            self._read |= names
        for tensor in targets:
            self._written[self._key(tensor)] += int(tensor.numel())
        if names:
            for tensor in (*targets, *outputs):
                self._names[self._key(tensor)] |= names

    def _key(self, tensor: Any) -> int:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self._names and key not in self._written:
            self._kept.append(storage)  # a key is the address of a storage, and stays its own while that lives
            self._written[key] = 0
        return key

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note every operation of torch within."""
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        note = self.note

        def tensors_of(value: Any) -> list[Any]:
            return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]

        class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
                result = function(*arguments, **(named or {}))
                places = zip(function._schema.arguments, arguments, strict=False)
                targets = [given for place, given in places if place.alias_info and place.alias_info.is_write]
                note(tensors_of((arguments, named)), tensors_of(targets), tensors_of(result))
                return result

        with Watch():  # type: ignore[no-untyped-call]
            yield
