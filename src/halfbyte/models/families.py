"""What families of models keep although it is a linear layer, how stacked experts lie, which partners may be absent.

Rules are (pattern, reason); a pattern is searched in the module's full name. A family adds to the policies for all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from halfbyte.models.experts import Stacking
from halfbyte.models.roles import last, part

Rule = tuple[re.Pattern[str], str]


def _rules(**patterns: str) -> tuple[Rule, ...]:
    return tuple((re.compile(pattern), reason.replace("_", " ")) for reason, pattern in patterns.items())


POLICIES: tuple[Rule, ...] = _rules(
    pooler=part("pooler"),
    small_linear_attention_projection=r"linear_attn\.(in_proj_[ab]|in_proj_ba|[ab]_proj)$",
    multi_token_prediction=part("mtp", "nextn", "mtp_layers", "model_mtp"),
    absorbed_at_run_time=last("kv_b_proj"),
    attention_indexer=part("indexer"),
)
"""Linear layers that every family keeps."""

ATTENTION = _rules(attention_of_this_family=part("self_attn", "attn", "attention"))
LINEAR_ATTENTION = _rules(linear_attention_of_this_family=part("linear_attn"))


@dataclass(frozen=True)
class Family:
    """One row of the table."""

    name: str
    model_types: tuple[str, ...]
    keep: tuple[Rule, ...] = ()
    only: re.Pattern[str] | None = None
    """If given: nothing but these modules is quantized."""
    stacking: Stacking | None = None
    stays_stacked: bool = False
    """Model-Optimizer's layout keeps the experts of this family in one tensor."""
    optional: tuple[str, ...] = ()
    """Partners that some layers do not have (a k_proj that serves as v_proj)."""
    expert_limits: Mapping[str, str] = field(default_factory=dict)
    """Format → which reader cannot use experts of that format in any layout, in a sentence."""
    native_fp8: bool = False
    """Modules that are not converted keep the source's FP8 instead of becoming BF16."""


FAMILIES = (
    Family("Llama-4", ("llama4", "llama4_text"), ATTENTION, stacking="transposed", stays_stacked=True),
    Family("Qwen3-Next", ("qwen3_next",), LINEAR_ATTENTION, stacking="halves"),
    Family(
        "Qwen3.5",
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        LINEAR_ATTENTION,
        stacking="halves",
    ),
    Family("Qwen3-VL-MoE", ("qwen3_vl_moe", "qwen3_vl_moe_text"), stacking="transposed"),
    Family("Qwen3-MoE", ("qwen3_moe", "qwen2_moe"), stacking="halves"),
    Family("Mixtral", ("mixtral", "minimax", "minimax_m2"), stacking="halves"),
    Family("DeepSeek-V3", ("deepseek_v3", "deepseek_v32", "deepseek_v2"), ATTENTION, stacking="halves"),
    Family("Kimi", ("kimi_k2", "kimi_k25", "kimi_vl"), ATTENTION, stacking="halves"),
    Family(
        "DeepSeek-V4",
        ("deepseek_v4",),
        _rules(shared_expert_of_this_family=part("shared_experts", "shared_expert")),
        only=re.compile(r"\.experts\.\d+\.(w1|w2|w3|gate_proj|up_proj|down_proj)$"),
        native_fp8=True,
    ),
    Family("GLM", ("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "glm4"), stacking="halves"),
    Family(
        "Nemotron-H",
        ("nemotron_h",),
        _rules(
            attention_of_this_family=last("q_proj", "k_proj", "v_proj", "o_proj"),
            latent_projection=last("fc1_latent_proj", "fc2_latent_proj"),
        ),
        optional=("gate_proj",),
    ),
    Family("Gemma 4", ("gemma4", "gemma4_text"), optional=("v_proj",), stacking="halves"),
    Family(
        "gpt-oss",
        ("gpt_oss",),
        only=re.compile(r"\.experts(\.\d+)?\.(gate_up_proj|gate_proj|up_proj|down_proj)$"),
        stacking="interleaved",
        stays_stacked=True,
        expert_limits={
            "nvfp4": "no server reads gpt-oss in NVFP4 yet: its experts have biases, which their kernels do not take"
        },
    ),
)

UNKNOWN = Family("other", ())


def find_family(model_type: str) -> Family:
    """The family of a model type; UNKNOWN where the table has none."""
    return next((family for family in FAMILIES if model_type in family.model_types), UNKNOWN)
