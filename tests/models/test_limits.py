"""What readers cannot load. `make test-clients` tries the ones that vLLM can be asked about on a CPU."""

from __future__ import annotations

import pytest

from halfbyte.models.limits import RULES, limits


@pytest.mark.parametrize(
    ("model_type", "layout", "format", "experts", "dense", "readers"),
    [
        ("llama", "modelopt", "nvfp4", False, True, []),
        ("qwen3_moe", "compressed-tensors", "nvfp4", True, True, ["transformers"]),
        ("qwen3_moe", "modelopt", "nvfp4", True, True, []),
        ("qwen3_moe", "compressed-tensors", "nvfp4", False, True, []),
        ("gpt_oss", "modelopt", "nvfp4", True, False, ["vLLM, SGLang"]),
        ("gpt_oss", "gpt-oss", "mxfp4", True, False, []),
        ("llama", "compressed-tensors", "mxfp4", False, True, ["SGLang"]),
        ("qwen3_moe", "compressed-tensors", "mxfp4", True, False, []),
        ("mamba", "modelopt", "nvfp4", False, True, ["SGLang", "vLLM"]),
        ("gpt_neox", "compressed-tensors", "nvfp4", False, True, ["SGLang"]),
        ("internvl", "modelopt", "nvfp4", False, True, ["SGLang"]),
        ("mamba2", "modelopt", "nvfp4", False, True, []),
        ("gpt2", "compressed-tensors", "nvfp4", False, True, []),
        ("falcon_mamba", "modelopt", "nvfp4", False, True, ["vLLM"]),
        ("jamba", "modelopt", "nvfp4", True, True, ["vLLM"]),
        ("jamba", "modelopt", "nvfp4", True, False, []),
        ("gpt_oss", "modelopt", "nvfp4", False, True, []),
        ("ctrl", "compressed-tensors", "nvfp4", False, True, ["transformers"]),
        ("ctrl", "modelopt", "nvfp4", False, True, []),
        ("qwen3_omni_moe", "compressed-tensors", "nvfp4", False, True, ["transformers"]),
        ("qwen2_5_omni", "compressed-tensors", "mxfp4", True, False, ["transformers"]),
        ("qwen2_5_omni", "modelopt", "nvfp4", True, True, []),
        ("qwen2_5_omni", "compressed-tensors", "nvfp4", False, False, []),
    ],
)
def test_who_cannot_load_what(
    model_type: str, layout: str, format: str, experts: bool, dense: bool, readers: list[str]
) -> None:
    assert [limit.reader for limit in limits(model_type, layout, format, modules(experts, dense))] == readers


def modules(experts: bool, dense: bool) -> list[str]:
    """Names of quantized modules, of experts or others."""
    return [*(["layers.0.mlp.experts.0.up_proj"] if experts else ()), *(["layers.0.mlp.up_proj"] if dense else ())]


@pytest.mark.parametrize(
    ("model_type", "module", "fused"),
    [
        ("phi3", "model.layers.0.self_attn.qkv_proj", True),
        ("phi3", "model.layers.0.mlp.gate_up_proj", True),
        ("lfm2", "model.layers.0.conv.in_proj", True),
        ("lfm2_moe", "model.layers.0.conv.in_proj", True),
        ("llama", "model.layers.0.conv.in_proj", False),
        ("llama", "model.layers.0.self_attn.q_proj", False),
        ("llama", "model.layers.0.mlp.w1", False),
        ("llama", "model.layers.0.mlp.experts.gate_up_proj", False),
    ],
)
def test_layers_that_are_stored_fused_want_quantized_activations_in_sglang(
    model_type: str, module: str, fused: bool
) -> None:
    """Seen in `make test-clients`: SGLang fills the first of several tensor scales."""
    readers = ["SGLang"] if fused else []
    assert [limit.reader for limit in limits(model_type, "modelopt", "nvfp4", [module])] == readers
    assert limits(model_type, "modelopt", "nvfp4", [module], activations=True) == []
    assert "SGLang" not in [limit.reader for limit in limits(model_type, "compressed-tensors", "nvfp4", [module])]


def test_every_limit_names_its_reader_and_a_version_or_reason() -> None:
    for rule in RULES:
        assert rule.limit.text
        assert any(reader in rule.limit.text for reader in rule.limit.reader.split(", ")) or "server" in rule.limit.text
        assert rule.model_types or rule.layouts


@pytest.mark.parametrize(
    ("model_type", "version"),
    [
        ("qwen", "0.23"),
        ("baichuan", "0.23"),
        ("internlm", "0.23"),
        ("xverse", "0.23"),
        ("aquila", "0.24"),
        ("telechat", "0.25"),
        ("plamo2", "0.26"),
        ("arctic", "0.28"),
    ],
)
@pytest.mark.parametrize("experts", [False, True])
def test_models_that_vllm_dropped(model_type: str, version: str, experts: bool) -> None:
    (limit,) = limits(model_type, "modelopt", "nvfp4", modules(experts, not experts))
    assert (limit.reader, limit.text) == ("vLLM", f"vLLM has no model for {model_type} after {version}")
