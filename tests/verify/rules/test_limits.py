"""Warnings for checkpoints that some reader cannot use: by format, for weights of the layout that the config names."""

from __future__ import annotations

from typing import Any

from halfbyte.layouts import LAYOUTS
from halfbyte.models import model_of
from halfbyte.models.limits import limits
from halfbyte.models.transformers_limits import transformers_limits
from halfbyte.verify.rules.limits import limit_problems
from tests.verify.headers import Headers, compressed, contents, lines, modelopt, mxfp4, plain

CT = "compressed-tensors"


def found(headers: Headers, layout: str | None, activations: bool = False, **config: Any) -> list[str]:
    there = LAYOUTS.get(layout or "")
    model_type = str(config.get("model_type", ""))
    return lines(limit_problems(model_of(config), model_type, there, contents(headers), activations))


EXPERT = "model.layers.0.mlp.experts.0.up_proj"


def warnings(*texts: str) -> list[str]:
    return [f"warning [reader] config.json: {text}" for text in texts]


def test_by_format_and_layout() -> None:
    """Each format once; only weights of the layout count."""
    fours = [limit.text for limit in limits("", CT, "nvfp4", [EXPERT], False)]
    others = [limit.text for limit in limits("", CT, "mxfp4", ["a"], False)]
    assert len(fours) == len(others) == 1
    assert found(compressed(EXPERT), CT) == warnings(*fours)
    assert found(compressed(EXPERT) | mxfp4("a") | compressed("b"), CT) == warnings(*fours, *others)
    assert found(modelopt(EXPERT) | compressed("b"), CT) == []
    assert found(compressed(EXPERT), None) == found(compressed(EXPERT), "modelopt") == []


def test_by_activations() -> None:
    told = {
        active: [limit.text for limit in limits("gpt_oss", "modelopt", "nvfp4", [EXPERT], active)]
        for active in (False, True)
    }
    for active, texts in told.items():
        assert found(modelopt(EXPERT), "modelopt", active, model_type="gpt_oss") == warnings(*texts)


def test_what_transformers_cannot_load() -> None:
    """Asked only for layouts that it reads; plain weights count too."""
    config: dict[str, Any] = {"model_type": "nanochat", "architectures": ["NanoChatForCausalLM"]}
    model, module = model_of(config), "model.layers.0.self_attn.o_proj"
    reasons = transformers_limits(model, "nvfp4", [module], [])
    assert len(reasons) == 1
    ours = [limit.text for limit in limits("nanochat", CT, "nvfp4", [module], False)]
    assert found(compressed(module), CT, **config) == warnings(*ours, *reasons)
    others = [limit.text for limit in limits("nanochat", "modelopt", "nvfp4", [module], False)]
    assert found(modelopt(module), "modelopt", **config) == warnings(*others)


def test_plain_weights_that_transformers_would_split() -> None:
    config: dict[str, Any] = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    headers = (
        compressed("model.layers.0.self_attn.q_proj") | plain(EXPERT) | {"model.layers.0.mlp.bias": ("BF16", (4,))}
    )
    quantized, rest = ["model.layers.0.self_attn.q_proj"], [EXPERT]
    reasons = transformers_limits(model_of(config), "nvfp4", quantized, rest)
    ours = [limit.text for limit in limits("qwen3_moe", CT, "nvfp4", quantized, False)]
    assert found(headers, CT, **config) == warnings(*ours, *reasons)
    assert reasons != transformers_limits(model_of(config), "nvfp4", quantized, [])
