"""The table of architectures: up to date, and right about names, roles and ties."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from halfbyte.models.architectures import find_architecture, table_version
from halfbyte.models.model import model_of
from halfbyte.models.roles import ROLES
from halfbyte.models.transformers_limits import transformers_limits
from tests.models.run_time_names import differences
from tools.architectures.generate import TABLE, describe_all

SAMPLE = (
    "AyaVisionForConditionalGeneration", "BartForConditionalGeneration", "BertForMaskedLM", "DbrxForCausalLM",
    "FalconForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "Gemma3ForConditionalGeneration", "GptOssForCausalLM",
    "GraniteMoeForCausalLM", "LlavaForConditionalGeneration", "MambaForCausalLM", "MixtralForCausalLM",
    "Qwen2VLForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "T5ForConditionalGeneration",
    "WhisperForConditionalGeneration", "ZambaForCausalLM",
)  # fmt: skip
"""Classes that differ in what the table has to know of them. `make test-zoo` checks all."""


def test_the_table_is_that_of_the_pinned_transformers() -> None:
    pins = (Path(__file__).parents[2] / "requirements-peers.txt").read_text(encoding="utf-8")
    assert re.findall(r"^transformers==(\S+)$", pins, re.MULTILINE) == [table_version()]


@pytest.mark.parametrize("name", SAMPLE)
def test_the_table_is_up_to_date(name: str) -> None:
    described, failed = describe_all([name])
    assert not failed
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    row = table["architectures"][name]
    row["renames"] = table["renames"][row["renames"]]
    assert json.loads(json.dumps(described[name])) == row


@pytest.mark.parametrize("name", SAMPLE)
def test_names_at_run_time_are_those_of_transformers(name: str) -> None:
    assert list(differences(name)) == []


def test_the_table_covers_what_transformers_has() -> None:
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    assert len(table["architectures"]) >= 350
    assert {role for row in table["architectures"].values() for role in row["modules"]} <= set(ROLES)
    assert set(table["model_types"].values()) <= set(table["architectures"])


def test_looked_up_by_class_then_by_model_type() -> None:
    by_class = find_architecture({"architectures": ["BertForMaskedLM"], "model_type": "llama"})
    assert by_class is not None
    assert (by_class.name, by_class.exact) == ("BertForMaskedLM", True)
    base = find_architecture({"architectures": ["LlamaForTokenClassification"], "model_type": "llama"})
    assert base is not None
    assert (base.name, base.exact) == ("LlamaForCausalLM", False)
    inner = find_architecture({"model_type": "unheard_of", "text_config": {"model_type": "llama"}})
    assert inner is not None
    assert inner.name == "LlamaForCausalLM"
    assert find_architecture({"architectures": ["UnheardOf"], "model_type": "unheard_of"}) is None
    assert find_architecture({"architectures": "LlamaForCausalLM"}) is None


def test_a_model_without_its_head_has_the_roles_of_the_whole() -> None:
    model = model_of({"architectures": ["BertModel"], "model_type": "bert"})
    assert model.role("encoder.layer.0.attention.self.query") == "linear"
    assert model.role("embeddings.word_embeddings") == "table"
    assert model.run_time("encoder.layer.0.attention.self.query").names == ("encoder.layer.0.attention.self.query",)
    assert model.heads == ("cls.predictions.transform.dense", "cls.predictions.decoder")  # of a class that has a head


def test_classes_of_a_known_type_that_the_table_lacks() -> None:
    """Another class of the same type may have other heads, and its first part another name."""
    model = model_of({"architectures": ["MT5ForSequenceClassification"], "model_type": "mt5"})
    assert model.architecture is not None
    assert not model.architecture.exact
    assert model.role("transformer.encoder.block.0.layer.0.SelfAttention.q") == "linear"
    assert model.role("classification_head.dense") == "head"
    (said,) = transformers_limits(model, "nvfp4", ["transformer.encoder.block.0.layer.0.SelfAttention.q"], [])
    assert "its own initialisation reads these weights" in said
    plain = model_of({"architectures": ["LlamaModel"], "model_type": "llama"})
    assert transformers_limits(plain, "nvfp4", ["layers.0.mlp.down_proj"], ["embed_tokens"]) == []


@pytest.mark.parametrize(
    ("architecture", "module", "name", "role"),
    [
        ("LlavaForConditionalGeneration", "language_model.model.layers.3.mlp.up_proj",
         "model.language_model.layers.3.mlp.up_proj", "linear"),
        ("LlavaForConditionalGeneration", "vision_tower.vision_model.encoder.layers.3.mlp.fc1",
         "model.vision_tower.encoder.layers.3.mlp.fc1", "tower"),
        ("LlavaForConditionalGeneration", "language_model.lm_head", "lm_head", "head"),
        ("LlavaForConditionalGeneration", "multi_modal_projector.linear_1", "model.multi_modal_projector.linear_1",
         "projector"),
        ("GPTNeoXForCausalLM", "embed_out", "lm_head", "head"),
        ("GPTNeoXForCausalLM", "gpt_neox.embed_in", "gpt_neox.embed_in", "table"),
        ("GPT2LMHeadModel", "transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_attn", "transposed"),
        ("GPT2LMHeadModel", "h.0.attn.c_attn", "transformer.h.0.attn.c_attn", "transposed"),
        ("BertForMaskedLM", "cls.predictions.transform.dense", "cls.predictions.transform.dense", "head"),
        ("T5ForConditionalGeneration", "shared", "shared", "table"),
        ("MambaForCausalLM", "backbone.layers.0.mixer.dt_proj", "backbone.layers.0.mixer.dt_proj", "direct"),
        ("ZambaForCausalLM", "model.layers.2.shared_transf.self_attn.q_proj",
         "model.layers.2.shared_transf.self_attn.q_proj", "shared"),
        ("MixtralForCausalLM", "model.layers.1.block_sparse_moe.gate", "model.layers.1.mlp.gate", "router"),
        ("MixtralForCausalLM", "model.layers.1.block_sparse_moe.experts.7.w1",
         "model.layers.1.mlp.experts.gate_up_proj", "linear"),
        ("GraniteMoeForCausalLM", "model.layers.0.block_sparse_moe.router.layer", None, "router"),
    ],
)  # fmt: skip
def test_what_a_module_is(architecture: str, module: str, name: str | None, role: str) -> None:
    model = model_of({"architectures": [architecture]})
    assert model.role(module) == role
    if name is not None:
        assert model.run_time(module).names == (name,)


def test_a_tensor_that_transformers_splits_has_several_names() -> None:
    model = model_of({"architectures": ["NomicBertForMaskedLM"]})
    found = model.run_time("nomic_bert.encoder.layers.0.attn.Wqkv")
    assert [name.rpartition(".")[2] for name in found.names] == ["q_proj", "k_proj", "v_proj"]
    assert found.is_reshaped
    stacked = model_of({"architectures": ["MixtralForCausalLM"]}).run_time(
        "model.layers.0.block_sparse_moe.experts.0.w1"
    )
    assert stacked.operations
    assert not stacked.is_reshaped


def test_ties_by_the_config_or_by_the_default_of_the_class() -> None:
    assert model_of({"architectures": ["GemmaForCausalLM"]}).tied_head
    assert not model_of({"architectures": ["GemmaForCausalLM"], "tie_word_embeddings": False}).tied_head
    assert not model_of({"architectures": ["LlamaForCausalLM"]}).tied_head
    bert = model_of({"architectures": ["BertForMaskedLM"]})
    assert bert.tied("cls.predictions.decoder") == "output head tied to the embedding"
    assert bert.tied("cls.predictions.transform.dense") is None
    assert bert.heads == ("cls.predictions.transform.dense", "cls.predictions.decoder")
