"""What the user should know before running a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from halfbyte.checkpoint.plan.config_files import computes_in_bfloat16
from halfbyte.checkpoint.plan.draft import Draft, action_of
from halfbyte.checkpoint.plan.select import Selector
from halfbyte.layouts.description import Activations
from halfbyte.layouts.exclude import culprit, swallowed
from halfbyte.models import Model
from halfbyte.models.limits import limits
from halfbyte.models.names import ROUTED, is_row_parallel, pattern_of, routed_layer
from halfbyte.models.transformers_limits import single_experts, transformers_limits


def plan_notes(
    draft: Draft, selector: Selector, excluded: Sequence[str], activations: Activations = "none"
) -> list[str]:
    """What is unusual about a conversion, in sentences."""
    notes = [f"pattern {pattern!r} matches no module" for pattern in selector.unused()]
    format = draft.target.format
    if format is None:
        return notes + single_experts(draft.model, [weight.module for weight in draft.decoded if not weight.stacked])
    quantized = [weight.module for weight in draft.converted]
    notes += _told_by_name(draft, quantized)
    if computes_in_bfloat16(draft):
        notes.append(
            "config.json will ask for bfloat16 in place of the source's dtype: transformers decodes packed weights to "
            "BF16 and computes in one dtype"
        )
    if draft.target.layout.run_time_names:
        stored = [name.removesuffix(".weight") for name in draft.checkpoint.tensors if name.endswith(".weight")]
        packed = set(quantized)
        plain = [module for module in stored if module not in packed]  # in the order of the files: notes are stable
        notes += transformers_limits(draft.model, format.name, quantized, plain)
        notes += _never_tried(draft.model)
    narrow = [
        weight.module
        for weight in draft.converted
        if is_row_parallel(weight.module) and weight.sources[0].columns % (8 * format.block)
    ]
    if narrow:
        notes.append(
            f"{len(narrow)} row-parallel modules, {narrow[0]} first, are too narrow for 8-way tensor parallelism"
        )
    moved = sum(action_of(weight, draft.target) == "relayout" for weight in draft.converted)
    if moved:
        notes.append(f"{moved} weights are {format.name} already: their codes stay, whatever the method and contract")
    mixed = _mixed_experts(draft)
    if mixed is not None:
        notes.append(
            f"{mixed[0]} is quantized and {mixed[1]} kept: servers want all experts of a layer alike and will not load "
            "this; keep or include them all"
        )
    notes += _swallowed(draft, excluded)
    found = limits(draft.checkpoint.model_type, draft.target.layout.name, format.name, quantized, activations != "none")
    notes += [limit.text for limit in found]
    counts = Counter(weight.kind for weight in draft.decoded)
    if counts:
        listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        notes.append(f"weights that become BF16 because they are kept: {listed}")
    return notes


def _told_by_name(draft: Draft, quantized: Sequence[str]) -> Iterator[str]:
    """Modules that the table does not have, where their class is not in it either: only their names speak for them."""
    model = draft.model
    if model.architecture is not None and model.architecture.exact:
        return
    patterns = list(dict.fromkeys(pattern_of(module) for module in quantized if not model.is_known(module)))
    if not patterns:
        return
    listed = ", ".join(patterns[:6]) + (f" and {len(patterns) - 6} more" if len(patterns) > 6 else "")
    by_type = (
        "" if model.architecture is None else f", and {model.architecture.name}, of the same type, lacks modules of it"
    )
    yield (
        f"{model.name or 'a model without a name'} is not in the table of architectures{by_type}: modules were told "
        f"apart by their names. Taken for linear layers: {listed}. Look at all of it with --dry-run, decide with "
        "--include and --keep, or ask the model itself with --modules-from-model"
    )


def _never_tried(model: Model) -> Iterator[str]:
    """That nothing is known of how transformers loads a class, where the table has another of its type or none."""
    if model.name and not (model.architecture is not None and model.architecture.exact):
        yield f"whether transformers loads {model.name} packed was not tried: --check-load transformers tells"


def _swallowed(draft: Draft, excluded: Sequence[str]) -> Iterator[str]:
    """Quantized modules that a reader of the layout would take as excluded. Experts that are not alike have a note."""
    linear = [weight.module for weight in draft.converted if ROUTED not in weight.module]
    for reader in draft.target.layout.readers:
        if reader.asks_for_fused:
            for module, asked in swallowed(linear, excluded, reader, draft.model.fused):
                entry = culprit(asked, excluded, reader)
                yield (
                    f"{module} is quantized, but {reader.name} would take {asked} as excluded because {entry} is kept; "
                    "keep or include both"
                )


def _mixed_experts(draft: Draft) -> tuple[str, str] | None:
    """A routed expert's module that is quantized, and one of the same layer that is kept."""
    quantized = {routed_layer(weight.module): weight.module for weight in draft.converted}
    for module in draft.kept:
        layer = routed_layer(module)
        if layer is not None and layer in quantized:
            return quantized[layer], module
    return None
