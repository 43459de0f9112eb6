"""Making a plan: weights are found, chosen and grouped; `assemble` gives them their places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from halfbyte.checkpoint.io.index import Checkpoint, open_checkpoint
from halfbyte.checkpoint.plan.assemble import assemble
from halfbyte.checkpoint.plan.draft import Draft
from halfbyte.checkpoint.plan.select import Selector
from halfbyte.checkpoint.plan.source_weights import Found, SourceWeight, find_source_weights
from halfbyte.checkpoint.plan.target import resolve_target
from halfbyte.checkpoint.plan.transposed import transposed_modules
from halfbyte.checkpoint.plan.types import Options, Plan
from halfbyte.checkpoint.plan.unreadable import keep_unreadable
from halfbyte.checkpoint.plan.unstack import orient, split
from halfbyte.errors import CheckpointError
from halfbyte.layouts.description import FLOATS
from halfbyte.layouts.storage import known_methods
from halfbyte.models import Model, model_of
from halfbyte.models.architectures import from_description
from halfbyte.models.from_model import modules_from_model
from halfbyte.models.partners import share_scales
from halfbyte.models.roles import REASONS


def make_plan(source: Path, options: Options) -> Plan:
    """Plan a conversion from headers, index and config; the model itself is asked only if the options say so."""
    checkpoint = open_checkpoint(source)
    model = _model(checkpoint, options)
    draft = Draft(checkpoint, model, resolve_target(options, model.family), ignore=options.ignore)
    if draft.target.layout.replaces and not checkpoint.quantization:
        raise CheckpointError(
            f"{source}: readers of {model.family.name} expect FP8 outside its experts, and this source is not "
            "quantized; convert the FP8 release of the model"
        )
    selector = Selector(options.rules, model)
    _choose(draft, selector)
    if not draft.converted and not (draft.target.format is None and draft.decoded):
        raise CheckpointError(_nothing(draft))
    return assemble(draft, options, selector)


def _model(checkpoint: Checkpoint, options: Options) -> Model:
    """The model by the table, or by its own code where the caller wants that."""
    if not options.modules_from_model:
        return model_of(checkpoint.config)
    description = modules_from_model(checkpoint.path, options.trust_remote_code)
    named = checkpoint.config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else str(description["model_type"])
    return model_of(checkpoint.config, from_description(name, description))


def _nothing(draft: Draft) -> str:
    counts: dict[str, int] = {}
    for reason in draft.kept.values():
        counts[reason] = counts.get(reason, 0) + 1
    lacks = "quantized weight" if draft.target.format is None else "weight of a linear layer"
    listed = ", ".join(f"{count} {reason}" for reason, count in counts.items()) or f"it holds no {lacks}"
    return f"{draft.checkpoint.path}: nothing to convert ({listed})"


def _choose(draft: Draft, selector: Selector) -> None:
    """Sort every weight: converted, decoded to BF16, or kept as it is."""
    method = str(draft.checkpoint.quantization.get("quant_method", "modelopt"))
    if not method.startswith(known_methods()):
        known = ", ".join(sorted(known_methods()))
        raise CheckpointError(
            f"{draft.checkpoint.path}: quantized by {method!r}, which no reader knows; known: {known}"
        )
    found = find_source_weights(draft.checkpoint)
    weights = found.weights
    quantized_source = any(weight.kind != "float" for weight in weights)
    unreadable = _keep_unreadable(draft, selector, found, quantized_source)
    single: list[SourceWeight] = []
    stacks: dict[str, SourceWeight] = {}
    for weight in weights:
        apart = _unstack(draft, weight)
        single += apart
        if weight.stacked and draft.model.stacking is not None:
            stacks[weight.tensor.name] = orient(weight, draft.model)
    reasons = {weight.module: _reason(draft, selector, weight, quantized_source) for weight in single}
    if draft.target.format is not None:
        reasons |= dict.fromkeys(transposed_modules(draft.checkpoint, draft.model, weights), REASONS["transposed"])
    format = draft.target.format
    if format is not None and format.has_global:
        flat = [*(weight.module for weight in single if not weight.stacked), *unreadable]
        fresh = {weight.module for weight in single if weight.kind != "nvfp4" and reasons[weight.module] is None}
        model = draft.model
        groups, partners = share_scales(
            flat, fresh.__contains__, model.family.optional, fused=model.fused, lacks=model.lacks
        )
        reasons |= partners
        grouped = {module for group in groups for module in group}
        draft.groups = groups + [
            (weight.module,) for weight in single if weight.module not in grouped and reasons[weight.module] is None
        ]
    _refuse_partial(single, reasons)
    draft.kept |= unreadable
    for weight in single:
        reason = reasons[weight.module]
        if reason is None:
            draft.claim(weight)
            (draft.converted if format is not None else draft.decoded).append(weight)
            continue
        if reason:
            draft.kept[weight.module] = reason
        if weight.kind != "float" and not draft.model.family.native_fp8 and weight.tensor.name not in draft.owned:
            plain = stacks.get(weight.tensor.name, weight)  # experts that are kept stay stacked, as their biases do
            draft.claim(plain)
            draft.decoded.append(plain)
    if format is not None:
        _keep_others(draft)


def _keep_others(draft: Draft) -> None:
    """Tensors of two axes and more that are no weight of a linear layer stand among what is kept, with the reason."""
    for name, tensor in draft.checkpoint.tensors.items():
        if len(tensor.shape) < 2 or name in draft.owned or name in draft.dropped or tensor.dtype not in FLOATS:
            continue
        if name.endswith("bias"):
            continue
        module = name.removesuffix(".weight")
        if module in draft.kept:
            continue
        if module == name:
            draft.kept[name] = "a parameter of its own, no weight of a linear layer"
        elif len(tensor.shape) > 2:
            draft.kept[module] = _why_solid(draft, module)


def _why_solid(draft: Draft, module: str) -> str:
    """Why a weight of more than two axes is kept."""
    role = draft.model.role(module)
    if role == "other" and draft.model.is_known(module):
        return "several matrices in one tensor, as experts are stored, which is not taken apart"
    if role in ("other", "linear"):
        return "a convolution, or experts in one tensor that is not taken apart"
    return REASONS[role]


def _keep_unreadable(draft: Draft, selector: Selector, found: Found, quantized_source: bool) -> dict[str, str]:
    """Matrices of a dtype that cannot be converted, with the reason to keep each; an error where there is none."""
    format = draft.target.format
    block = 1 if format is None else format.block
    kept = keep_unreadable(
        found.unreadable,
        lambda module, columns: selector.reason(module, columns, block),
        quantized_source or format is None,
    )
    return kept if format is not None else {}  # where nothing is quantized, nothing is kept from it


def _unstack(draft: Draft, weight: SourceWeight) -> list[SourceWeight]:
    """A stacked weight as the layout stores it: whole, or one weight per expert and projection."""
    if not weight.stacked or draft.model.stacking is None:
        return [weight]
    weight = orient(weight, draft.model)
    stacks = draft.target.layout.stacks
    stays = stacks == "always" or (stacks == "some families" and draft.model.family.stays_stacked)
    if draft.target.format is None or stays:
        return [weight]
    return split(weight, draft.model)


def _reason(draft: Draft, selector: Selector, weight: SourceWeight, quantized_source: bool) -> str | None:
    """Why a weight is not converted. None: it is. "": the target is plain and so is the weight already."""
    format = draft.target.format
    if format is None:
        return "" if weight.kind == "float" else None
    if weight.stacked and draft.model.stacking is None and weight.kind == "float":
        return "stacked experts of a family whose orientation is not known"
    if weight.kind == "float" and quantized_source:
        return "unquantized in the source"
    source = weight.sources[0]
    defaults = weight.kind in ("float", "fp8", "int4") or draft.model.family.native_fp8
    reason = selector.reason(weight.module, source.columns, format.block, defaults)
    if reason is None and draft.target.layout.stacks == "always" and not weight.stacked:
        return f"the {draft.target.layout.name} layout holds stacked experts only"
    return reason


def _refuse_partial(weights: Iterable[SourceWeight], reasons: Mapping[str, str | None]) -> None:
    """Raise if only some of the modules that one tensor holds would be converted."""
    seen: dict[str, tuple[str, bool]] = {}
    for weight in weights:
        convert = reasons[weight.module] is None
        other, before = seen.setdefault(weight.tensor.name, (weight.module, convert))
        if before != convert:
            raise CheckpointError(
                f"{weight.tensor.name} holds {other} and {weight.module}, of which only one would be kept; stacked "
                "experts are kept or converted together"
            )
