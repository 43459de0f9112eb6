"""What a reader cannot load although the checkpoint is right: by model type, layout and format, with the version seen.

Only what was run or stands in the reader's source. `convert` says it before it writes, `verify` afterwards.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from halfbyte.models.fused_layers import GATE_UP, QKV
from halfbyte.models.names import ROUTED

Weights = Literal["experts", "dense", "fused", "any"]

FUSED = tuple(name for layer in (QKV, GATE_UP) for name in layer.on_disk if name != "w1")
"""Last parts of modules that are stored as the one matrix that servers make of several."""


@dataclass(frozen=True)
class Limit:
    """One thing that a reader cannot do, in a sentence."""

    reader: str
    text: str


@dataclass(frozen=True)
class Rule:
    """When a limit applies. Empty conditions hold always."""

    limit: Limit
    model_types: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    weights: Weights = "any"
    """Which quantized weights it concerns: those of experts, of other linear layers, of such that are stored fused, or
    any."""
    unquantized_inputs: bool = False
    """Whether it holds only where activations stay as they are (W4A16)."""


DROPPED = {
    "qwen": "0.23",
    "baichuan": "0.23",
    "internlm": "0.23",
    "xverse": "0.23",
    "aquila": "0.24",
    "telechat": "0.25",
    "plamo2": "0.26",
    "arctic": "0.28",
}
"""Model types that vLLM had a model for until this version, and that transformers has none for."""

RULES = (
    Rule(
        Limit(
            "transformers",
            "transformers (through 5.22) reads NVFP4 experts in this layout wrongly and silently; vLLM reads them",
        ),
        layouts=("compressed-tensors",),
        formats=("nvfp4",),
        weights="experts",
    ),
    Rule(
        Limit(
            "transformers",
            "transformers (5.22) mixes dtypes in CTRL and stops while computing when its weights were packed",
        ),
        model_types=("ctrl",),
        layouts=("compressed-tensors",),
    ),
    Rule(
        Limit(
            "transformers",
            "transformers (5.22) unpacks weights when the whole model is called, and this one is called by its parts: "
            "load it with quantization_config=CompressedTensorsConfig(dequantize=True)",
        ),
        model_types=("qwen3_omni_moe", "qwen2_5_omni"),
        layouts=("compressed-tensors",),
    ),
    Rule(
        Limit(
            "vLLM, SGLang",
            "no server reads gpt-oss in NVFP4 yet: its experts have biases, which their kernels do not take",
        ),
        model_types=("gpt_oss",),
        formats=("nvfp4",),
        weights="experts",
    ),
    Rule(
        Limit("SGLang", "SGLang (0.5.23) reads MXFP4 in this layout for experts only, not for other linear layers"),
        layouts=("compressed-tensors",),
        formats=("mxfp4",),
        weights="dense",
    ),
    Rule(
        Limit(
            "SGLang",
            "SGLang (0.5.23) fills one of the tensor scales that it has for a layer that is stored fused (qkv_proj, "
            "gate_up_proj) and takes the largest of them, whatever lies in memory: quantize activations too "
            "(--activations unit), or use --layout compressed-tensors",
        ),
        layouts=("modelopt",),
        formats=("nvfp4",),
        weights="fused",
        unquantized_inputs=True,
    ),
    Rule(
        Limit(
            "SGLang",
            "SGLang (0.5.23) has no model of its own for this architecture, and what it falls back to does not read "
            "quantized checkpoints",
        ),
        model_types=("falcon", "gpt_neox", "internvl", "mamba"),
    ),
    Rule(
        Limit(
            "vLLM",
            "vLLM (0.32) builds the projections of Mamba layers unquantized whatever the config says and cannot load "
            "these; keep them (--keep mixer, in Jamba --keep mamba)",
        ),
        model_types=("mamba", "falcon_mamba", "jamba"),
        weights="dense",
    ),
    *(
        Rule(Limit("vLLM", f"vLLM has no model for {model_type} after {version}"), model_types=(model_type,))
        for model_type, version in DROPPED.items()
    ),
)


def limits(
    model_type: str, layout: str, format: str, modules: Collection[str], activations: bool = False
) -> list[Limit]:
    """Which readers cannot load a checkpoint, and why.

    modules: those that are quantized, by name. activations: whether their inputs will be quantized too.

    >>> expert = "model.layers.0.mlp.experts.0.up_proj"
    >>> [limit.reader for limit in limits("qwen3_moe", "compressed-tensors", "nvfp4", [expert])]
    ['transformers']
    """
    there = {
        "experts": any(ROUTED in module for module in modules),
        "dense": any(ROUTED not in module for module in modules),
        "fused": any(ROUTED not in module and _is_stored_fused(module, model_type) for module in modules),
        "any": bool(modules),
    }

    def applies(rule: Rule) -> bool:
        conditions = ((model_type, rule.model_types), (layout, rule.layouts), (format, rule.formats))
        allowed = all(not allowed or given in allowed for given, allowed in conditions)
        return allowed and there[rule.weights] and not (rule.unquantized_inputs and activations)

    return [rule.limit for rule in RULES if applies(rule)]


def _is_stored_fused(module: str, model_type: str) -> bool:
    """Whether SGLang fills a layer of several parts from this module alone."""
    return module.endswith(FUSED) or (model_type.startswith("lfm2") and module.endswith(".conv.in_proj"))
