"""What transformers cannot do with packed weights, told from the table alone. `make test-zoo` asks it itself."""

from __future__ import annotations

import pytest

from halfbyte.models.architectures import table_version
from halfbyte.models.model import model_of
from halfbyte.models.transformers_limits import single_experts, transformers_limits

EXPERTS = [f"model.layers.0.mlp.experts.{number}.{name}_proj" for number in (0, 1) for name in ("gate", "up", "down")]
FALCON = ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")


def said(
    architecture: str, quantized: list[str], plain: tuple[str, ...] | list[str] = (), format: str = "nvfp4"
) -> list[str]:
    found = transformers_limits(model_of({"architectures": [architecture]}), format, quantized, plain)
    assert all(text.startswith(f"transformers ({table_version()}) ") for text in found)
    return [text.removeprefix(f"transformers ({table_version()}) ") for text in found]


@pytest.mark.parametrize(
    ("architecture", "quantized"),
    [
        ("LlamaForCausalLM", ["model.layers.0.mlp.up_proj"]),
        ("Qwen3MoeForCausalLM", EXPERTS),
        ("LlavaForConditionalGeneration", ["language_model.model.layers.0.mlp.up_proj"]),
        ("MambaForCausalLM", ["backbone.layers.0.mixer.in_proj"]),
        ("UnheardOfForCausalLM", ["model.layers.0.mlp.anything"]),
    ],
)
def test_what_is_loaded_is_no_limit(architecture: str, quantized: list[str]) -> None:
    assert said(architecture, quantized) == []


def test_weights_that_the_class_reads_while_loading() -> None:
    (text,) = said("FalconForCausalLM", [f"transformer.h.{layer}.{name}" for layer in (0, 1) for name in FALCON])
    patterns = ", ".join(f"transformer.h.#.{name}" for name in FALCON)
    # to keep them all would leave nothing: no way out is offered
    assert text == f"cannot load FalconForCausalLM with {patterns} packed: its own initialisation reads these weights"
    (text,) = said("MambaForCausalLM", [f"backbone.layers.0.mixer.{name}_proj" for name in ("in", "out")])
    assert text.endswith("keep them: --keep '*.out_proj'")


@pytest.mark.parametrize(
    ("architecture", "module"),
    [
        ("NomicBertForMaskedLM", "encoder.layers.{}.attn.Wqkv"),
        ("Molmo2ForConditionalGeneration", "model.language_model.blocks.{}.self_attn.att_proj"),
        ("MiniMaxM3SparseForConditionalGeneration", "model.language_model.layers.{}.mlp.shared_experts.gate_proj"),
    ],
)
def test_a_weight_that_is_cut_or_joined_by_rows(architecture: str, module: str) -> None:
    """Whole rows of MXFP4 can be moved; a tensor scale cannot be shared out."""
    quantized = [module.format(layer) for layer in (0, 1)]
    assert said(architecture, quantized)[0] == (
        f"splits or joins {module.format('#')} while loading {architecture}, which it cannot do to weights with a "
        "tensor scale; it loads MXFP4 (--to mxfp4)"
    )
    assert not [text for text in said(architecture, quantized, format="mxfp4") if "splits or joins" in text]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_weight_whose_values_change_order_while_loading(format: str) -> None:
    """Rows of gate and up are interleaved on disk: no format survives that, and none is recommended."""
    found = said("InklingForConditionalGeneration", ["model.llm.layers.0.mlp.w13_dn"], format=format)
    assert found[0].startswith("splits or joins model.llm.layers.#.mlp.w13_dn while loading")
    assert "--to mxfp4" not in found[0]


def test_experts_that_the_class_wants_in_one_tensor() -> None:
    at = "model.layers.0.feed_forward.experts.0"
    quantized = [f"{at}.{name}_proj" for name in ("gate", "up", "down")]
    listed = ", ".join(module.replace(".0.", ".#.") for module in quantized)
    assert said("Llama4ForCausalLM", quantized) == [
        f"wants the experts of Llama4ForCausalLM in one tensor and will not load {listed}"
    ]
    assert single_experts(model_of({"architectures": ["Llama4ForCausalLM"]}), quantized)
    assert not single_experts(model_of({"architectures": ["Qwen3MoeForCausalLM"]}), EXPERTS)
    assert not single_experts(model_of({"model_type": "unheard_of"}), quantized)
    (text,) = said("Llama4ForCausalLM", [f"{at}.{name}" for name in "abcde"])
    assert "experts.#.d and 1 more" in text
    assert "experts.#.e" not in text


def test_modules_that_another_config_may_bring() -> None:
    """The table was made from default configs: what it lacks may be there all the same."""
    assert said("LlamaForCausalLM", ["model.layers.0.mlp.anything"]) == []


def test_experts_that_stay_plain_beside_packed_weights() -> None:
    """transformers turns its rule that stacks experts into one for packed weights: plain ones lose it."""
    (text,) = said("Qwen3MoeForCausalLM", ["model.layers.0.self_attn.q_proj"], EXPERTS)
    assert text == (
        "splits or joins model.layers.#.mlp.experts.#.gate_proj, model.layers.#.mlp.experts.#.up_proj, "
        "model.layers.#.mlp.experts.#.down_proj while loading Qwen3MoeForCausalLM, which it leaves out for unquantized "
        "weights of a quantized checkpoint: it will not load them"
    )


def test_a_rule_that_splits_what_is_not_there() -> None:
    """Once its rule is one for packed weights, transformers stops where it finds none to split."""
    packed = [f"model.H_module.layers.0.{name}" for name in ("self_attn.o_proj", "mlp.down_proj")]
    split = ["model.H_module.layers.0.mlp.gate_up_proj", "model.H_module.layers.0.attn.gqkv_proj"]
    (text,) = said("HrmTextForCausalLM", packed)
    assert text == (
        "cannot load HrmTextForCausalLM in this layout: its rule that splits a weight into mlp.gate_proj.weight and "
        "mlp.up_proj.weight fails in a quantized checkpoint where that weight is not packed"
    )
    (text,) = said("HrmTextForCausalLM", packed, split)
    assert "it will not load them" in text
    others = [name.replace("H_module", "L_module") for name in split]
    assert said("HrmTextForCausalLM", split, others, format="mxfp4") == []


def test_the_way_out_reaches_modules_that_a_published_config_brings() -> None:
    """The default config of T5 has no gate; that of flan-T5 has one, and its initialisation reads that too."""
    model = model_of({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"})
    (text,) = transformers_limits(model, "nvfp4", ["encoder.block.0.layer.1.DenseReluDense.wi_0"], [])
    assert "its own initialisation reads" in text
