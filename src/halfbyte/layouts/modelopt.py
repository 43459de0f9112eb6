"""Model-Optimizer's layout: weight (packed), weight_scale, weight_scale_2 (a multiplier), input_scale.

vLLM, SGLang and TensorRT-LLM read it; transformers does not. Scalars are float32 of rank 0. Stacked experts (Llama-4,
gpt-oss) keep one tensor for all of them, each matrix transposed, with underscores in the names.
"""

from __future__ import annotations

from typing import Any

from halfbyte.formats import BlockFormat
from halfbyte.layouts.description import Activations, Part, Setting, Stack

PRODUCER = {"name": "modelopt", "version": "0.47.0"}
"""Readers choose by this name; the version is the one whose layout this is."""


class ModelOpt:
    """`quant_method: modelopt`."""

    name = "modelopt"
    formats: tuple[str, ...] = ("nvfp4",)

    def parts(self, stack: Stack, format: BlockFormat, activations: Activations) -> tuple[Part, ...]:
        packed, blocks = stack.columns // format.codes_per_byte, stack.columns // format.block
        if stack.count:
            first, join, turned = stack.module, "_", True
            codes_shape: tuple[int, ...] = (stack.count, packed, stack.rows)
            scales_shape: tuple[int, ...] = (stack.count, blocks, stack.rows)
        else:
            first, join, turned = f"{stack.module}.weight", ".", False
            codes_shape, scales_shape = (stack.rows, packed), (stack.rows, blocks)
        parts = [
            Part(first, "U8", codes_shape, "codes", turned),
            Part(f"{stack.module}{join}weight_scale", "F8_E4M3", scales_shape, "scales", turned),
            Part(f"{stack.module}{join}weight_scale_2", "F32", (), "multiplier"),
        ]
        if activations == "static":
            parts.append(Part(f"{stack.module}{join}input_scale", "F32", (), "input_multiplier"))
        return tuple(parts)

    def quantization_config(self, setting: Setting) -> dict[str, Any]:
        scheme = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": setting.format.block}
        group: dict[str, Any] = {"targets": ["Linear"], "weights": scheme}
        if setting.activations == "static":
            group["input_activations"] = scheme
        cache = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}} if setting.fp8_cache else {}
        return {
            "quant_method": "modelopt",
            "quant_algo": _algorithm(setting),
            "config_groups": {"group_0": group},
            **cache,
            "ignore": list(setting.excluded),
            "producer": PRODUCER,
        }

    def extra_files(self, setting: Setting) -> dict[str, dict[str, Any]]:
        quantization = {
            "quant_algo": _algorithm(setting),
            "kv_cache_quant_algo": "FP8" if setting.fp8_cache else None,
            "group_size": setting.format.block,
            "exclude_modules": list(setting.excluded),
        }
        return {"hf_quant_config.json": {"producer": PRODUCER, "quantization": quantization}}


class DeepSeekV4(ModelOpt):
    """Model-Optimizer's tensors for the routed experts of a DeepSeek-V4 checkpoint that stays FP8 elsewhere."""

    name = "deepseek-v4"

    def quantization_config(self, setting: Setting) -> dict[str, Any]:
        return {
            **setting.source,
            "moe_quant_algo": "NVFP4",
            "quantized_layers": {
                module: {"quant_algo": _algorithm(setting), "group_size": setting.format.block}
                for module in setting.quantized
            },
            "ignore": list(setting.excluded),
        }


def _algorithm(setting: Setting) -> str:
    return "NVFP4" if setting.activations == "static" else "W4A16_NVFP4"
