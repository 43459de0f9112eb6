"""Whether the tensors are what config.json and hf_quant_config.json claim, and the two files agree."""

from __future__ import annotations

from collections.abc import Iterator

from halfbyte.checkpoint.io.index import INDEX, Checkpoint, read_json
from halfbyte.layouts import LAYOUTS, modelopt
from halfbyte.layouts.description import Claim, Layout
from halfbyte.models import Model, model_of
from halfbyte.models.config import text_part
from halfbyte.verify.problems import Problem
from halfbyte.verify.rules.activations import activation_problems
from halfbyte.verify.rules.limits import limit_problems
from halfbyte.verify.rules.roles import role_problems
from halfbyte.verify.stored import Contents


def claim_problems(checkpoint: Checkpoint, contents: Contents, claim: Claim) -> Iterator[Problem]:
    """Config against tensors, and the two config files against each other."""
    stored = {
        weight.storage.layout for weight in contents.quantized.values() if weight.storage.format in ("nvfp4", "mxfp4")
    }
    formats = {weight.storage.format for weight in contents.quantized.values() if weight.storage.layout == claim.layout}
    if stored and claim.layout is None:
        text = f"tensors are stored in the layout {', '.join(sorted(stored))}, but no config says so: readers see bytes"
        yield Problem("error", "config", "config.json", text)
    elif claim.formats and claim.layout not in stored:
        text = f"quantization_config speaks of {claim.layout}, but no tensor is stored so"
        yield Problem("error", "config", "config.json", text)
    elif claim.formats and formats and not formats <= set(claim.formats):
        described = ", ".join(dict.fromkeys(format or "another format" for format in claim.formats))
        text = f"quantization_config describes {described}, but tensors are {', '.join(sorted(formats))}"
        yield Problem("error", "config", "config.json", text)
    if not contents.quantized and not contents.stray and claim.layout is None:
        text = "no weight is quantized, and no config says so: this checkpoint is unquantized"
        yield Problem("warning", "unquantized", "config.json", text)
    yield from _others(contents, claim)
    model, layout = model_of(checkpoint.config), LAYOUTS.get(claim.layout or "")
    yield from _stacking(checkpoint, model, layout)
    yield from limit_problems(model, checkpoint.model_type, layout, contents, claim.activations)
    yield from activation_problems(checkpoint.quantization, contents, claim)
    yield from _two_files(checkpoint)
    yield from role_problems(model, contents)
    yield from _index(checkpoint)


def _others(contents: Contents, claim: Claim) -> Iterator[Problem]:
    """Quantized weights of a layout that the config does not speak of."""
    if claim.layout is None:
        return
    seen: set[str] = set()
    explained = (claim.layout, *claim.beside, *(("fp8",) if claim.layout == "modelopt" else ()))  # by its algorithms
    for weight in contents.quantized.values():
        storage = weight.storage
        if storage.layout not in explained and storage.name not in seen:
            seen.add(storage.name)
            text = f"stored as {storage.name}, which a quantization_config of {claim.layout} does not explain"
            yield Problem("error", "config", weight.name, text)


def _stacking(checkpoint: Checkpoint, model: Model, layout: Layout | None) -> Iterator[Problem]:
    """Layouts whose readers know one order of rows only."""
    if layout is not None and layout.stacking is not None and model.stacking != layout.stacking:
        named = checkpoint.model_type or "this one"
        text = f"quant_method {layout.quant_method} is read for {layout.name} models only, not for {named}"
        yield Problem("error", "reader", "config.json", text)


def _two_files(checkpoint: Checkpoint) -> Iterator[Problem]:
    """text_config must not say anything of its own; hf_quant_config.json must say something."""
    outer, inner = (place.get("quantization_config") for place in (checkpoint.config, text_part(checkpoint.config)))
    if isinstance(outer, dict) and isinstance(inner, dict) and inner != outer:
        yield Problem(
            "error",
            "config",
            "config.json",
            "the part for the language model holds another quantization_config than the outer one",
        )
    path = checkpoint.path / modelopt.CONFIG_FILE
    if path.is_file() and not isinstance(read_json(path).get("quantization"), dict):
        yield Problem("error", "config", modelopt.CONFIG_FILE, "has no object called quantization")


def _index(checkpoint: Checkpoint) -> Iterator[Problem]:
    path = checkpoint.path / INDEX
    if not path.is_file():
        return
    metadata = read_json(path).get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(tensor.info.bytes for tensor in checkpoint.tensors.values())
    if said is not None and said != total:
        yield Problem("warning", "index", INDEX, f"total_size says {said} bytes, the tensors have {total}")
