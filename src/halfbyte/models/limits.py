"""What a reader cannot load although the checkpoint is right: by model type, layout and format, with the version seen.

Only what was run or stands in the reader's source. `convert` says it before it writes, `verify` afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Weights = Literal["experts", "dense", "any"]


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
    """Which quantized weights it concerns: those of experts, of other linear layers, or any."""


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


def limits(model_type: str, layout: str, format: str, has_experts: bool, has_dense: bool = True) -> list[Limit]:
    """Which readers cannot load a checkpoint, and why.

    has_experts, has_dense: whether weights of routed experts, and of other linear layers, are quantized.

    >>> [limit.reader for limit in limits("qwen3_moe", "compressed-tensors", "nvfp4", has_experts=True)]
    ['transformers']
    """
    there = {"experts": has_experts, "dense": has_dense, "any": has_experts or has_dense}

    def applies(rule: Rule) -> bool:
        conditions = ((model_type, rule.model_types), (layout, rule.layouts), (format, rule.formats))
        return there[rule.weights] and all(not allowed or given in allowed for given, allowed in conditions)

    return [rule.limit for rule in RULES if applies(rule)]
