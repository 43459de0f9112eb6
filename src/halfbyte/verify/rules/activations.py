"""Input scales: in every NVFP4 weight whose activations are quantized, else in none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from halfbyte.layouts.description import Claim, Json
from halfbyte.verify.problems import Problem, number
from halfbyte.verify.rules.groups import group_of, read_groups
from halfbyte.verify.stored import Contents


def activation_problems(config: Json, contents: Contents, claim: Claim) -> Iterator[Problem]:
    """What the config says of the activations of each weight, against the scales that there are."""
    quantizes = _quantizes(config, claim)
    extra = []
    for weight in contents.quantized.values():
        storage = weight.storage
        if storage.format != "nvfp4" or storage.layout != claim.layout:
            continue
        there = storage.input_role in weight.parts
        if quantizes(weight.name) and not there:
            missing = weight.name + storage.rules[storage.input_role].suffix
            text = f"the config says activations are FP4, but {missing} is missing: vLLM uses uninitialised memory"
            yield Problem("error", "input-scale", weight.name, text)
        elif there and not quantizes(weight.name):
            extra.append(weight.name)
    if extra:
        weights = number(len(extra), "weight")
        text = f"{weights} with an input scale, but the config says that activations are not quantized"
        yield Problem("warning", "input-scale", extra[0], text)


def _quantizes(config: Json, claim: Claim) -> Callable[[str], bool]:
    """Whether readers quantize the activations of a module: one answer for all, or by layer, or by group."""
    layers, groups = config.get("quantized_layers"), read_groups(config)
    if str(config.get("quant_algo", "")).upper() == "MIXED_PRECISION" and isinstance(layers, dict):
        named = {
            name: str(entry.get("quant_algo")).upper() for name, entry in layers.items() if isinstance(entry, dict)
        }
        return lambda module: named.get(module) == "NVFP4"
    if claim.layout == "compressed-tensors" and len(groups) > 1:

        def by_group(module: str) -> bool:
            group = group_of(module, groups)
            return group is not None and group.inputs is not None and group.inputs.get("num_bits") == 4

        return by_group
    return lambda module: claim.activations
