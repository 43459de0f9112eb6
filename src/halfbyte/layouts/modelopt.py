"""Model-Optimizer's layout: weight (packed), weight_scale, weight_scale_2 (a multiplier), input_scale.

vLLM, SGLang and TensorRT-LLM read it; transformers does not. Scalars are float32 of rank 0. Stacked experts (Llama-4,
gpt-oss) keep one tensor for all of them, each matrix transposed, with underscores in the names.
"""

from __future__ import annotations

from typing import Any

from halfbyte.layouts.description import FLOATS, Claim, Json, Layout, PartRule, Reader, Setting, Storage, texts
from halfbyte.layouts.matching import sglang_modelopt, tensorrt_llm, vllm_modelopt

PRODUCER = {"name": "modelopt", "version": "0.47.0"}
"""Readers choose by this name; the version is the one whose layout this is."""

CONFIG_FILE = "hf_quant_config.json"

AWQ = "was quantized with AWQ's pre_quant_scale, which no other layout has a place for"

MATRIX = Storage(
    name="nvfp4 (modelopt)",
    layout="modelopt",
    format="nvfp4",
    block=16,
    parts=(
        PartRule("codes", ".weight", ("U8",), ("rows", "packed")),
        PartRule("scales", ".weight_scale", ("F8_E4M3",), ("rows", "blocks")),
        PartRule("multiplier", ".weight_scale_2", ("F32",), ()),
        PartRule("input_multiplier", ".input_scale", ("F32",), (), optional=True),
        PartRule("prescale", ".pre_quant_scale", FLOATS, ("columns",), optional=True, refusal=AWQ),
    ),
)
STACK = Storage(
    name="nvfp4 stack (modelopt)",
    layout="modelopt",
    format="nvfp4",
    block=16,
    parts=(
        PartRule("codes", "", ("U8",), ("experts", "packed", "rows")),
        PartRule("scales", "_weight_scale", ("F8_E4M3",), ("experts", "blocks", "rows")),
        PartRule("multiplier", "_weight_scale_2", ("F32",), ()),
        PartRule("input_multiplier", "_input_scale", ("F32",), (), optional=True),
    ),
)


def algorithm(setting: Setting) -> str:
    """The name of the scheme in configs."""
    return "NVFP4" if setting.activations == "static" else "W4A16_NVFP4"


def write_config(setting: Setting) -> dict[str, Any]:
    scheme = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": setting.format.block}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": scheme}
    if setting.activations == "static":
        group["input_activations"] = scheme
    cache = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}} if setting.fp8_cache else {}
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm(setting),
        "config_groups": {"group_0": group},
        **cache,
        "ignore": list(setting.excluded),
        "producer": PRODUCER,
    }


def extra_files(setting: Setting) -> dict[str, dict[str, Any]]:
    quantization = {
        "quant_algo": algorithm(setting),
        "kv_cache_quant_algo": "FP8" if setting.fp8_cache else None,
        "group_size": setting.format.block,
        "exclude_modules": list(setting.excluded),
    }
    return {CONFIG_FILE: {"producer": PRODUCER, "quantization": quantization}}


def read_config(config: Json) -> Claim:
    algorithm = str(config.get("quant_algo", "")).upper()
    layers = config.get("quantized_layers") if algorithm == "MIXED_PRECISION" else None
    return Claim(
        layout="modelopt",
        activations=algorithm == "NVFP4",
        ignore=texts(config.get("ignore", config.get("exclude_modules"))),
        formats=("nvfp4",) if "NVFP4" in algorithm or layers else (),
        layers=tuple(layers) if isinstance(layers, dict) else None,
        beside=("fp8",) if layers else (),
    )


def read_config_file(content: Json) -> Json:
    nested = content.get("quantization")
    return {"quant_method": "modelopt", **nested} if isinstance(nested, dict) else {}


LAYOUT = Layout(
    name="modelopt",
    quant_method="modelopt",
    storages=(MATRIX, STACK),
    write_config=write_config,
    extra_files=extra_files,
    config_file=CONFIG_FILE,
    read_config_file=read_config_file,
    read_config=read_config,
    readers=(
        Reader("vLLM", vllm_modelopt, matches_substrings=True),
        Reader("SGLang", sglang_modelopt),
        Reader("TensorRT-LLM", tensorrt_llm, asks_for_fused=False),
    ),
    stacks="some families",
    all_under="{}*",
)
