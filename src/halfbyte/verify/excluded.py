"""Exclude lists against what is stored: modules that should be listed and are not, and those that a list swallows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from halfbyte.layouts.matching import READERS, tensorrt_llm
from halfbyte.models.experts import is_stack
from halfbyte.models.families import is_lookup_table, is_norm, is_router
from halfbyte.models.partners import served_name
from halfbyte.verify.claim import Claim
from halfbyte.verify.problems import Problem
from halfbyte.verify.stored import FLOATS, Weights


def unquantized_modules(weights: Weights) -> list[str]:
    """Modules with a plain weight matrix that a reader would build as a linear layer or as experts."""
    found = []
    for name, tensor in weights.plain.items():
        rank, floating = len(tensor.info.shape), tensor.info.dtype in FLOATS
        if rank == 2 and floating and name.endswith(".weight"):
            module = name.removesuffix(".weight")
            if not is_lookup_table(module) and not is_norm(module):
                found.append(module)
        elif rank == 3 and floating and is_stack(name):
            found.append(name.rpartition(".")[0])
    return sorted(set(found))


def exclude_problems(weights: Weights, claim: Claim) -> Iterator[Problem]:
    """Both directions, for each reader of the layout."""
    if claim.layers is not None:  # the config names each quantized layer: nothing else is taken as quantized
        yield from _named_layers(weights, claim.layers)
        return
    if claim.layout not in READERS or claim.targets != ("Linear",):
        return
    quantized = [weight.name for weight in weights.quantized.values() if weight.kind.layout == claim.layout]
    plain = unquantized_modules(weights)
    for reader, matches in READERS[claim.layout].items():
        served: dict[str, str] = {}
        for module in quantized:
            served.setdefault(served_name(module), module)
        for asked, module in served.items():
            if matches(asked, claim.ignore):
                culprit = _culprit(claim.ignore, lambda part, asked=asked, matches=matches: matches(asked, part))
                text = f"quantized, but {reader} asks for {asked} and finds it excluded{culprit}: it will not load"
                yield Problem("error", "swallowed", module, text)
        for module in plain:
            if not matches(served_name(module), claim.ignore):
                what = "a router" if is_router(module) else "unquantized"
                text = f"{what}, but not in the exclude list as {reader} reads it: {reader} expects FP4 tensors there"
                yield Problem("error", "not-excluded", module, text)
    if claim.layout == "modelopt":
        for module in quantized:
            if tensorrt_llm(module, claim.ignore):
                culprit = _culprit(claim.ignore, lambda part, module=module: tensorrt_llm(module, part))
                text = f"quantized, but TensorRT-LLM finds it excluded{culprit}"
                yield Problem("error", "swallowed", module, text)


def _named_layers(weights: Weights, layers: Sequence[str]) -> Iterator[Problem]:
    quantized = {weight.name for weight in weights.quantized.values() if weight.kind.format == "nvfp4"}
    for module in sorted(quantized - set(layers)):
        text = "NVFP4, but quantized_layers does not name it: readers take it as unquantized"
        yield Problem("error", "not-listed", module, text)
    for module in sorted(set(layers) - set(weights.quantized)):
        yield Problem("error", "not-listed", module, "named by quantized_layers, but not stored as quantized")


def _culprit(patterns: Sequence[str], matches: object) -> str:
    """Which single entry does it, if one does."""
    if callable(matches):
        for pattern in patterns:
            if matches([pattern]):
                return f" by {pattern!r}"
    return ""
