"""A sample of the zoo. `make test-zoo` examines every class."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest

from tests.zoo.build import class_names, tiny_config, tiny_model
from tests.zoo.case import LAYOUTS, THEN, Unread, Wrong, examine, judged, quantized_share, reader_limits
from tests.zoo.fixes import ARGUMENTS, FIXES
from tests.zoo.run import prepare
from tests.zoo.shrink import EXPERTS, HIDDEN
from tests.zoo.table import BEGIN, END, replaced, table

COMPUTE = (
    "LlamaForCausalLM",
    "Gemma2ForCausalLM",
    "GPTJForCausalLM",
    "BloomForCausalLM",
    "OPTForCausalLM",
    "PhiForCausalLM",
    "Qwen3ForCausalLM",
)
"""Classes that compute in every layout."""

SAMPLE = (
    "AlbertForMaskedLM",
    "AyaVisionForConditionalGeneration",
    "BartForConditionalGeneration",
    "BertForMaskedLM",
    "DeepseekV3ForCausalLM",
    "FalconForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "Gemma3ForConditionalGeneration",
    "GptOssForCausalLM",
    "GraniteMoeForCausalLM",
    "InternVLForConditionalGeneration",
    "JambaForCausalLM",
    "Llama4ForCausalLM",
    "LlavaForConditionalGeneration",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "ModernBertForMaskedLM",
    "NomicBertForMaskedLM",
    "Qwen2VLForConditionalGeneration",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "RobertaForMaskedLM",
    "T5ForConditionalGeneration",
    "WhisperForConditionalGeneration",
)
"""Classes that fail in some reader, or did once: tied heads, other names at run time, experts, transposed weights."""


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    with warnings.catch_warnings():
        prepare()


@pytest.mark.parametrize("name", [*COMPUTE, *SAMPLE])
def test_nothing_fails_without_a_word(tmp_path: Path, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = examine(name, tmp_path / "work").outcomes
    kinds = {layout: outcome.partition(":")[0] for layout, outcome in outcomes.items()}
    assert set(kinds.values()) <= {"computes", "said"}, outcomes
    if name in COMPUTE:
        assert set(kinds.values()) == {"computes"}, outcomes


def test_configs_are_small_all_the_way_down() -> None:
    """The rules reach sub-configs and lists with an entry per layer."""
    config = tiny_config("Qwen3_5MoeForConditionalGeneration")
    assert (config.text_config.hidden_size, config.text_config.num_experts) == (HIDDEN, EXPERTS)
    assert len(config.text_config.layer_types) == config.text_config.num_hidden_layers
    assert set(config.text_config.layer_types) == {"linear_attention", "full_attention"}
    assert config.vision_config.hidden_size == HIDDEN


def test_what_should_have_been_kept_is_found() -> None:
    """A changed head or table, and a weight in another's place, are wrong whatever was said."""
    source = tiny_model("LlamaForCausalLM")
    assert quantized_share(source, copy.deepcopy(source)) == 0
    for module, message in [
        ("lm_head", "output head"),
        ("model.embed_tokens", "no linear layer but to Embedding"),
        ("model.layers.0.self_attn.o_proj", "differs by"),
    ]:
        changed = copy.deepcopy(source)
        weight = changed.get_submodule(module).weight
        weight.data = weight.data.T.contiguous() if message == "differs by" else weight.data * 1.125
        with pytest.raises(Wrong, match=message):
            quantized_share(source, changed)
    changed = copy.deepcopy(source)
    changed.model.layers[0].mlp.up_proj.weight.data *= 1.125
    assert 0 < quantized_share(source, changed) < 0.2


def test_a_limit_counts_only_if_its_reader_is_named() -> None:
    error = Unread("3 missing keys: lm_head.weight_packed")
    assert judged(error, reader_limits(["vLLM cannot", "pattern 'x' matches no module"])).startswith(
        "silent: 3 missing"
    )
    told = judged(error, reader_limits(["vLLM cannot", "transformers cannot"]))
    assert told == "said: transformers cannot; and so: 3 missing keys: lm_head.weight_packed"


def test_every_fix_is_of_a_class_that_exists() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert set(FIXES) <= set(CONFIG_MAPPING_NAMES)
    assert set(ARGUMENTS) <= {*CONFIG_MAPPING_NAMES, *class_names()}


def test_the_table_tells_each_reason_once() -> None:
    rows = [
        {"name": "A", "outcomes": dict.fromkeys(LAYOUTS, "computes")},
        {"name": "B", "outcomes": dict.fromkeys(LAYOUTS, f"said: transformers cannot{THEN}3 missing keys: x.1")},
        {"name": "C", "outcomes": dict.fromkeys(LAYOUTS, f"said: transformers cannot{THEN}4 missing keys: y.2")},
    ]
    text = table(rows)
    assert "| A | computes | computes | computes |" in text
    assert text.count("said (1)") == 6
    assert text.endswith("\n1. transformers cannot")
    assert replaced(f"before\n{BEGIN}\nold\n{END}\nafter", "new") == f"before\n{BEGIN}\nnew\n{END}\nafter"
