"""Exclude lists against what is stored: modules that should be listed and are not, and those that a list swallows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from halfbyte.layouts import LAYOUTS
from halfbyte.layouts.description import Claim
from halfbyte.layouts.exclude import culprit, swallowed
from halfbyte.models.experts import is_stack
from halfbyte.models.partners import served_name
from halfbyte.models.roles import role_by_name
from halfbyte.verify.problems import Problem
from halfbyte.verify.stored import FLOATS, Contents


def unquantized_modules(contents: Contents) -> list[str]:
    """Modules with a plain weight matrix that a reader would build as a linear layer or as experts."""
    found = []
    for name, tensor in contents.plain.items():
        rank, floating = len(tensor.info.shape), tensor.info.dtype in FLOATS
        if rank == 2 and floating and name.endswith(".weight"):
            module = name.removesuffix(".weight")
            if role_by_name(module) not in ("table", "norm"):
                found.append(module)
        elif rank == 3 and floating and is_stack(name):
            found.append(name.rpartition(".")[0])
    return sorted(set(found))


def exclude_problems(contents: Contents, claim: Claim) -> Iterator[Problem]:
    """Both directions, for each reader of the layout."""
    if claim.layers is not None:  # the config names each quantized layer: nothing else is taken as quantized
        yield from _named_layers(contents, claim.layers)
        return
    readers = LAYOUTS[claim.layout].readers if claim.layout in LAYOUTS else ()
    if not readers or claim.targets != ("Linear",):
        return
    quantized = [weight.name for weight in contents.quantized.values() if weight.storage.layout == claim.layout]
    plain = unquantized_modules(contents)
    for reader in readers:
        for module, asked in swallowed(quantized, claim.ignore, reader):
            entry = culprit(asked, claim.ignore, reader)
            by = "" if entry is None else f" by {entry!r}"
            text = f"quantized, but {reader.name} asks for {asked} and finds it excluded{by}: it will not load"
            yield Problem("error", "swallowed", module, text)
        for module in plain if reader.asks_for_fused else ():
            if not reader.excludes(served_name(module), claim.ignore):
                what = "a router" if role_by_name(module) == "router" else "unquantized"
                text = f"{what}, but not in the exclude list as {reader.name} reads it, which expects FP4 tensors there"
                yield Problem("error", "not-excluded", module, text)


def _named_layers(contents: Contents, layers: Sequence[str]) -> Iterator[Problem]:
    quantized = {weight.name for weight in contents.quantized.values() if weight.storage.format == "nvfp4"}
    for module in sorted(quantized - set(layers)):
        text = "NVFP4, but quantized_layers does not name it: readers take it as unquantized"
        yield Problem("error", "not-listed", module, text)
    for module in sorted(set(layers) - set(contents.quantized)):
        yield Problem("error", "not-listed", module, "named by quantized_layers, but not stored as quantized")
