"""How readers match exclude lists. vLLM and SGLang themselves are asked in make test-clients."""

from __future__ import annotations

import pytest

from halfbyte.layouts.matching import compressed_tensors, sglang_modelopt, tensorrt_llm, vllm_modelopt


@pytest.mark.parametrize(
    ("pattern", "name", "vllm", "sglang", "tensorrt"),
    [
        ("model.layers.1*", "model.layers.10.mlp.down_proj", True, True, True),
        ("model.layers.1", "model.layers.10.mlp.down_proj", True, False, False),
        ("model.layers.1.*", "model.layers.10.mlp.down_proj", False, False, False),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_up_proj", True, False, False),
        ("*.mlp.gate.*", "model.layers.0.mlp.gate", False, False, False),
        ("*.mlp.gate", "model.layers.0.mlp.gate", True, True, True),
        ("mlp", "model.layers.0.mlp.down_proj", True, True, False),
        ("*", "model.layers.0.mlp.down_proj", True, True, True),
        ("mlp.*", "model.layers.0.mlp.down_proj", False, False, False),
        ("model.layers.0.mlp.experts.0.up_proj", "model.layers.0.mlp", False, False, False),
        ("model.layers.0.mlp.experts.0.up_proj", "model.layers.0.mlp.experts.0", False, True, False),
        ("lm_head", "model.layers.0.mlp.shared_experts.up_proj", False, False, False),
    ],
)
def test_three_readers_of_one_pattern(pattern: str, name: str, vllm: bool, sglang: bool, tensorrt: bool) -> None:
    answers = (vllm_modelopt(name, [pattern]), sglang_modelopt(name, [pattern]), tensorrt_llm(name, [pattern]))
    assert answers == (vllm, sglang, tensorrt)


def test_expressions_of_compressed_tensors() -> None:
    name = "model.layers.0.mlp.gate"
    assert compressed_tensors(name, ["re:.*gate$"])
    assert not compressed_tensors(name, ["re:gate$", "model.layers.0.mlp", "re:("])
    assert compressed_tensors(
        "model.layers.0.self_attn.qkv_proj", [f"model.layers.0.self_attn.{p}_proj" for p in "qkv"]
    )
    assert not compressed_tensors("model.layers.0.self_attn.qkv_proj", ["model.layers.0.self_attn.q_proj"])


@pytest.mark.parametrize(
    ("listed", "asked", "excluded"),
    [
        ("a*", "a", True),
        ("a*", "ba", True),
        ("a.*", "a", False),
        ("a.*", "a.b", True),
        ("*", "x", True),
        ("b*", "a", False),
        ("a?c", "abc", True),
        ("a?c", "abbc", False),
        ("l.experts.0.up_proj", "l.experts", True),
        ("l.gate", "l.experts", False),
        ("m.experts.0", "l.experts", False),
        ("l.experts.0.up_proj", "l.experts.1", False),
    ],
)
def test_vllm(listed: str, asked: str, excluded: bool) -> None:
    """Substrings, file names, and experts whose names hold the one that is asked for."""
    assert vllm_modelopt(asked, ["nothing", listed]) is excluded


def test_a_fused_layer_whose_members_are_listed_without_their_place() -> None:
    leaves = ["q_proj", "k_proj", "v_proj"]
    assert sglang_modelopt("a.qkv_proj", leaves)
    assert not sglang_modelopt("a.qkv_proj", leaves[1:])


def test_fused_layers_are_excluded_member_by_member() -> None:
    members = [f"a.{leaf}_proj" for leaf in "qkv"]
    for reader in (vllm_modelopt, sglang_modelopt, compressed_tensors):
        assert reader("a.qkv_proj", members)
        assert not reader("a.qkv_proj", members[:1])


@pytest.mark.parametrize(
    ("listed", "asked", "excluded"),
    [
        ("a.b", "x.a.b.c", True),
        ("a.b", "x.a.bc", False),
        ("", "x.a.b", False),
        ("b.a", "a.b", False),
        ("a.b.", "x.a.b.c", True),
        ("a.b", "a.b.", True),
        ("re*", "x.real.c", True),
        ("x.*c", "x.real.c", True),
        ("x.*d", "x.real.c", False),
        ("[", "x.[.c", True),
        ("[", "x.y", False),
        ("l.experts.0.up_proj", "l.experts", False),
        ("l.experts", "l.experts", True),
        ("l", "l.experts", True),
        ("l.experts.0.up_proj", "l.experts.0", True),
        ("l.experts.0.up_proj", "m.experts.0", False),
        ("l.gate.1", "l.gate", False),
        ("model.x", "language_model.model.x", True),
        ("x.q_a_proj", "l.fused_qkv_a_proj", False),
        ("x.kv_a_proj_with_mqa", "l.fused_qkv_a_proj", True),
        ("x.kv_b_proj", "l.kv_b_proj", True),
        ("x.q_b_proj", "l.q_proj", False),
        ("x.q_a_proj*", "l.q_a_proj", False),
        ("x+", "xx", True),
        ("a.x", "abx", False),
    ],
)
def test_sglang(listed: str, asked: str, excluded: bool) -> None:
    """Dotted paths, patterns against the name and its parts, projections of latent attention by their last part."""
    assert sglang_modelopt(asked, ["nothing", listed]) is excluded


@pytest.mark.parametrize(
    ("listed", "asked", "excluded"),
    [
        ("a", "a", True),
        ("a", "a.b", False),
        ("a*", "a.b", True),
        ("re:a", "a.b", True),
        ("re:b", "a.b", False),
        ("re:(", "re:(", False),
        ("A*", "a.b", False),
        ("?", "a", True),
    ],
)
def test_tensorrt_llm(listed: str, asked: str, excluded: bool) -> None:
    assert tensorrt_llm(asked, ["nothing", listed]) is excluded


@pytest.mark.parametrize(
    ("listed", "excluded"),
    [
        (["l.experts.0.gate_proj", "l.experts.0.up_proj", "l.experts.0.down_proj"], True),
        (["l.experts.0.gate_proj", "l.experts.0.up_proj"], False),
        (["l.experts.0.w1", "l.experts.0.w2", "l.experts.0.w3"], True),
        (["l.experts.0.w1", "l.experts.0.w2"], False),
        (["l.experts.1.w1", "l.experts.1.w2", "l.experts.1.w3"], False),
        (["re:.*experts"], True),
        (["l.experts"], False),
    ],
)
def test_experts_of_compressed_tensors(listed: list[str], excluded: bool) -> None:
    assert compressed_tensors("l.experts", listed) is excluded


def test_patterns_that_are_no_names() -> None:
    assert compressed_tensors("a b", ["a b"])
    assert not compressed_tensors("a.b", ["a b", "re:b"])
