"""Exclude lists against what is stored: modules that should be listed and are not, and those that a list swallows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from halfbyte.checkpoint.io.index import Checkpoint
from halfbyte.layouts import LAYOUTS
from halfbyte.layouts.description import Claim, Reader
from halfbyte.layouts.exclude import culprit, swallowed
from halfbyte.layouts.matching import FULL_NAME
from halfbyte.models import Model
from halfbyte.models.experts import is_stack
from halfbyte.verify.problems import Problem
from halfbyte.verify.rules.groups import group_of, read_groups
from halfbyte.verify.rules.modules import heads_of, is_linear, runtime_names
from halfbyte.verify.stored import FLOATS, Contents


def unquantized_modules(contents: Contents, model: Model) -> list[str]:
    """Modules with a plain weight matrix that a reader would build as a linear layer or as experts."""
    found = []
    for name, tensor in contents.plain.items():
        rank, floating = len(tensor.info.shape), tensor.info.dtype in FLOATS
        if rank == 2 and floating and name.endswith(".weight"):
            module = name.removesuffix(".weight")
            if is_linear(model, module):
                found.append(module)
        elif rank == 3 and floating and is_stack(name):
            found.append(name.rpartition(".")[0])
    return sorted(set(found))


def exclude_problems(checkpoint: Checkpoint, contents: Contents, claim: Claim, model: Model) -> Iterator[Problem]:
    """Both directions, for each reader of the layout."""
    if claim.layers is not None:  # the config names each quantized layer: nothing else is taken as quantized
        yield from _named_layers(contents, claim.layers)
        return
    readers = LAYOUTS[claim.layout].readers if claim.layout in LAYOUTS else ()
    if not readers or not contents.quantized:
        return
    groups = read_groups(checkpoint.quantization)
    quantized = [weight.name for weight in contents.quantized.values() if weight.storage.layout == claim.layout]
    fused = model.fused
    plain = [module for module in unquantized_modules(contents, model) if not groups or group_of(module, groups)]
    for reader in readers:
        for module, asked in swallowed(quantized, claim.ignore, reader, fused):
            entry = culprit(asked, claim.ignore, reader)
            by = "" if entry is None else f" by {entry!r}"
            text = f"quantized, but {reader.name} asks for {asked} and finds it excluded{by}: it will not load"
            yield Problem("error", "swallowed", module, text)
        if reader.asks_for_fused:
            yield from _not_excluded(plain, frozenset(quantized), claim, reader, model)
    yield from _heads(contents, claim, readers, model)
    yield from _idle(contents, claim, model)


def _not_excluded(
    plain: Sequence[str], quantized: frozenset[str], claim: Claim, reader: Reader, model: Model
) -> Iterator[Problem]:
    """Unquantized linear layers that a list does not hold under the name in the file, or not under that at run time."""
    names = quantized.union(plain)
    for module in plain:
        what = "a router" if model.role(module) == "router" else "unquantized"
        if not _is_excluded(module, names, claim.ignore, reader, model):
            text = f"{what}, but not in the exclude list as {reader.name} reads it, which expects FP4 tensors there"
            yield Problem("error", "not-excluded", module, text)
        for named in runtime_names(model, module) if LAYOUTS[claim.layout or ""].run_time_names else ():
            if named != module and not reader.excludes(named, claim.ignore):
                text = f"{what}, and transformers calls it {named}, which is not in the exclude list: it expects FP4"
                yield Problem("error", "not-excluded", module, text)


def _is_excluded(module: str, names: Collection[str], ignore: Sequence[str], reader: Reader, model: Model) -> bool:
    """Under the name that a reader asks for: the common one of a fused layer, unless a partner is not there."""
    if reader.excludes(model.fused.served_name(module, names), ignore):
        return True
    alone = any(partner not in names for partner in model.fused.partners(module, names))
    return alone and reader.excludes(module, ignore)


def _heads(contents: Contents, claim: Claim, readers: Sequence[Reader], model: Model) -> Iterator[Problem]:
    """Heads that are in no file, because they are tied: readers build them all the same."""
    stored = {name for module in (*contents.quantized, *_modules(contents)) for name in runtime_names(model, module)}
    for head in heads_of(model):
        for reader in readers:
            if head not in stored and reader.asks_for_fused and not reader.excludes(head, claim.ignore):
                text = f"the output head, tied to the embedding, but not in the exclude list as {reader.name} reads it"
                yield Problem("error", "not-excluded", head, text)


def _idle(contents: Contents, claim: Claim, model: Model) -> Iterator[Problem]:
    """Entries that name nothing in the checkpoint."""
    modules = [*contents.quantized, *_modules(contents)]
    known = frozenset(modules)
    names = {
        *modules,
        *contents.plain,
        *(model.fused.served_name(module, known) for module in modules),
        *heads_of(model),
        "lm_head",
    }
    every = "\n".join(sorted(names.union(*(runtime_names(model, module) for module in modules))))
    idle = [entry for entry in claim.ignore if not _names_something(entry, every) and not model.is_known(entry)]
    if idle:
        more = f" (and {len(idle) - 1} more)" if len(idle) > 1 else ""
        text = f"the exclude list names {idle[0]!r}{more}, which is no part of the name of any module"
        yield Problem("warning", "idle-entry", "config.json", text)


def _modules(contents: Contents) -> list[str]:
    return [name.rpartition(".")[0] for name in contents.plain]


def _names_something(entry: str, every: str) -> bool:
    """Whether an entry matches some line, in the most generous reading."""
    if FULL_NAME.fullmatch(entry):
        return entry in every
    try:
        if entry.startswith("re:"):
            return re.search(f"^{entry.removeprefix('re:').removeprefix('^')}", every, re.MULTILINE) is not None
        pattern = re.escape(entry).replace(r"\*", ".*").replace(r"\?", ".").removesuffix(r"\.")
        return re.search(pattern, every) is not None
    except re.error:
        return False


def _named_layers(contents: Contents, layers: Sequence[str]) -> Iterator[Problem]:
    quantized = {weight.name for weight in contents.quantized.values() if weight.storage.format == "nvfp4"}
    for module in sorted(quantized - set(layers)):
        text = "NVFP4, but quantized_layers does not name it: readers take it as unquantized"
        yield Problem("error", "not-listed", module, text)
    for module in sorted(set(layers) - set(contents.quantized)):
        yield Problem("error", "not-listed", module, "named by quantized_layers, but not stored as quantized")
