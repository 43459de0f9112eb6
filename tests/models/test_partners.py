"""Who shares a scale, whom a missing partner leaves alone, and what servers call fused modules."""

from __future__ import annotations

import pytest

from halfbyte.errors import CheckpointError
from halfbyte.models.fused_layers import BY_MODEL_TYPE
from halfbyte.models.partners import (
    fused_groups,
    fused_layers,
    fused_layers_of,
    partners,
    served_members,
    served_name,
    served_sets,
    share_scales,
)


def groups(
    *modules: str, kept: tuple[str, ...] = (), optional: tuple[str, ...] = (), model_type: str = ""
) -> list[tuple[str, ...]]:
    fused = fused_layers(model_type)
    return share_scales(modules, lambda module: module not in kept, optional, fused=fused)[0]


def test_partners_are_found() -> None:
    qkv = tuple(f"l.0.self_attn.{name}_proj" for name in "qkv")
    assert groups(*qkv) == [qkv]
    assert groups("l.0.mlp.up_proj", "l.0.mlp.gate_proj", "l.0.mlp.down_proj") == [
        ("l.0.mlp.gate_proj", "l.0.mlp.up_proj")
    ]
    assert groups("e.0.w1", "e.0.w2", "e.0.w3", "e.1.w1", "e.1.w2", "e.1.w3") == [
        ("e.0.w1", "e.0.w3"),
        ("e.1.w1", "e.1.w3"),
    ]
    assert groups("a.q_a_proj", "a.kv_a_proj_with_mqa", "a.q_b_proj") == [("a.q_a_proj", "a.kv_a_proj_with_mqa")]
    assert groups("a.in_proj_qkv", "a.in_proj_z") == [("a.in_proj_qkv", "a.in_proj_z")]
    assert groups("a.in_proj_qkvz", "a.o_proj") == []


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (("a.q_proj", "a.k_proj"), "a.q_proj shares its scale with a.v_proj, which is not in the checkpoint"),
        (("a.k_proj", "a.v_proj"), "a.k_proj shares its scale with a.q_proj"),
        (("a.gate_proj",), "a.gate_proj shares its scale with a.up_proj"),
        (("l.0.up_proj", "l.1.up_proj", "l.1.gate_proj"), "l.0.up_proj shares its scale with l.0.gate_proj"),
        (("e.0.w1",), "e.0.w1 shares its scale with e.0.w3"),
        (("a.q_a_proj",), "a.q_a_proj shares its scale with a.kv_a_proj_with_mqa"),
        (("a.kv_a_proj_with_mqa",), "a.kv_a_proj_with_mqa shares its scale with a.q_a_proj"),
        (("a.q_proj", "a.k_proj", "a.kv_a_proj_with_mqa"), "a.q_proj shares its scale with a.v_proj"),
    ],
)
def test_a_missing_partner_is_named(modules: tuple[str, ...], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        groups(*modules)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "modules", [("a.q_proj", "a.k_proj", "a.v_proj", "a.qkv_proj"), ("a.gate_proj", "a.up_proj", "a.w1", "a.w3")]
)
def test_a_duplicate_partner_is_named(modules: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError, match="are both in the checkpoint: one is a duplicate"):
        groups(*modules)


def test_models_that_lack_a_partner_by_design() -> None:
    assert groups("l.0.up_proj", "l.0.down_proj", "l.1.up_proj") == []  # no gates anywhere
    assert groups("a.q_proj", "a.kv_a_proj_with_mqa", "a.kv_b_proj") == []  # latent attention, plain query
    assert groups("a.q_proj", "a.k_proj", optional=("v_proj",)) == [("a.q_proj", "a.k_proj")]


def test_partners_are_kept_together() -> None:
    modules = ("a.q_proj", "a.k_proj", "a.v_proj")
    found, kept = share_scales(modules, lambda module: module != "a.k_proj")
    assert found == []
    assert kept == dict.fromkeys(("a.q_proj", "a.v_proj"), "its partner a.k_proj is kept")


def test_kept_modules_need_no_partner() -> None:
    assert groups("a.q_proj", kept=("a.q_proj",)) == []


@pytest.mark.parametrize("model_type", ["", *BY_MODEL_TYPE])
def test_a_module_is_in_two_fused_layers_only_on_conditions(model_type: str) -> None:
    layers = [layer for layer in fused_layers(model_type).layers if not layer.parent and not layer.beside]
    members = [member for layer in layers for member in layer.members]
    assert len(members) == len(set(members))


def test_partners_of_one_module() -> None:
    assert partners("a.k_proj") == ("a.q_proj", "a.v_proj")
    assert partners("w3") == ("w1",)
    assert partners("a.down_proj") == ()


@pytest.mark.parametrize(
    ("module", "served"),
    [
        ("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_up_proj"),
        ("model.layers.0.mlp.experts.7.up_proj", "model.layers.0.mlp.experts"),
        ("model.layers.0.mlp.shared_experts.up_proj", "model.layers.0.mlp.shared_experts.gate_up_proj"),
        ("model.layers.0.self_attn.q_a_proj", "model.layers.0.self_attn.fused_qkv_a_proj"),
        ("lm_head", "lm_head"),
    ],
)
def test_names_as_servers_ask_for_them(module: str, served: str) -> None:
    assert served_name(module) == served
    if ".experts." not in module:
        assert module in served_members(served)


def test_qwen_1_fuses_w1_with_w2_and_mixtral_with_w3() -> None:
    modules = [f"h.0.mlp.{leaf}" for leaf in ("w1", "w2", "c_proj")]
    assert groups(*modules, model_type="qwen") == [("h.0.mlp.w2", "h.0.mlp.w1")]
    assert fused_layers("qwen").served_name("h.0.mlp.w1") == "h.0.mlp.gate_up_proj"
    assert fused_layers("mixtral").partners("e.0.w1") == ("e.0.w3",)


def test_exaone_and_mpnet_have_names_of_their_own() -> None:
    assert groups("m.c_fc_0", "m.c_fc_1", "m.c_proj", model_type="exaone") == [("m.c_fc_0", "m.c_fc_1")]
    assert groups("a.q", "a.k", "a.v", "a.o", model_type="mpnet") == [("a.q", "a.k", "a.v")]
    assert groups("a.q", "a.k", "a.v") == []


def test_linear_attention_of_kimi_beside_its_latent_attention() -> None:
    delta = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")
    modules = [f"l.0.self_attn.{leaf}" for leaf in (*delta, "f_b_proj", "g_b_proj", "o_proj")]
    modules += [f"l.3.self_attn.{leaf}" for leaf in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]
    found = groups(*modules, model_type="kimi_linear")
    assert found == [
        tuple(f"l.0.self_attn.{leaf}" for leaf in delta),
        ("l.0.self_attn.f_b_proj", "l.0.self_attn.g_b_proj"),
    ]
    fused = fused_layers("kimi_linear")
    assert fused.served_name("l.0.self_attn.k_proj", set(modules)) == "l.0.self_attn.in_proj_qkvgfab"


def test_latent_attention_with_a_gate() -> None:
    modules = [f"a.{leaf}" for leaf in ("q_a_proj", "kv_a_proj_with_mqa", "g_proj", "q_b_proj")]
    assert groups(*modules, model_type="kimi_k3") == [("a.q_a_proj", "a.kv_a_proj_with_mqa", "a.g_proj")]
    assert groups(*modules, model_type="deepseek_v3") == [("a.q_a_proj", "a.kv_a_proj_with_mqa")]


def test_the_parent_decides_where_the_table_says_so() -> None:
    leaves = ("q_proj", "k_proj", "v_proj", "out_proj")
    modules = [f"d.{attention}.{leaf}" for attention in ("self_attn", "encoder_attn") for leaf in leaves]
    assert groups(*modules, model_type="whisper") == [
        tuple(f"d.self_attn.{leaf}" for leaf in leaves[:3]),
        ("d.encoder_attn.k_proj", "d.encoder_attn.v_proj"),
    ]
    fused = fused_layers("whisper")
    assert fused.served_name("d.encoder_attn.v_proj") == "d.encoder_attn.kv_proj"
    assert fused.served_name("d.encoder_attn.q_proj") == "d.encoder_attn.q_proj"


def test_a_gate_of_attention_has_no_partner() -> None:
    modules = [f"l.0.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj", "gate_proj")]
    assert groups(*modules, model_type="afmoe") == [tuple(modules[:3])]
    assert served_name(modules[3]) == modules[3]


def test_deepseek_v4_by_its_own_names() -> None:
    modules = ["a.wq_a", "a.wkv", "a.compressor.wkv", "a.compressor.wgate", "s.w1", "s.w3"]
    assert list(fused_groups(modules, fused_layers("deepseek_v4"))) == [
        ("a.wq_a", "a.wkv"),
        ("a.compressor.wkv", "a.compressor.wgate"),
        ("s.w1", "s.w3"),
    ]


def test_the_model_type_may_be_that_of_the_text_part() -> None:
    config = {"model_type": "qwen_audio", "text_config": {"model_type": "qwen"}}
    assert fused_layers_of(config).partners("w1") == ("w2",)
    assert fused_layers_of({}).partners("w1") == ("w3",)


def test_a_served_name_may_stand_for_several_sets() -> None:
    assert served_members("a.qkv_proj") == ["a.q_proj", "a.k_proj", "a.v_proj"]
    assert ("a.query", "a.key", "a.value") in served_sets("a.qkv_proj")
    assert ("m.w2", "m.w1") in served_sets("m.gate_up_proj")
    assert served_sets("m.down_proj") == [("m.down_proj",)]
    assert served_sets("qkv_proj") == [("qkv_proj",)]  # no parent that members could have
