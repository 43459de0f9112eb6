"""Modules that servers fuse into one matrix. A fused matrix has one tensor scale, so its members must share theirs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from halfbyte.errors import CheckpointError
from halfbyte.models.names import ONE_EXPERT, without_numbers


@dataclass(frozen=True, eq=False)
class FusedLayer:
    """Modules of one parent that servers load as one matrix, by the last parts of their names."""

    members: tuple[str, ...]
    served_as: str = ""
    """What servers call the fused module when they look it up in an exclude list; "" where they ask for members."""
    on_disk: tuple[str, ...] = ()
    """Names under which checkpoints hold the members fused already: both at once is a contradiction."""


FUSED_LAYERS = (
    FusedLayer(("q_proj", "k_proj", "v_proj"), "qkv_proj", ("qkv_proj", "qkv", "Wqkv", "query_key_value")),
    FusedLayer(("query", "key", "value")),
    FusedLayer(("gate_proj", "up_proj"), "gate_up_proj", ("gate_up_proj", "w1")),
    FusedLayer(("w1", "w3")),
    FusedLayer(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
    FusedLayer(("in_proj_qkv", "in_proj_z")),
    FusedLayer(("in_proj_b", "in_proj_a")),
)

LAYER_OF = {member: layer for layer in FUSED_LAYERS for member in layer.members}
SERVED = {layer.served_as: layer for layer in FUSED_LAYERS if layer.served_as}


def partners(module: str) -> tuple[str, ...]:
    """The modules that servers fuse with this one, itself left out; () where there are none."""
    parent, _, leaf = module.rpartition(".")
    layer = LAYER_OF.get(leaf)
    return tuple(_join(parent, member) for member in layer.members if member != leaf) if layer else ()


def served_name(module: str) -> str:
    """The module as a server asks for it: experts as a whole layer, fused modules under their common name."""
    expert = ONE_EXPERT.match(module)
    if expert:
        return expert[1]
    parent, _, leaf = module.rpartition(".")
    layer = LAYER_OF.get(leaf)
    return f"{parent}.{layer.served_as}" if layer and layer.served_as else module


def served_members(served: str) -> list[str]:
    """The modules that a served name stands for: the inverse of `served_name` for all but experts."""
    parent, _, leaf = served.rpartition(".")
    if not parent:
        return [served]
    return [f"{parent}.{member}" for member in (SERVED[leaf].members if leaf in SERVED else (leaf,))]


def fused_groups(modules: Iterable[str]) -> Iterator[tuple[str, FusedLayer]]:
    """(parent, fused layer) of every module that has partners, each once, in the order of the modules."""
    done: set[tuple[str, FusedLayer]] = set()
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        layer = LAYER_OF.get(leaf)
        if layer is not None and (parent, layer) not in done:
            done.add((parent, layer))
            yield parent, layer


def share_scales(
    modules: Sequence[str], quantized: Callable[[str], bool], optional: Collection[str] = (), strict: bool = False
) -> tuple[list[tuple[str, ...]], dict[str, str]]:
    """Groups of quantized modules that share one tensor scale, and those that must be kept because a partner is.

    Modules without partners form no group. A quantized module whose partner is not in the checkpoint is an error that
    names both, unless its kind never has one in this model (an up_proj without gates; `strict` takes no such hint from
    what is absent, because the modules are not all of a model). `optional` partners may be absent.
    """
    names = set(modules)
    kinds = set() if strict else {without_numbers(module) for module in modules}
    groups: list[tuple[str, ...]] = []
    kept: dict[str, str] = {}
    for parent, layer in fused_groups(modules):
        before = f"{parent}." if parent else ""
        present = [before + member for member in layer.members if before + member in names]
        wanted = [member for member in present if quantized(member)]
        if not wanted:
            continue
        if before + layer.members[0] in wanted:
            _refuse_duplicates(names, parent, layer)
        if len(present) < len(layer.members):
            missing = _missing(parent, layer, names, kinds, optional)
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


def _refuse_duplicates(names: set[str], parent: str, layer: FusedLayer) -> None:
    """Raise if the first member of a fused layer stands beside the same layer fused already."""
    first = _join(parent, layer.members[0])
    for other in layer.on_disk:
        if f"{parent}.{other}" in names:
            raise CheckpointError(f"{first} and {parent}.{other} are both in the checkpoint: one is a duplicate")


def _missing(parent: str, layer: FusedLayer, names: set[str], kinds: set[str], optional: Collection[str]) -> str | None:
    """The first partner that should be there and is not. `kinds`: names of all modules without their numbers."""
    here = {member for member in layer.members if _join(parent, member) in names}
    if here == {"q_proj"} and f"{parent}.kv_a_proj_with_mqa" in names:
        return None  # latent attention without a compressed query
    if here == {"kv_a_proj_with_mqa"} and f"{parent}.q_proj" in names:
        return None
    for member in layer.members:
        name = _join(parent, member)
        if member in here or member in optional:
            continue
        if here == {"up_proj"} and kinds and without_numbers(name) not in kinds:
            continue  # a model without gates
        return name
    return None
