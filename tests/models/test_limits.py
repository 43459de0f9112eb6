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
        ("mamba", "modelopt", "nvfp4", False, True, ["vLLM"]),
        ("mamba2", "modelopt", "nvfp4", False, True, []),
        ("gpt2", "compressed-tensors", "nvfp4", False, True, []),
        ("qwen", "modelopt", "nvfp4", False, True, ["vLLM"]),
    ],
)
def test_who_cannot_load_what(
    model_type: str, layout: str, format: str, experts: bool, dense: bool, readers: list[str]
) -> None:
    assert [limit.reader for limit in limits(model_type, layout, format, experts, dense)] == readers


def test_every_limit_names_its_reader_and_a_version_or_reason() -> None:
    for rule in RULES:
        assert rule.limit.text
        assert any(reader in rule.limit.text for reader in rule.limit.reader.split(", ")) or "server" in rule.limit.text
        assert rule.model_types or rule.layouts
