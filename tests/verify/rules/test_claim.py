"""What a config claims against the tensors, by every sentence that is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte.layouts.description import Claim
from halfbyte.verify.rules.claim import claim_problems
from halfbyte.verify.stored import read_contents
from tests.verify.headers import Headers, checkpoint, compressed, fp8, int4, lines, modelopt, mxfp4, plain

HERE = Path("nowhere")
STRAY: Headers = {"s.weight_scale": ("F32", ())}


def found(headers: Headers, claim: Claim, config: dict[str, Any] | None = None, path: Path = HERE) -> list[str]:
    made = checkpoint(headers, config, path)
    return lines(claim_problems(made, read_contents(made), claim))


def of_configs(headers: Headers, claim: Claim) -> list[str]:
    return [line for line in found(headers, claim) if "[config]" in line or "[unquantized]" in line]


NOTHING = Claim(None, False)
CT = "compressed-tensors"
UNQUANTIZED = "no weight is quantized, and no config says so: this checkpoint is unquantized"
NONE_SAYS = "tensors are stored in the layout {}, but no config says so: readers see bytes"


@pytest.mark.parametrize(
    ("headers", "claim", "expected"),
    [
        (modelopt("a"), Claim("modelopt", False, formats=("nvfp4",)), []),
        (modelopt("a"), Claim("modelopt", False), []),
        (modelopt("a"), NOTHING, [f"error [config] config.json: {NONE_SAYS.format('modelopt')}"]),
        (modelopt("a") | compressed("b") | mxfp4("c"), NOTHING,
         [f"error [config] config.json: {NONE_SAYS.format('compressed-tensors, modelopt')}"]),
        (fp8("a"), NOTHING, []),
        (int4("a"), NOTHING, []),
        (plain("a"), NOTHING, [f"warning [unquantized] config.json: {UNQUANTIZED}"]),
        (plain("a"), Claim("fp8", False), []),
        (plain("a") | STRAY, NOTHING, []),
        (plain("a"), Claim(CT, False, formats=("nvfp4",)),
         ["error [config] config.json: quantization_config speaks of compressed-tensors, but no tensor is stored so"]),
        (plain("a"), Claim(CT, False), []),
        (fp8("a"), Claim(CT, False, formats=("nvfp4",), beside=("fp8",)),
         ["error [config] config.json: quantization_config speaks of compressed-tensors, but no tensor is stored so"]),
        (mxfp4("a"), Claim(CT, False, formats=("nvfp4", "", "nvfp4")),
         ["error [config] config.json: quantization_config describes nvfp4, another format, but tensors are mxfp4"]),
        (mxfp4("a") | compressed("b"), Claim(CT, False, formats=("nvfp4",)),
         ["error [config] config.json: quantization_config describes nvfp4, but tensors are mxfp4, nvfp4"]),
        (compressed("b"), Claim(CT, False, formats=("nvfp4", "mxfp4")), []),
    ],
)  # fmt: skip
def test_formats_and_layouts(headers: Headers, claim: Claim, expected: list[str]) -> None:
    assert of_configs(headers, claim) == expected


def test_layouts_that_a_config_does_not_explain() -> None:
    """Each way of storing is named once, by its first weight."""
    headers = modelopt("a") | compressed("b") | compressed("c") | mxfp4("d") | fp8("e")
    explain = "which a quantization_config of {} does not explain"
    assert of_configs(headers, Claim("modelopt", False, formats=("nvfp4",))) == [
        f"error [config] b: stored as nvfp4 (compressed-tensors), {explain.format('modelopt')}",
        f"error [config] d: stored as mxfp4 (compressed-tensors), {explain.format('modelopt')}",
    ]
    assert of_configs(headers, Claim(CT, False)) == [
        f"error [config] a: stored as nvfp4 (modelopt), {explain.format(CT)}",
        f"error [config] e: stored as fp8 (weight_scale), {explain.format(CT)}",
    ]
    assert found(fp8("e") | compressed("b"), Claim(CT, False, beside=("fp8",))) == []


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("gpt_oss", []),
        ("llama4", ["quant_method mxfp4 is read for gpt-oss models only, not for llama4"]),
        ("", ["quant_method mxfp4 is read for gpt-oss models only, not for this one"]),
    ],
)
def test_layouts_of_one_family(model_type: str, expected: list[str]) -> None:
    stack: Headers = {
        "l.experts.down_proj_blocks": ("U8", (2, 8, 1, 16)),
        "l.experts.down_proj_scales": ("U8", (2, 8, 1)),
    }
    told = found(stack, Claim("gpt-oss", False, formats=("mxfp4",)), {"model_type": model_type})
    assert told == [f"error [reader] config.json: {text}" for text in expected]


def test_two_configs_in_one_file() -> None:
    claim = Claim("modelopt", False)
    for inner, same in (({"a": 1}, True), ({"a": 2}, False), ([], True)):
        config = {"quantization_config": {"a": 1}, "text_config": {"quantization_config": inner}}
        text = "the part for the language model holds another quantization_config than the outer one"
        assert found(modelopt("a"), claim, config) == ([] if same else [f"error [config] config.json: {text}"])
    config = {"text_config": {"quantization_config": {"a": 1}}}
    assert found(modelopt("a"), claim, config) == []


@pytest.mark.parametrize(
    ("content", "good"), [({"quantization": {}}, True), ({"quantization": []}, False), ({}, False)]
)
def test_the_other_file_has_something_to_say(tmp_path: Path, content: object, good: bool) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    expected = [] if good else ["error [config] hf_quant_config.json: has no object called quantization"]
    assert found(modelopt("a"), Claim("modelopt", False), {}, tmp_path) == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [({}, None), ({"metadata": []}, None), ({"metadata": {}}, None), ({"metadata": {"total_size": 48}}, None),
     ({"metadata": {"total_size": 0}}, 0), ({"metadata": {"total_size": 49}}, 49)],
)  # fmt: skip
def test_the_size_in_the_index(tmp_path: Path, content: object, said: int | None) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    text = f"warning [index] model.safetensors.index.json: total_size says {said} bytes, the tensors have 48"
    assert found(plain("a", 2, 8) | plain("b", 2, 4), Claim("fp8", False), {}, tmp_path) == (
        [] if said is None else [text]
    )


def test_the_parts_of_the_claim_are_all_asked() -> None:
    """Roles, limits of readers and activations."""
    config = {"model_type": "qwen3_moe"}
    told = found(compressed("model.layers.0.mlp.experts.0.up_proj") | compressed("lm_head"), Claim(CT, True), config)
    assert [line.partition(":")[0] for line in told] == [
        "warning [reader] config.json",
        "error [input-scale] model.layers.0.mlp.experts.0.up_proj",
        "error [input-scale] lm_head",
        "warning [role] lm_head",
    ]
