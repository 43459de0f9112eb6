"""The second half of planning: chosen weights get tensors, places and config files; every source tensor its account."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from halfbyte.checkpoint.io.index import CONFIG, INDEX, Checkpoint, Tensor
from halfbyte.checkpoint.io.views import SourceMatrix, View
from halfbyte.checkpoint.plan.select import Selector
from halfbyte.checkpoint.plan.source_weights import SourceWeight
from halfbyte.checkpoint.plan.target import MEANING, Target, activations_of, input_scales
from halfbyte.checkpoint.plan.types import Action, Copy, Options, Plan, Shard, SourceFile, Unit, place
from halfbyte.errors import CheckpointError
from halfbyte.layouts.description import Activations, LogicalWeight, Part, Setting
from halfbyte.layouts.exclude import exclude_list
from halfbyte.models import Model
from halfbyte.models.experts import expert_module
from halfbyte.models.families import is_lookup_table
from halfbyte.models.names import is_expert, is_row_parallel, routed_layer


@dataclass
class Draft:
    """What is known of the outputs before they have places."""

    checkpoint: Checkpoint
    model: Model
    target: Target
    converted: list[SourceWeight] = field(default_factory=list)
    decoded: list[SourceWeight] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    gathered: list[tuple[Tensor, Part, SourceMatrix]] = field(default_factory=list)
    owned: dict[str, str] = field(default_factory=dict)
    """Source tensor → the module that takes it in."""
    dropped: dict[str, str] = field(default_factory=dict)
    groups: list[tuple[str, ...]] = field(default_factory=list)

    def claim(self, weight: SourceWeight) -> None:
        for name in (weight.tensor.name, *weight.belongs):
            self.owned[name] = weight.module
        for name in weight.dropped:
            self.dropped[name] = f"activation scale of {weight.module} in the source's own format"


def assemble(draft: Draft, options: Options, selector: Selector) -> Plan:
    """Outputs file by file with their places; config and index; what the user should know."""
    checkpoint, target = draft.checkpoint, draft.target
    have = bool(draft.converted) and all(weight.sources[0].input_scale is not None for weight in draft.converted)
    kind, activations = activations_of(options, target, have)
    scales = input_scales(kind, options, draft.groups)
    _split_biases(draft)
    group_of = {module: number for number, group in enumerate(draft.groups) for module in group}
    wanted: dict[str, list[Part]] = defaultdict(list)
    copied: dict[str, list[Tensor]] = defaultdict(list)
    made: dict[str, list[tuple[str, Action, tuple[SourceMatrix, ...], tuple[Part, ...]]]] = defaultdict(list)
    for tensor in checkpoint.tensors.values():
        if tensor.name not in draft.owned and tensor.name not in draft.dropped:
            copied[tensor.file].append(tensor)
            wanted[tensor.file].append(Part(tensor.name, tensor.info.dtype, tensor.info.shape, "values"))
    for weight in draft.converted:
        made[weight.tensor.file].append(
            (weight.module, _action(weight, target), weight.sources, _parts(weight, target, activations))
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
        copies = tuple(Copy(file, tensor.info.start, placed[tensor.name]) for tensor in copied[file])
        units = tuple(
            Unit(
                module,
                action,
                sources,
                tuple(placed[part.name] for part in parts),
                group_of.get(module, -1),
                scales.get(module),
            )
            for module, action, sources, parts in made[file]
        )
        shards.append(Shard(file, header, size, copies, units))
    _check_names(shards)
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
        notes=tuple(_notes(draft, selector)),
        json_files=_json_files(draft, activations, shards),
    )


def _action(weight: SourceWeight, target: Target) -> Action:
    if target.format is None:
        return "decode"
    if weight.kind == target.format.name:
        return "relayout"
    return "cast" if weight.kind == "mxfp4" else "quantize"


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
    """Biases of stacked experts that were taken apart are taken apart as well."""
    stacks: dict[str, int] = {}
    for weight in draft.converted:
        if not weight.stacked and is_expert(weight.module) and weight.tensor.name.endswith(("_blocks", "_proj")):
            stacks[weight.tensor.name.removesuffix("_blocks")] = 0
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


def _json_files(draft: Draft, activations: Activations, shards: Sequence[Shard]) -> dict[str, dict[str, Any]]:
    """config.json without the source's quantization and with ours; the index; what else the layout wants."""
    checkpoint, target = draft.checkpoint, draft.target
    config: dict[str, Any] = copy.deepcopy(dict(checkpoint.config))
    config.pop("quantization_config", None)
    text = config.get("text_config")
    if isinstance(text, dict):
        text.pop("quantization_config", None)
    if draft.decoded:
        for place_ in (config, text if isinstance(text, dict) else {}):
            for key in ("dtype", "torch_dtype"):
                if key in place_:
                    place_[key] = "bfloat16"
    files: dict[str, dict[str, Any]] = {}
    if target.format is not None:
        quantized = [weight.module for weight in draft.converted]
        setting = Setting(target.format, activations, quantized, _excluded(draft, quantized), checkpoint.quantization)
        config["quantization_config"] = target.layout.quantization_config(setting)
        files |= target.layout.extra_files(setting)
    files[CONFIG] = config
    if len(shards) > 1 or shards[0].name != "model.safetensors":
        weight_map = {output.part.name: shard.name for shard in shards for output in shard.outputs}
        total = sum(shard.size - len(shard.header) for shard in shards)
        files[INDEX] = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return files


def _excluded(draft: Draft, quantized: Sequence[str]) -> list[str]:
    """Modules that a reader would take for quantized linear layers: all that are kept but lookup tables."""
    excluded = [module for module in draft.kept if not is_lookup_table(module)]
    for name, tensor in draft.checkpoint.tensors.items():  # convolutions
        if name.endswith(".weight") and len(tensor.info.shape) > 2 and name not in draft.owned:
            excluded.append(name.removesuffix(".weight"))
    if draft.model.tied_head:
        excluded.append("lm_head")
    excluded += _whole_experts(excluded, quantized)
    return exclude_list(excluded, quantized)


def _whole_experts(excluded: Sequence[str], quantized: Sequence[str]) -> list[str]:
    """Names of expert layers that are kept as a whole: SGLang asks for the layer, not for its experts."""

    def layers(modules: Sequence[str]) -> set[str]:
        return {layer for layer in map(routed_layer, modules) if layer is not None}

    return sorted(layers(excluded) - layers(quantized))


def _notes(draft: Draft, selector: Selector) -> list[str]:
    notes = [f"pattern {pattern!r} matches no module" for pattern in selector.unused()]
    format, layout = draft.target.format, draft.target.layout.name
    if format is None:
        return notes
    narrow = [
        weight.module
        for weight in draft.converted
        if is_row_parallel(weight.module) and weight.sources[0].columns % (8 * format.block)
    ]
    if narrow:
        notes.append(
            f"{len(narrow)} row-parallel modules, {narrow[0]} first, are too narrow for 8-way tensor parallelism"
        )
    moved = sum(_action(weight, draft.target) == "relayout" for weight in draft.converted)
    if moved:
        notes.append(f"{moved} weights are {format.name} already: their codes stay, whatever the method and contract")
    mixed = _mixed_experts(draft)
    if mixed is not None:
        notes.append(
            f"{mixed[0]} is quantized and {mixed[1]} kept: servers want all experts of a layer alike and will not load "
            "this; keep or include them all"
        )
    experts = any(is_expert(weight.module) or weight.stacked for weight in draft.converted)
    if experts and layout == "compressed-tensors" and format.has_global:
        notes.append(
            "transformers (through 5.22) reads NVFP4 experts in this layout wrongly and silently; vLLM reads them"
        )
    if draft.model.family.name == "gpt-oss" and format.has_global:
        notes.append(
            "no server reads gpt-oss in NVFP4 yet: its experts have biases, for which their kernels have no place"
        )
    counts = Counter(weight.kind for weight in draft.decoded)
    if counts:
        listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        notes.append(f"weights that become BF16 because they are kept: {listed}")
    return notes


def _mixed_experts(draft: Draft) -> tuple[str, str] | None:
    """A routed expert's module that is quantized, and one of the same layer that is kept."""
    quantized = {routed_layer(weight.module): weight.module for weight in draft.converted}
    for module in draft.kept:
        layer = routed_layer(module)
        if layer is not None and layer in quantized:
            return quantized[layer], module
    return None
