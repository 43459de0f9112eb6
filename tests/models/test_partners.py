"""Who shares a scale, whom a missing partner leaves alone, and what servers call fused modules."""

from __future__ import annotations

import pytest

from halfbyte.errors import CheckpointError
from halfbyte.models.partners import FUSED_LAYERS, partners, served_members, served_name, share_scales


def groups(*modules: str, kept: tuple[str, ...] = (), optional: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    return share_scales(modules, lambda module: module not in kept, optional)[0]


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


def test_no_module_is_in_two_fused_layers() -> None:
    members = [member for layer in FUSED_LAYERS for member in layer.members]
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
