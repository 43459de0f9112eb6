"""The table of fused layers: which linear layers vLLM and SGLang load as one matrix, and under which name.

Read from the model sources of vLLM 0.32 and SGLang 0.5.23 (`packed_modules_mapping` and the mappings of their weight
loaders). Where the two fuse different sets, the members are those of both together: one scale for all of them is
right in either. `make test-clients` compares this table with the servers' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class FusedLayer:
    """Modules of one parent that servers load as one matrix, by the last parts of their names."""

    members: tuple[str, ...]
    served_as: str = ""
    """What vLLM calls the fused module when it looks it up in an exclude list; "" where servers ask for members."""
    on_disk: tuple[str, ...] = ()
    """Names under which checkpoints hold the members fused already: both at once is a contradiction."""
    parent: str = ""
    """The last part of the parent's name, where only such parents are fused so."""
    beside: tuple[str, ...] = ()
    """Modules of the same parent that must be there: without them the members are not fused so."""
    optional: tuple[str, ...] = ()
    """Members that some layers do not have."""


QKV = FusedLayer(("q_proj", "k_proj", "v_proj"), "qkv_proj", ("qkv_proj", "qkv", "Wqkv", "query_key_value"))
GATE_UP = FusedLayer(("gate_proj", "up_proj"), "gate_up_proj", ("gate_up_proj", "w1"))
LATENT = FusedLayer(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj")

DEFAULT = (
    FusedLayer(("gate_proj",), parent="self_attn"),  # gates the output of attention: no partner
    QKV,
    FusedLayer(("query", "key", "value"), "qkv_proj"),
    FusedLayer(("wq", "wk", "wv"), "qkv_proj", ("wqkv",), optional=("wq", "wk", "wv")),
    GATE_UP,
    FusedLayer(("w1", "w3"), "gate_up_proj"),
    FusedLayer(("c_fc_0", "c_fc_1"), "gate_up_proj"),
    LATENT,
    FusedLayer(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz", ("in_proj_qkvz",)),
    FusedLayer(("in_proj_b", "in_proj_a"), "in_proj_ba", ("in_proj_ba",)),
)
"""What is fused in every model that has modules of these names, unless its model type says otherwise."""

LATENT_GATE = FusedLayer((*LATENT.members, "g_proj"), "fused_qkv_a_g_proj", beside=("q_a_proj", "g_proj"))
DELTA_ATTENTION = (
    FusedLayer(
        (*QKV.members, "b_proj", "f_a_proj", "g_a_proj", "g_proj"),
        "in_proj_qkvgfab",
        beside=("f_a_proj",),
        optional=("g_a_proj", "g_proj"),
    ),
    FusedLayer(("f_b_proj", "g_b_proj"), "fused_fg_b_proj", optional=("g_b_proj",)),
    LATENT_GATE,
)
"""Linear attention of Kimi beside latent attention: vLLM fuses q, k, v, b and f_a, SGLang also g_a."""

CROSS_ATTENTION = FusedLayer(("k_proj", "v_proj"), "kv_proj", parent="encoder_attn")
"""Attention of a decoder to an encoder: the query has another input."""

BY_MODEL_TYPE: Mapping[str, tuple[FusedLayer, ...]] = {
    "qwen": (FusedLayer(("w2", "w1"), "gate_up_proj"),),
    "lfm2": (FusedLayer(("w1", "w3"), "w13"),),
    "lfm2_moe": (FusedLayer(("w1", "w3"), "w13"),),
    "whisper": (CROSS_ATTENTION,),
    "cohere_asr": (CROSS_ATTENTION,),
    "kimi_linear": DELTA_ATTENTION,
    "kimi_k3": DELTA_ATTENTION,
    "glm5_next": DELTA_ATTENTION,
    "glm5_next_text": DELTA_ATTENTION,
    "dots3_note": (LATENT_GATE,),
    "bailing_hybrid": (
        FusedLayer(
            (*QKV.members, "b_proj", "f_proj", "g_proj"),
            "qkvb_proj",
            beside=("b_proj",),
            optional=("f_proj", "g_proj"),
        ),
    ),
    "olmo_hybrid": (FusedLayer((*QKV.members, "g_proj"), "in_proj_qkvg", parent="linear_attn", optional=("g_proj",)),),
    "jet_nemotron": (FusedLayer((*QKV.members, "a_proj", "b_proj", "g_proj"), "qkvabz_proj", beside=("a_proj",)),),
    "k2_horizon": (FusedLayer(QKV.members, "qkv_proj", QKV.on_disk, optional=("v_proj",)),),
    "minimax_m3_text": (
        FusedLayer(
            (*QKV.members, "index_q_proj", "index_k_proj"), "qkv_proj", optional=("index_q_proj", "index_k_proj")
        ),
    ),
    "distilbert": (FusedLayer(("q_lin", "k_lin", "v_lin"), "qkv_proj"),),
    "mpnet": (FusedLayer(("q", "k", "v"), "qkv_proj"),),
    "inkling_text": (FusedLayer((*QKV.members, "r_proj"), "qkvr"),),
    "inkling_model": (FusedLayer(("wq_du", "wk_dv", "wv_dv", "wr_du"), "qkvr"), FusedLayer(("w1", "w3"), "w13")),
    "deepseek_v4": (
        FusedLayer(("wkv", "wgate"), "fused_wkv_wgate", parent="compressor"),
        FusedLayer(("wq_a", "wkv"), "fused_wqa_wkv"),
    ),
    "deepseek_v41": (
        FusedLayer(("wkv", "wgate"), "fused_wkv_wgate", parent="compressor"),
        FusedLayer(("wq_a", "wkv"), "fused_wqa_wkv"),
    ),
    "qwen4_exp": (FusedLayer(("key_proj", "value_proj"), "kv_proj", parent="ple"),),
}
"""Model type, outer or of the text part, → layers that come before the default ones. One without a condition (parent,
beside) takes the place of every default layer that has one of its members."""
