"""Which modules the config files of an output exclude, under every name by which some reader asks for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from halfbyte.checkpoint.plan.draft import Draft
from halfbyte.layouts.description import Layout
from halfbyte.layouts.exclude import exclude_list, swallowed
from halfbyte.models import Model
from halfbyte.models.experts import expert_module, is_stack
from halfbyte.models.names import first_expert, routed_layer
from halfbyte.models.partners import FusedLayers
from halfbyte.models.roles import role_by_name

OUTSIDE = ("tower", "projector")
"""Roles of modules beside the language model. Servers build them with classes of their own, which rename layers."""


def excluded_modules(draft: Draft) -> list[str]:
    """Modules that a reader would take for quantized linear layers: all that are kept but lookup tables, and heads.

    Where a reader of the layout asks under transformers' names, these are listed too; so are the names of layers that
    servers fuse, and towers as a whole. What the caller wants ignored is listed as given.
    """
    quantized = [weight.module for weight in draft.converted]
    model, layout = draft.model, draft.target.layout
    excluded = []
    for module in draft.kept:
        if (module in draft.checkpoint.tensors and not is_stack(module)) or model.role(module) == "table":
            continue  # a parameter of its own, or a table: no reader builds a linear layer of it
        excluded.append(module)
        if layout.run_time_names:
            excluded += [name for name in model.run_time(module).names if not is_stack(name)]
            excluded += _first_expert(module) if is_stack(module) else ()
    packed = {name for module in quantized for name in (module, *model.run_time(module).names)}
    excluded += [head for head in model.heads if head not in packed]
    if layout.run_time_names:
        excluded += _not_stored(draft)
    excluded += _whole_experts(excluded, quantized)
    excluded += _fused(excluded, packed, model.fused)
    excluded += whole_towers([name for name in excluded if model.role(name) in OUTSIDE], packed, layout, model)
    return exclude_list([*excluded, *draft.ignore], quantized, layout.readers, model.fused)


def _not_stored(draft: Draft) -> list[str]:
    """Linear layers that the model has at run time and the checkpoint does not: loaded, they would be wanted packed."""
    architecture = draft.model.architecture
    if architecture is None or not architecture.exact:
        return []
    stored = {name.removesuffix(".weight") for name in draft.checkpoint.tensors}
    stored |= {weight.module for weight in draft.converted}
    found = {name for module in stored for name in draft.model.run_time(module).names}
    wanted = [*architecture.single_linears(), *architecture.repeated("shared", draft.model.layers or 0)]
    return [name for name in wanted if name not in found]


def _first_expert(stack: str) -> list[str]:
    """The names by which vLLM asks whether a layer of experts is quantized."""
    return [expert_module(stack, 0, projection) for projection in ("gate_proj", "up_proj", "down_proj")]


def _whole_experts(excluded: Sequence[str], quantized: Sequence[str]) -> list[str]:
    """Names of expert layers that are kept as a whole: SGLang asks for the layer, not for its experts."""

    def layers(modules: Sequence[str]) -> set[str]:
        return {layer for layer in map(routed_layer, modules) if layer is not None}

    return sorted(layers(excluded) - layers(quantized))


def _fused(excluded: Iterable[str], packed: Collection[str], fused: FusedLayers) -> list[str]:
    """Names of fused layers that are kept: SGLang asks for `qkv_proj`, and most of its models do not tell the members.

    Experts have names of their own (`_whole_experts`).
    """
    names = [name for name in excluded if routed_layer(name) is None]
    others = [name for name in packed if routed_layer(name) is None]
    known = frozenset((*names, *others))
    taken = {fused.served_name(name, known) for name in others}
    return sorted({fused.served_name(name, known) for name in names} - taken)


def whole_towers(outside: Iterable[str], packed: Collection[str], layout: Layout, model: Model) -> list[str]:
    """Entries for all that lies under a tower or projector of which nothing is quantized: SGLang has `attn.proj` where
    the checkpoint has `attn.out_proj`.

    outside: modules that are kept. packed: names of quantized modules, on disk and at run time.
    """
    if not layout.all_under:
        return []
    packed = {first_expert(name) for name in packed}
    branches = set(_branches(packed))
    roots = dict.fromkeys(root for module in outside for root in (_root(module, branches),) if root != module)
    entries = []
    for root in roots:
        last = root.rpartition(".")[2]
        names = (last, root) if role_by_name(last) in OUTSIDE else (root,)  # servers put towers elsewhere in the tree
        for entry in map(layout.all_under.format, names):
            if not any(True for reader in layout.readers for _ in swallowed(packed, [entry], reader, model.fused)):
                entries.append(entry)
                break
    return entries


def _branches(names: Iterable[str]) -> Iterator[str]:
    """Every module that has one of these below it."""
    for name in names:
        parts = name.split(".")
        yield from (".".join(parts[:length]) for length in range(1, len(parts)))


def _root(module: str, branches: Collection[str]) -> str:
    """The largest part of the model around a module that holds nothing quantized."""
    parts = module.split(".")
    roots = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((root for root in roots if root not in branches), module)
