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
