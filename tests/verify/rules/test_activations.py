"""Input scales against what a config says of activations: of all weights, layer by layer, or group by group."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.layouts.description import Claim
from halfbyte.verify.rules.activations import activation_problems
from tests.verify.headers import compressed, contents, fp8, lines, modelopt, mxfp4

MISSING = "the config says activations are FP4, but {} is missing: vLLM uses uninitialised memory"
EXTRA = "{} with an input scale, but the config says that activations are not quantized"


def found(headers: Any, claim: Claim, **config: object) -> list[str]:
    return lines(activation_problems(config, contents(headers), claim))


@pytest.mark.parametrize("quantized", [False, True])
def test_one_answer_for_all(quantized: bool) -> None:
    headers = modelopt("a") | modelopt("b", inputs=True) | modelopt("c", inputs=True)
    expected = {
        True: [f"error [input-scale] a: {MISSING.format('a.input_scale')}"],
        False: [f"warning [input-scale] b: {EXTRA.format('2 weights')}"],
    }
    assert found(headers, Claim("modelopt", quantized)) == expected[quantized]
    assert found(modelopt("a", inputs=quantized), Claim("modelopt", quantized)) == []


def test_other_formats_and_layouts_have_none() -> None:
    assert found(fp8("a") | mxfp4("b") | compressed("c"), Claim("modelopt", True)) == []
    name = "c.input_global_scale"
    assert found(mxfp4("b") | compressed("c"), Claim("compressed-tensors", True)) == [
        f"error [input-scale] c: {MISSING.format(name)}"
    ]


@pytest.mark.parametrize("algorithm", ["MIXED_PRECISION", "mixed_precision"])
def test_layer_by_layer(algorithm: str) -> None:
    headers = modelopt("a", inputs=True) | modelopt("b") | modelopt("c", inputs=True) | modelopt("d", inputs=True)
    layers = {"a": {"quant_algo": "nvfp4"}, "b": {"quant_algo": "NVFP4"}, "c": {"quant_algo": "W4A16_NVFP4"}, "d": 1}
    assert found(headers, Claim("modelopt", False), quant_algo=algorithm, quantized_layers=layers) == [
        f"error [input-scale] b: {MISSING.format('b.input_scale')}",
        f"warning [input-scale] c: {EXTRA.format('2 weights')}",
    ]
    claimed = found(headers, Claim("modelopt", True), quant_algo="NVFP4", quantized_layers=layers)
    assert claimed == [f"error [input-scale] b: {MISSING.format('b.input_scale')}"]
    assert found(headers, Claim("modelopt", True), quant_algo=algorithm, quantized_layers=[]) == claimed


def test_group_by_group() -> None:
    scheme = {"num_bits": 4}
    groups: dict[str, Any] = {
        "g": {"targets": ["a", "b"], "weights": scheme, "input_activations": scheme},
        "h": {"targets": ["c"], "weights": scheme},
        "i": {"targets": ["d"], "weights": scheme, "input_activations": {"num_bits": 8}},
    }
    headers = compressed("a", inputs=True) | compressed("b") | compressed("c") | compressed("d", inputs=True)
    headers |= compressed("e", inputs=True)
    claim = Claim("compressed-tensors", True)
    missing = f"error [input-scale] b: {MISSING.format('b.input_global_scale')}"
    extra = f"warning [input-scale] d: {EXTRA.format('2 weights')}"
    assert found(headers, claim, config_groups=groups) == [missing, extra]
    groups["g"]["targets"].append("c")
    two = found(headers, claim, config_groups={name: groups[name] for name in ("g", "i")})
    assert two == [missing, f"error [input-scale] c: {MISSING.format('c.input_global_scale')}", extra]
    alone = found(headers, claim, config_groups={"i": groups["i"]})  # of one group, the claim says all
    assert alone == [missing, f"error [input-scale] c: {MISSING.format('c.input_global_scale')}"]
    modelopt_claim = Claim("modelopt", False)
    assert found(modelopt("a", inputs=True), modelopt_claim, config_groups=groups) == [
        f"warning [input-scale] a: {EXTRA.format('1 weight')}"
    ]
