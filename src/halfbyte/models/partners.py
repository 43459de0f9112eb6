"""Modules that servers fuse into one matrix. A fused matrix has one tensor scale, so its members must share theirs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from halfbyte.errors import CheckpointError
from halfbyte.models.config import text_part
from halfbyte.models.fused_layers import BY_MODEL_TYPE, DEFAULT, FusedLayer
from halfbyte.models.names import ONE_EXPERT, pattern_of


class FusedLayers:
    """What servers fuse in one model. `names`, where asked for, are modules of the model, its siblings among them."""

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self.layers = tuple(layers)
        self._by_member: dict[str, list[FusedLayer]] = {}
        self._by_served: dict[str, list[FusedLayer]] = {}
        for layer in layers:
            for member in layer.members:
                self._by_member.setdefault(member, []).append(layer)
            if layer.served_as:
                self._by_served.setdefault(layer.served_as, []).append(layer)

    def layer_of(self, module: str, names: Collection[str] = ()) -> FusedLayer | None:
        """The fused layer that a module is part of: the first whose conditions hold."""
        parent, _, leaf = module.rpartition(".")
        for layer in self._by_member.get(leaf, ()):
            if layer.parent and parent.rpartition(".")[2] != layer.parent:
                continue
            if all(_join(parent, sibling) in names for sibling in layer.beside):
                return layer
        return None

    def members(self, parent: str, layer: FusedLayer, names: Collection[str] = ()) -> tuple[str, ...]:
        """The modules of one parent that form a fused layer: not those that belong to another one there."""
        modules = (_join(parent, member) for member in layer.members)
        return tuple(module for module in modules if self.layer_of(module, names) is layer)

    def partners(self, module: str, names: Collection[str] = ()) -> tuple[str, ...]:
        """The modules that servers fuse with this one, itself left out; () where there are none."""
        layer = self.layer_of(module, names)
        if layer is None:
            return ()
        return tuple(member for member in self.members(module.rpartition(".")[0], layer, names) if member != module)

    def served_name(self, module: str, names: Collection[str] = ()) -> str:
        """The module as a server asks for it: experts as a whole layer, fused modules under their common name."""
        expert = ONE_EXPERT.match(module)
        if expert:
            return expert[1]
        layer = self.layer_of(module, names)
        parent = module.rpartition(".")[0]
        if layer is None or not layer.served_as or len(self.members(parent, layer, names)) < 2:
            return module
        return _join(parent, layer.served_as)

    def served_sets(self, served: str) -> list[tuple[str, ...]]:
        """The sets of modules that a served name may stand for; members that may be absent are left out."""
        parent, _, leaf = served.rpartition(".")
        layers = self._by_served.get(leaf, ()) if parent else ()
        sets = [tuple(_join(parent, member) for member in _always(layer)) for layer in layers]
        return sets or [(served,)]

    def groups(self, modules: Collection[str]) -> Iterator[tuple[str, FusedLayer, tuple[str, ...]]]:
        """(parent, fused layer, its modules) for all that have partners, each once, in the order of the modules."""
        names = modules if isinstance(modules, set | frozenset | dict) else set(modules)
        done: set[tuple[str, FusedLayer]] = set()
        for module in modules:
            layer = self.layer_of(module, names)
            parent = module.rpartition(".")[0]
            if layer is not None and (parent, layer) not in done:
                done.add((parent, layer))
                yield parent, layer, self.members(parent, layer, names)


@cache
def fused_layers(*model_types: str) -> FusedLayers:
    """What servers fuse in models of these types: that of the config and, if there is one, that of its text part.

    >>> fused_layers("qwen").partners("h.0.mlp.w1")
    ('h.0.mlp.w2',)
    >>> fused_layers("mixtral").partners("experts.0.w1")
    ('experts.0.w3',)
    """
    own = [layer for model_type in model_types for layer in BY_MODEL_TYPE.get(model_type, ())]
    replaced = {member for layer in own if not layer.parent and not layer.beside for member in layer.members}
    return FusedLayers((*own, *(layer for layer in DEFAULT if not replaced.intersection(layer.members))))


def fused_layers_of(config: Mapping[str, Any]) -> FusedLayers:
    """What servers fuse in the model that a config.json describes."""
    types = [config.get("model_type"), text_part(config).get("model_type")]
    return fused_layers(*(str(found) for found in types if found))


ANY = fused_layers()
"""For a model of an unknown type."""

EVERY = FusedLayers((*DEFAULT, *dict.fromkeys(layer for layers in BY_MODEL_TYPE.values() for layer in layers)))
"""All that is fused in some model: to read served names without knowing the model."""


def partners(module: str, fused: FusedLayers = ANY) -> tuple[str, ...]:
    """The modules that servers fuse with this one, itself left out; () where there are none."""
    return fused.partners(module)


def served_name(module: str, fused: FusedLayers = ANY, names: Collection[str] = ()) -> str:
    """The module as a server asks for it: experts as a whole layer, fused modules under their common name."""
    return fused.served_name(module, names)


def served_sets(served: str) -> list[tuple[str, ...]]:
    """The sets of modules that a served name may stand for in some model: the inverse of `served_name`."""
    return EVERY.served_sets(served)


def served_members(served: str) -> list[str]:
    """The modules that a served name stands for as a rule: the first of `served_sets`."""
    return list(served_sets(served)[0])


def fused_groups(modules: Collection[str], fused: FusedLayers = ANY) -> Iterator[tuple[str, ...]]:
    """The modules of every fused layer that has one of these, each once, in the order of the modules."""
    return (members for _, _, members in fused.groups(modules))


def share_scales(
    modules: Sequence[str],
    quantized: Callable[[str], bool],
    optional: Collection[str] = (),
    strict: bool = False,
    fused: FusedLayers = ANY,
    lacks: Callable[[str, str], bool] = lambda partner, module: False,
) -> tuple[list[tuple[str, ...]], dict[str, str]]:
    """Groups of quantized modules that share one tensor scale, and those that must be kept because a partner is.

    Modules without partners form no group. A quantized module whose partner is not in the checkpoint is an error that
    names both, unless its kind never has one in this model (an up_proj without gates; `strict` takes no such hint from
    what is absent, because the modules are not all of a model). `optional` partners may be absent, and those that the
    architecture does not have (`lacks`: whether that is so of a partner and a module).
    """
    names = dict.fromkeys(modules)
    kinds = set() if strict else {pattern_of(module) for module in modules}
    groups: list[tuple[str, ...]] = []
    kept: dict[str, str] = {}
    for parent, layer, members in fused.groups(names):
        present = [member for member in members if member in names]
        wanted = [member for member in present if quantized(member)]
        if not wanted:
            continue
        if members[0] in wanted:
            _refuse_duplicates(names, parent, layer)
        if len(present) < len(members):
            expected = [member for member in members if member in names or not lacks(member, wanted[0])]
            missing = _missing(parent, expected, names, kinds, (*optional, *layer.optional))
            if missing is not None and strict:
                raise CheckpointError(
                    f"{wanted[0]} shares its scale with {missing}, which was not handed over with it; hand both over "
                    f"in one call, or keep {wanted[0]} unquantized: Rules(keep=({wanted[0]!r},))"
                )
            if missing is not None:
                raise CheckpointError(
                    f"{wanted[0]} shares its scale with {missing}, which is not in the checkpoint; add the missing "
                    f"tensor, or keep {wanted[0]} unquantized (--keep)"
                )
        if len(wanted) < len(present):
            odd = next(member for member in present if member not in wanted)
            kept |= dict.fromkeys(wanted, f"its partner {odd} is kept")
        elif len(wanted) > 1:
            groups.append(tuple(wanted))
    return groups, kept


def _join(parent: str, leaf: str) -> str:
    return f"{parent}.{leaf}" if parent else leaf


def _always(layer: FusedLayer) -> Iterable[str]:
    """The members that every such layer has; all of them where it has none."""
    return [member for member in layer.members if member not in layer.optional] or layer.members


def _refuse_duplicates(names: Collection[str], parent: str, layer: FusedLayer) -> None:
    """Raise if the first member of a fused layer stands beside the same layer fused already."""
    first = _join(parent, layer.members[0])
    for other in layer.on_disk:
        if f"{parent}.{other}" in names:
            raise CheckpointError(f"{first} and {parent}.{other} are both in the checkpoint: one is a duplicate")


def _missing(
    parent: str, members: Sequence[str], names: Collection[str], kinds: set[str], optional: Collection[str]
) -> str | None:
    """The first partner that should be there and is not. `kinds`: names of all modules without their numbers."""
    here = {member.rpartition(".")[2] for member in members if member in names}
    if here == {"q_proj"} and f"{parent}.kv_a_proj_with_mqa" in names:
        return None  # latent attention without a compressed query
    if here == {"kv_a_proj_with_mqa"} and f"{parent}.q_proj" in names:
        return None
    for name in members:
        leaf = name.rpartition(".")[2]
        if leaf in here or leaf in optional:
            continue
        if here == {"up_proj"} and kinds and pattern_of(name) not in kinds:
            continue  # a model without gates
        return name
    return None
