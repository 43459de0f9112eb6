"""The JSON files of an output: config.json, the index, what the layout wants; and which modules they exclude."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from halfbyte.checkpoint.io.index import CONFIG, INDEX
from halfbyte.checkpoint.plan.draft import Draft
from halfbyte.checkpoint.plan.types import Shard
from halfbyte.layouts.description import Activations, Setting
from halfbyte.layouts.exclude import exclude_list
from halfbyte.models.experts import expert_module, is_stack
from halfbyte.models.names import routed_layer


def json_files(
    draft: Draft, activations: Activations, shards: Sequence[Shard], excluded: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """config.json with our quantization_config in place of the source's; the index; the layout's own files."""
    checkpoint, target = draft.checkpoint, draft.target
    config: dict[str, Any] = copy.deepcopy(dict(checkpoint.config))
    config.pop("quantization_config", None)
    text = config.get("text_config")
    if isinstance(text, dict):
        text.pop("quantization_config", None)
    if draft.decoded:
        _say_bfloat16(config, text)
    elif computes_in_bfloat16(draft):
        _say_bfloat16(*config.values())
        config.pop("torch_dtype", None)
        config["dtype"] = "bfloat16"
    files: dict[str, dict[str, Any]] = {}
    if target.format is not None:
        quantized = [weight.module for weight in draft.converted]
        setting = Setting(target.format, activations, quantized, excluded, checkpoint.quantization)
        config["quantization_config"] = target.layout.quantization_config(setting)
        files |= target.layout.extra_files(setting)
    files[CONFIG] = config
    if len(shards) > 1 or shards[0].name != "model.safetensors":
        weight_map = {output.part.name: shard.name for shard in shards for output in shard.outputs}
        total = sum(shard.size - len(shard.header) for shard in shards)
        files[INDEX] = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return files


def _say_bfloat16(*places: object) -> None:
    """Put BF16 in place of every dtype that these parts of a config name."""
    for place in places:
        if isinstance(place, dict):
            place |= {key: "bfloat16" for key in ("dtype", "torch_dtype") if key in place}


def computes_in_bfloat16(draft: Draft) -> bool:
    """Whether config.json must ask for BF16: transformers decodes packed weights to it, whatever the rest is."""
    if draft.target.format is None or not draft.target.layout.run_time_names:
        return False
    said = draft.checkpoint.setting("dtype") or draft.checkpoint.setting("torch_dtype")
    return said != "bfloat16" and any(weight.tensor.dtype in ("F16", "F32") for weight in draft.converted)


def excluded_modules(draft: Draft) -> list[str]:
    """Modules that a reader would take for quantized linear layers: all that are kept but lookup tables, and heads.

    Where a reader of the layout asks under transformers' names, these are listed too. What the caller wants ignored is
    listed as given.
    """
    quantized = [weight.module for weight in draft.converted]
    model, run_time = draft.model, draft.target.layout.run_time_names
    excluded = []
    for module in draft.kept:
        if (module in draft.checkpoint.tensors and not is_stack(module)) or model.role(module) == "table":
            continue  # a parameter of its own, or a table: no reader builds a linear layer of it
        excluded.append(module)
        if run_time:
            excluded += [name for name in model.run_time(module).names if not is_stack(name)]
            excluded += _first_expert(module) if is_stack(module) else ()
    packed = {name for module in quantized for name in (module, *model.run_time(module).names)}
    excluded += [head for head in model.heads if head not in packed]
    if run_time:
        excluded += _not_stored(draft)
    excluded += _whole_experts(excluded, quantized)
    return exclude_list([*excluded, *draft.ignore], quantized, draft.target.layout.readers, model.fused)


def _not_stored(draft: Draft) -> list[str]:
    """Linear layers that the model has at run time and the checkpoint does not: loaded, they would be wanted packed."""
    architecture = draft.model.architecture
    if architecture is None or not architecture.exact:
        return []
    stored = {name.removesuffix(".weight") for name in draft.checkpoint.tensors}
    stored |= {weight.module for weight in draft.converted}
    found = {name for module in stored for name in draft.model.run_time(module).names}
    wanted = [*architecture.single_linears(), *architecture.repeated("shared", draft.model.layers or 0)]
    return [name for name in wanted if name not in found]


def _first_expert(stack: str) -> list[str]:
    """The names by which vLLM asks whether a layer of experts is quantized."""
    return [expert_module(stack, 0, projection) for projection in ("gate_proj", "up_proj", "down_proj")]


def _whole_experts(excluded: Sequence[str], quantized: Sequence[str]) -> list[str]:
    """Names of expert layers that are kept as a whole: SGLang asks for the layer, not for its experts."""

    def layers(modules: Sequence[str]) -> set[str]:
        return {layer for layer in map(routed_layer, modules) if layer is not None}

    return sorted(layers(excluded) - layers(quantized))
