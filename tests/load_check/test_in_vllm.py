"""What the check of vLLM makes of what it saw. vLLM itself is asked by `make test-clients`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte.load_check.flow import Flow
from halfbyte.load_check.in_vllm import INPUT_SCALE, OPTIONAL, left_alone, missing, quantizes_inputs


def test_weights_that_are_not_filled() -> None:
    sources = {"a": torch.empty(4, device="meta"), "b": torch.empty(4, device="meta")}
    weights = {name: torch.empty(size, device="meta") for name, size in (("full", 4), ("part", 8), ("none", 2))}
    flow = Flow(sources)
    with flow.watching():
        weights["full"].copy_(sources["a"])
        weights["part"][:4].copy_(sources["b"])
    assert list(missing(flow, weights)) == ["part (4 of 8 numbers are there)", "none"]


@pytest.mark.parametrize(
    ("quantization", "wanted"),
    [
        ({}, False),
        ({"quant_algo": "NVFP4"}, True),
        ({"quant_algo": "W4A16_NVFP4"}, False),
        ({"quant_algo": "MIXED_PRECISION"}, False),
        ({"config_groups": {"group_0": {"input_activations": None}}}, False),
        ({"config_groups": {"group_0": {"input_activations": {"dynamic": "local"}}}}, True),
        ({"config_groups": {"group_0": {"input_activations": {"dynamic": True}}}}, False),
    ],
)
def test_whether_input_scales_are_needed(quantization: dict[str, Any], wanted: bool) -> None:
    assert quantizes_inputs(quantization) is wanted


def test_names_of_weights_with_a_default() -> None:
    assert OPTIONAL.search("model.layers.0.self_attn.attn.k_scale")
    assert not OPTIONAL.search("model.layers.0.self_attn.qkv_proj.weight_scale")
    assert INPUT_SCALE.search("model.layers.0.mlp.experts.w13_input_global_scale")
    assert not INPUT_SCALE.search("model.layers.0.mlp.experts.w13_weight_scale")


@pytest.mark.parametrize(
    ("name", "tied", "wanted"),
    [
        ("lm_head.weight", False, False),
        ("lm_head.weight", True, True),
        ("model.layers.3.mlp.up_proj.weight", False, False),
        ("model.layers.4.mlp.up_proj.weight", False, True),
        ("mtp.fc.weight", False, True),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", False, True),
    ],
)
def test_tensors_that_vllm_leaves_alone(name: str, tied: bool, wanted: bool) -> None:
    text = SimpleNamespace(num_hidden_layers=4, tie_word_embeddings=tied)
    assert left_alone(name, SimpleNamespace(hf_text_config=text)) is wanted
