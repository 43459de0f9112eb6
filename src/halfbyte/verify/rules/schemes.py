"""The schemes of a compressed-tensors config against the tensors that they describe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from halfbyte.layouts.description import Json
from halfbyte.verify.problems import Problem
from halfbyte.verify.rules.groups import Group, group_of, idle_targets, read_groups
from halfbyte.verify.stored import Contents, StoredTensors

FILE = "config.json"

PACKINGS: dict[str, tuple[str, ...]] = {
    "nvfp4": ("nvfp4-pack-quantized",),
    "mxfp4": ("mxfp4-pack-quantized",),
    "fp8": ("float-quantized", "naive-quantized"),
    "int4": ("pack-quantized",),
}
"""Format of stored weights → what configs call it."""

MIXED = "mixed-precision"
"""What the config as a whole is called where its groups differ."""

DEFAULTS: Json = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
"""What readers take a scheme to say where it says nothing."""

KEYS = ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic")

READERS = "vLLM chooses the layer by this and finds no scheme or the wrong one; transformers decodes by it"


def scheme_problems(config: Json, contents: Contents, plain: Sequence[str]) -> Iterator[Problem]:
    """Every value of the config that is not what the tensors are.

    plain: modules with an unquantized matrix, which targets may match as well.
    """
    weights = [
        weight for weight in contents.quantized.values() if weight.storage.layout in ("compressed-tensors", "fp8")
    ]
    if not weights:
        return
    groups = [group for group in read_groups(config) if not group.is_attention]
    members: dict[str, list[StoredTensors]] = {}
    for weight in weights:
        group = group_of(weight.name, groups)
        if group is None:
            text = (
                f"stored as {weight.storage.name}, but no target of config_groups matches it: readers take it as plain"
            )
            yield Problem("error", "targets", weight.name, text)
        else:
            members.setdefault(group.name, []).append(weight)
    for group, target in idle_targets(groups, [*contents.quantized, *plain]):
        text = f"config_groups.{group.name}: target {target!r} matches no module of the checkpoint"
        yield Problem("warning", "targets", FILE, text)
    for group in groups:
        if group.name in members:
            yield from _group(group, members[group.name], config)
    yield from _whole(config, groups, members)


def _group(group: Group, members: Sequence[StoredTensors], config: Json) -> Iterator[Problem]:
    """One group against the weights that it describes; of weights that are stored alike, the first speaks for all."""
    alike: dict[tuple[object, ...], list[StoredTensors]] = {}
    for weight in members:
        alike.setdefault(tuple(_wanted(weight).values()), []).append(weight)
    for weights in alike.values():
        first, scheme = weights[0], group.weights or {}
        who = first.name if len(weights) == 1 else f"{first.name} and {len(weights) - 1} more"
        for key, wanted in _wanted(first).items():
            said = scheme.get(key, DEFAULTS.get(key))
            if said != wanted:
                yield _wrong(f"config_groups.{group.name}.weights.{key}", said, f"{wanted!r} by the tensors of {who}")
        packings = PACKINGS[first.storage.format]
        said = group.format if group.format is not None else config.get("format")
        if said not in packings:
            yield _wrong(f"config_groups.{group.name}.format", said, f"{packings[0]!r} by the tensors of {who}")
        yield from _inputs(group, first)


def _inputs(group: Group, weight: StoredTensors) -> Iterator[Problem]:
    """NVFP4 weights take NVFP4 activations or none."""
    inputs, nvfp4 = group.inputs, weight.storage.format == "nvfp4"
    if inputs is None or not nvfp4:
        return
    for key, wanted in (("num_bits", 4), ("type", "float"), ("strategy", "tensor_group"), ("group_size", 16)):
        if inputs.get(key, DEFAULTS.get(key)) != wanted:
            where = f"config_groups.{group.name}.input_activations.{key}"
            yield _wrong(where, inputs.get(key), f"{wanted!r}: NVFP4 weights go with NVFP4 activations or with null")


def _whole(config: Json, groups: Sequence[Group], members: dict[str, list[StoredTensors]]) -> Iterator[Problem]:
    """What the config says of the checkpoint as a whole."""
    stored = {weight.storage.format for weights in members.values() for weight in weights}
    named = {group.format for group in groups if group.name in members and group.format is not None}
    wanted = PACKINGS[next(iter(stored))] if len(stored) == 1 else (MIXED,)
    if stored and config.get("format") not in (*wanted, *((MIXED,) if len(named) > 1 else ())):
        yield _wrong("format", config.get("format"), f"{wanted[0]!r} by the tensors")
    status = config.get("quantization_status", "initialized")
    if status != "compressed":
        text = (
            f"quantization_status is {status!r}, but the tensors are packed: transformers builds plain layers for them"
        )
        yield Problem("error", "scheme", FILE, text)


def _wanted(weight: StoredTensors) -> dict[str, Any]:
    """What a scheme must say of a weight that is stored so."""
    storage = weight.storage
    if storage.format in ("nvfp4", "mxfp4"):
        strategy = "tensor_group" if storage.has_tensor_scale else "group"
        values = (4, "float", strategy, storage.block, True, False)
        return dict(zip(KEYS, values, strict=True))
    sizes, scales = storage.sizes(weight.codes.shape), weight.parts.get("scales")
    if sizes is None or scales is None:
        return {}
    _, rows, columns = sizes
    if storage.format == "int4":
        length = columns // (math.prod(scales.shape[1:]) or 1)
        grouped: dict[str, Any] = {"strategy": "group", "group_size": length} if length != columns else {}
        return {"num_bits": 4, "type": "int", **grouped, "symmetric": True}
    count = math.prod(scales.shape)
    strategy = "tensor" if count == 1 else "channel" if count == rows else "block"
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}


def _wrong(where: str, said: object, wanted: str) -> Problem:
    return Problem("error", "scheme", FILE, f"{where} is {said!r}, but {wanted}; {READERS}")
