"""The second half of planning: chosen weights become output tensors, and these get their places in files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from halfbyte.checkpoint.io.index import Tensor
from halfbyte.checkpoint.io.views import SourceMatrix, View
from halfbyte.checkpoint.plan.cache_scales import place_cache_scales
from halfbyte.checkpoint.plan.calibrated import plan_calibrated
from halfbyte.checkpoint.plan.config_files import json_files
from halfbyte.checkpoint.plan.draft import Draft, action_of
from halfbyte.checkpoint.plan.excluded import excluded_modules
from halfbyte.checkpoint.plan.input_amaxes import input_amaxes
from halfbyte.checkpoint.plan.notes import plan_notes
from halfbyte.checkpoint.plan.select import Selector
from halfbyte.checkpoint.plan.smoothed import factors_of, plan_smoothing
from halfbyte.checkpoint.plan.source_weights import SourceWeight, whole
from halfbyte.checkpoint.plan.target import MEANING, Target, activations_of, input_scales
from halfbyte.checkpoint.plan.types import Action, Copy, Options, Plan, Shard, SourceFile, Unit, place
from halfbyte.errors import CheckpointError
from halfbyte.layouts.description import Activations, LogicalWeight, Part
from halfbyte.models.experts import expert_module
from halfbyte.models.names import is_expert
from halfbyte.smoothing import FILE


def assemble(draft: Draft, options: Options, selector: Selector) -> Plan:
    """The Plan of a draft: every output tensor with its place, the JSON files, and notes for the user."""
    checkpoint, target = draft.checkpoint, draft.target
    have = bool(draft.converted) and all(weight.sources[0].input_scale is not None for weight in draft.converted)
    kind, activations = activations_of(options, target, have)
    smoothing = plan_smoothing(draft, options)
    scales = input_scales(
        kind,
        options,
        draft.groups,
        lambda: _names(draft),
        lambda: input_amaxes(draft, Path(options.statistics or ""), _names(draft), smoothing),
    )
    _split_biases(draft)
    place_cache_scales(draft)
    group_of = {module: number for number, group in enumerate(draft.groups) for module in group}
    wanted: dict[str, list[Part]] = defaultdict(list)
    copied: dict[str, list[Tensor]] = defaultdict(list)
    made: dict[str, list[tuple[str, Action, tuple[SourceMatrix, ...], tuple[Part, ...]]]] = defaultdict(list)
    for tensor in checkpoint.tensors.values():
        if smoothing is not None and tensor.name in smoothing.vectors:
            part = Part(tensor.name, tensor.dtype, tensor.shape, "values")
            source = SourceMatrix("float", tensor.shape[0], 1, whole(tensor, tensor.shape[0], 1))
            made[tensor.file].append((tensor.name, "rescale", (source,), (part,)))
        elif tensor.name not in draft.owned and tensor.name not in draft.dropped:
            copied[tensor.file].append(tensor)
            wanted[tensor.file].append(_copied_part(draft, tensor))
    for weight in draft.converted:
        made[weight.tensor.file].append(
            (weight.module, action_of(weight, target), weight.sources, _parts(weight, target, activations))
        )
    for weight in draft.decoded:
        made[weight.tensor.file].append((weight.module, "decode", weight.sources, (_plain_part(weight),)))
    for tensor, part, source in draft.gathered:
        made[tensor.file].append((part.name, "gather", (source,), (part,)))
    shards = []
    for file in checkpoint.headers:
        wanted[file] += [part for *_, parts in made[file] for part in parts]
        if not wanted[file]:
            continue
        header, placed, size = place(wanted[file], {"format": "pt"})
        copies = tuple(
            Copy(file, tensor.info.start, placed[_copied_part(draft, tensor).name]) for tensor in copied[file]
        )
        units = tuple(
            Unit(
                module,
                action,
                sources,
                tuple(placed[part.name] for part in parts),
                group_of.get(module, -1),
                scales.get(module),
                factors_of(smoothing, module),
            )
            for module, action, sources, parts in made[file]
        )
        shards.append(Shard(file, header, size, copies, units))
    _check_names(shards)
    excluded = [] if target.format is None else excluded_modules(draft)
    planned = plan_calibrated(draft, options, _names(draft) if options.statistics is not None else {})
    return Plan(
        source=checkpoint.path,
        files=tuple(
            SourceFile(name, header.file_size, header.modified, header.digest)
            for name, header in checkpoint.headers.items()
        ),
        side_files=checkpoint.side_files,
        format=target.format,
        contract=target.contract,
        method=target.method,
        repairs=target.repairs,
        layout=target.layout.name if target.format else "plain",
        activations=MEANING[kind] if target.format else "",
        shards=tuple(shards),
        groups=tuple(draft.groups),
        kept=draft.kept,
        dropped=draft.dropped,
        left_out=checkpoint.left_out,
        notes=(*plan_notes(draft, selector, excluded, activations), *draft.notes, *planned.notes),
        json_files={
            **json_files(draft, activations, shards, excluded),
            **({} if smoothing is None else {FILE: smoothing.as_json()}),
        },
        calibrated=planned.calibrated,
        solved=planned.solved,
        smoothing=smoothing,
    )


def _copied_part(draft: Draft, tensor: Tensor) -> Part:
    """What a tensor whose bytes are kept becomes."""
    return draft.moved.get(tensor.name) or Part(tensor.name, tensor.dtype, tensor.shape, "values")


def _names(draft: Draft) -> dict[str, list[str]]:
    """Every name of a module, on disk and at run time → the modules on disk that are meant by it."""
    on_disk = {name.rpartition(".")[0] for name in draft.checkpoint.tensors} | set(draft.kept)
    on_disk |= {module for group in draft.groups for module in group}
    found = {module: [module] for module in on_disk}
    for module in sorted(on_disk):
        for name in draft.model.run_time(module).names:
            if name not in on_disk:
                found.setdefault(name, []).append(module)
    return found


def _parts(weight: SourceWeight, target: Target, activations: Activations) -> tuple[Part, ...]:
    if target.format is None:
        return (_plain_part(weight),)
    source = weight.sources[0]
    count = len(weight.sources) if weight.stacked else 0
    return target.layout.parts(
        LogicalWeight(weight.module, source.rows, source.columns, count), target.format, activations
    )


def _plain_part(weight: SourceWeight) -> Part:
    """The BF16 tensor of a weight. Stacked experts go back to the transposed form in which such models hold them."""
    source = weight.sources[0]
    if weight.stacked:
        return Part(
            weight.module, "BF16", (len(weight.sources), source.columns, source.rows), "values", transposed=True
        )
    return Part(f"{weight.module}.weight", "BF16", (source.rows, source.columns), "values")


def _split_biases(draft: Draft) -> None:
    """Where stacked experts were taken apart, take their biases apart as well."""
    stacks = dict.fromkeys(
        weight.tensor.name.removesuffix("_blocks")
        for weight in draft.converted
        if not weight.stacked and is_expert(weight.module) and weight.tensor.name.endswith(("_blocks", "_proj"))
    )
    for stack in stacks:
        tensor = draft.checkpoint.tensors.get(f"{stack}_bias")
        if tensor is None:
            continue
        draft.owned[tensor.name] = stack
        count, width = tensor.info.shape
        size = tensor.info.bytes // (count * width)
        for expert in range(count):
            for projection, elements in draft.model.projections(stack, width).items():
                offset = tensor.info.start + (expert * width + elements.start) * size
                length = len(range(*elements.indices(width)))
                view = View(tensor.name, tensor.file, tensor.info.dtype, offset, length, 1, elements.step)
                name = f"{expert_module(stack, expert, projection)}.bias"
                part = Part(name, tensor.info.dtype, (length,), "values")
                draft.gathered.append((tensor, part, SourceMatrix("float", length, 1, view)))


def _check_names(shards: Sequence[Shard]) -> None:
    seen: dict[str, str] = {}
    for shard in shards:
        for output in shard.outputs:
            other = seen.setdefault(output.part.name, shard.name)
            if other != shard.name:
                raise CheckpointError(
                    f"two output tensors would be called {output.part.name}: in {other} and {shard.name}"
                )
