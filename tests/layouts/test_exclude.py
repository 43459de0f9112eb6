"""Exclude lists: names that would swallow others, and which reader they would mislead."""

from __future__ import annotations

import pytest

from halfbyte.errors import InputError
from halfbyte.layouts.compressed_tensors import LAYOUT as COMPRESSED_TENSORS
from halfbyte.layouts.exclude import clashes, culprit, exclude_list, swallowed
from halfbyte.layouts.modelopt import LAYOUT as MODELOPT


def vllm_excludes(listed: list[str], module: str) -> bool:
    """The rule of vLLM's reader of Model-Optimizer files: exact, then any substring."""
    return any(name == module or name in module for name in listed)


@pytest.mark.parametrize(
    ("listed", "quantized", "clash"),
    [
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_up_proj", True),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", True),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.experts.0.gate_proj", False),
        ("model.layers.1.mlp.gate", "model.layers.11.mlp.up_proj", False),
        ("lm_head", "model.layers.0.mlp.up_proj", False),
    ],
)
def test_names_that_swallow_others(listed: str, quantized: str, clash: bool) -> None:
    assert vllm_excludes([listed], quantized) is clash
    assert bool(clashes([listed], [quantized])) is clash
    if clash:
        with pytest.raises(InputError, match=f"{listed} stays unquantized, but its name is part of {quantized}"):
            exclude_list([listed], [quantized], MODELOPT.readers)
    else:
        assert exclude_list([listed], [quantized], MODELOPT.readers) == [listed]


def test_fused_names_count_too() -> None:
    assert clashes(["a.qkv_proj"], ["a.q_proj", "a.k_proj", "a.v_proj"]) == [("a.qkv_proj", "a.qkv_proj")]


def test_lists_are_sorted_and_have_no_doubles() -> None:
    assert exclude_list(["b", "a", "b"], ["x"], MODELOPT.readers) == ["a", "b"]


@pytest.mark.parametrize(
    ("listed", "misled"),
    [
        ("model.layers.1", ["vLLM", "SGLang"]),
        ("model.layers.1.mlp.down_proj", ["vLLM", "SGLang", "TensorRT-LLM"]),
        ("mlp", ["vLLM", "SGLang"]),
        ("model.layers.10", []),
    ],
)
def test_readers_that_a_list_misleads(listed: str, misled: list[str]) -> None:
    module = "model.layers.1.mlp.down_proj"
    found = {reader.name: list(swallowed([module], [listed], reader)) for reader in MODELOPT.readers}
    assert found == {reader.name: [(module, module)] if reader.name in misled else [] for reader in MODELOPT.readers}


def test_partners_are_named_once_and_the_entry_is_found() -> None:
    vllm = COMPRESSED_TENSORS.readers[0]
    modules = [f"l.0.self_attn.{name}_proj" for name in "qkv"]
    entries = ["lm_head", r"re:.*self_attn\.qkv_proj"]
    assert list(swallowed(modules, entries, vllm)) == [(modules[0], "l.0.self_attn.qkv_proj")]
    assert culprit("l.0.self_attn.qkv_proj", entries, vllm) == entries[1]
    assert culprit("l.0.self_attn.qkv_proj", modules, vllm) is None  # only all of them together


def test_names_within_others_are_fine_where_no_reader_matches_substrings() -> None:
    listed, quantized = "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"
    assert exclude_list([listed], [quantized], COMPRESSED_TENSORS.readers) == [listed]


def test_the_module_that_would_be_swallowed_is_named_among_others() -> None:
    modules = [f"model.layers.{layer}.mlp.{name}_proj" for layer in range(2) for name in ("up", "down")]
    for module in modules:
        assert clashes([f"{module[:-5]}"], modules) == [(module[:-5], module)]
    assert clashes(["x.weight", "model.layers.1.mlp.do"], modules) == [("model.layers.1.mlp.do", modules[3])]
    assert clashes([f"{modules[0]}{modules[1]}"], modules) == []


def test_a_reader_that_asks_for_single_modules_is_asked_about_them() -> None:
    modules = [f"l.0.self_attn.{name}_proj" for name in "qkv"]
    (single,) = [reader for reader in MODELOPT.readers if not reader.asks_for_fused]
    assert list(swallowed(modules, [modules[1]], single)) == [(modules[1], modules[1])]
    assert list(swallowed(modules, ["l.0.self_attn.qkv_proj"], single)) == []
