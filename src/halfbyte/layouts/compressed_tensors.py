"""compressed-tensors' layout: weight_packed, weight_scale and, for NVFP4, weight_global_scale, which divides.

transformers, vLLM and SGLang read it. MXFP4 scales are uint8; there is no tensor scale. Experts are one module each.
"""

from __future__ import annotations

from typing import Any

from halfbyte.errors import UnsupportedError
from halfbyte.formats import BlockFormat
from halfbyte.layouts.description import Activations, Part, Setting, Stack

VERSION = "0.20.0"

CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
"""An FP8 cache of keys and values with one scale a layer."""


class CompressedTensors:
    """`quant_method: compressed-tensors`."""

    name = "compressed-tensors"
    formats: tuple[str, ...] = ("nvfp4", "mxfp4")

    def parts(self, stack: Stack, format: BlockFormat, activations: Activations) -> tuple[Part, ...]:
        if stack.count:
            raise UnsupportedError(f"{stack.module}: compressed-tensors has no stacked experts, only one module each")
        module, rows = stack.module, stack.rows
        global_scaled = format.has_global
        parts = [
            Part(f"{module}.weight_packed", "U8", (rows, stack.columns // format.codes_per_byte), "codes"),
            Part(
                f"{module}.weight_scale",
                "F8_E4M3" if global_scaled else "U8",
                (rows, stack.columns // format.block),
                "scales",
            ),
        ]
        if global_scaled:
            parts.append(Part(f"{module}.weight_global_scale", "F32", (1,), "divisor"))
            if activations == "static":
                parts.append(Part(f"{module}.input_global_scale", "F32", (1,), "input_divisor"))
        return tuple(parts)

    def quantization_config(self, setting: Setting) -> dict[str, Any]:
        global_scaled = setting.format.has_global
        pack_format = "nvfp4-pack-quantized" if global_scaled else "mxfp4-pack-quantized"
        scale_dtype = "torch.float8_e4m3fn" if global_scaled else "torch.uint8"
        scheme = {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group" if global_scaled else "group",
            "group_size": setting.format.block,
            "symmetric": True,
            "dynamic": False,
            "scale_dtype": scale_dtype,
            "zp_dtype": scale_dtype,
        }
        inputs = None
        if setting.activations == "static":
            inputs = {**scheme, "dynamic": "local", "observer": "static_minmax"} if global_scaled else {**scheme}
            if not global_scaled:
                inputs["dynamic"] = True
        group = {
            "targets": ["Linear"],
            "format": pack_format,
            "weights": scheme,
            "input_activations": inputs,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": pack_format,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": dict(CACHE) if setting.fp8_cache else None,
            "ignore": list(setting.excluded),
            "config_groups": {"group_0": group},
            "version": VERSION,
        }

    def extra_files(self, setting: Setting) -> dict[str, dict[str, Any]]:
        return {}
