"""A sample of the zoo. `make test-zoo` examines every class."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.zoo.build import class_names, tiny_config
from tests.zoo.case import LAYOUTS, examine
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


def test_every_fix_is_of_a_class_that_exists() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert set(FIXES) <= set(CONFIG_MAPPING_NAMES)
    assert set(ARGUMENTS) <= {*CONFIG_MAPPING_NAMES, *class_names()}


def test_the_table_tells_each_reason_once() -> None:
    rows = [
        {"name": "A", "outcomes": dict.fromkeys(LAYOUTS, "computes")},
        {"name": "B", "outcomes": dict.fromkeys(LAYOUTS, "said: transformers cannot [3 missing keys: x.1]")},
        {"name": "C", "outcomes": dict.fromkeys(LAYOUTS, "said: transformers cannot [4 missing keys: y.2]")},
    ]
    text = table(rows)
    assert "| A | computes | computes | computes |" in text
    assert text.count("said (1)") == 6
    assert text.endswith("\n1. transformers cannot")
    assert replaced(f"before\n{BEGIN}\nold\n{END}\nafter", "new") == f"before\n{BEGIN}\nnew\n{END}\nafter"
