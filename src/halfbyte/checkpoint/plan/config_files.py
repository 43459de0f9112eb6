"""The JSON files of an output: config.json, the index, what the layout wants."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from halfbyte.checkpoint.io.index import CONFIG, INDEX
from halfbyte.checkpoint.plan.draft import Draft
from halfbyte.checkpoint.plan.types import Shard
from halfbyte.layouts.description import Activations, Setting
from halfbyte.models.config import text_parts


def json_files(
    draft: Draft, activations: Activations, shards: Sequence[Shard], excluded: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """config.json with our quantization_config in place of the source's; the index; the layout's own files."""
    checkpoint, target = draft.checkpoint, draft.target
    config: dict[str, Any] = copy.deepcopy(dict(checkpoint.config))
    config.pop("quantization_config", None)
    for text in text_parts(config):
        text.pop("quantization_config", None)
    if draft.decoded:
        _say_bfloat16(config, *text_parts(config))
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
