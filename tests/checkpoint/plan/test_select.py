"""What is kept: by what is known of the model, and by the caller's rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.checkpoint import Options, Rules, make_plan
from halfbyte.checkpoint.plan.select import Selector, matches
from halfbyte.errors import CheckpointError, InputError
from halfbyte.models import Model, model_of
from tests.checkpoint.toy import llama, random, write_checkpoint

KEPT = [
    ("llama", "lm_head", "output head"),
    ("llama", "model.embed_tokens", "embedding"),
    ("qwen3_moe", "model.layers.0.mlp.gate", "router"),
    ("mixtral", "model.layers.0.block_sparse_moe.gate", "router"),
    ("qwen3_next", "model.layers.0.mlp.shared_expert_gate", "router"),
    ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz", "linear attention of this family"),
    ("qwen3_5", "model.layers.0.linear_attn.in_proj_a", "small linear attention projection"),
    ("llama", "model.layers.0.linear_attn.in_proj_b", "small linear attention projection"),
    ("llama", "mtp.layers.0.mlp.up_proj", "multi token prediction"),
    ("glm4_moe", "model.layers.4.mlp.up_proj", "multi token prediction: beyond num_hidden_layers"),
    ("qwen3_vl_moe", "model.visual.blocks.0.attn.qkv", "vision or audio tower"),
    ("llama4", "vision_model.model.layers.0.mlp.fc1", "vision or audio tower"),
    ("llama4", "multi_modal_projector.linear_1", "projector"),
    ("llama4", "language_model.model.layers.0.self_attn.q_proj", "attention of this family"),
    ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj", "absorbed at run time"),
    ("deepseek_v3", "model.layers.0.self_attn.q_a_proj", "attention of this family"),
    ("deepseek_v32", "model.layers.0.self_attn.indexer.wq_b", "attention indexer"),
    ("kimi_k2", "model.layers.0.self_attn.o_proj", "attention of this family"),
    ("nemotron_h", "backbone.layers.0.mixer.o_proj", "attention of this family"),
    ("nemotron_h", "backbone.layers.0.mixer.fc1_latent_proj", "latent projection"),
    ("nemotron_h", "backbone.layers.0.mixer.conv1d", "convolution"),
    ("gpt_oss", "model.layers.0.self_attn.q_proj", "gpt-oss converts experts only"),
    ("deepseek_v4", "layers.0.ffn.shared_experts.w1", "shared expert of this family"),
    ("deepseek_v4", "layers.0.attn.wq_a", "DeepSeek-V4 converts experts only"),
    ("bert", "embeddings.word_embeddings", "embedding"),
    ("bert", "pooler.dense", "pooler"),
]
QUANTIZED = [
    ("llama", "model.layers.0.self_attn.q_proj"),
    ("llama", "model.layers.0.mlp.gate_proj"),
    ("llama4", "language_model.model.layers.0.feed_forward.experts.3.gate_proj"),
    ("qwen3_moe", "model.layers.0.mlp.experts.17.up_proj"),
    ("qwen3_next", "model.layers.0.mlp.shared_expert.gate_proj"),
    ("deepseek_v3", "model.layers.3.mlp.shared_experts.up_proj"),
    ("deepseek_v4", "layers.0.ffn.experts.12.w3"),
    ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj"),
    ("bert", "encoder.layer.0.attention.self.query"),
    ("nemotron_h", "backbone.layers.0.mixer.in_proj"),
]


def selector(model_type: str, rules: Rules | None = None) -> Selector:
    return Selector(rules or Rules(), model_of({"model_type": model_type, "num_hidden_layers": 4}))


@pytest.mark.parametrize(("model_type", "module", "reason"), KEPT)
def test_kept_by_default(model_type: str, module: str, reason: str) -> None:
    assert selector(model_type).reason(module, 64, 16) == reason


@pytest.mark.parametrize(("model_type", "module"), QUANTIZED)
def test_quantized_by_default(model_type: str, module: str) -> None:
    assert selector(model_type).reason(module, 64, 16) is None


def test_include_overrides_the_table_but_not_lookup_tables() -> None:
    rules = Rules(include=("*self_attn*", "*embed*"))
    assert selector("deepseek_v3", rules).reason("model.layers.0.self_attn.kv_b_proj", 64, 16) is None
    assert selector("deepseek_v3", rules).reason("model.layers.0.mlp.up_proj", 64, 16) == "not included"
    assert selector("deepseek_v3", rules).reason("model.embed_tokens", 64, 16) == "embedding"


def test_keep_wins() -> None:
    rules = Rules(include=("*",), keep=("mlp.up",))
    assert selector("llama", rules).reason("model.layers.0.mlp.up_proj", 64, 16) == "--keep mlp.up"


def test_a_width_that_does_not_divide() -> None:
    assert selector("llama").reason("model.layers.0.mlp.up_proj", 588, 16) == "width 588 is no multiple of 16"


@pytest.mark.parametrize(
    ("layer", "reason"),
    [(0, "one of the first 1 layers"), (1, None), (2, "one of the last 2 layers"), (3, "one of the last 2 layers")],
)
def test_first_and_last_layers(layer: int, reason: str | None) -> None:
    rules = Rules(keep_first=1, keep_last=2)
    assert selector("llama", rules).reason(f"model.layers.{layer}.mlp.up_proj", 64, 16) == reason


def test_tied_heads_are_never_quantized() -> None:
    tied = Selector(Rules(include=("lm_head",)), Model(layers=4, tied_head=True))
    assert tied.reason("lm_head", 64, 16) == "output head tied to the embedding"
    assert selector("llama", Rules(include=("lm_head",))).reason("lm_head", 64, 16) is None


def test_experts_only() -> None:
    chosen = selector("qwen3_moe", Rules(experts_only=True))
    assert chosen.reason("model.layers.0.self_attn.q_proj", 64, 16) == "no expert"
    assert chosen.reason("model.layers.0.mlp.experts.1.w1", 64, 16) is None
    assert chosen.reason("model.layers.0.mlp.shared_experts.up_proj", 64, 16) is None


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("model.layers.1.", "model.layers.1.mlp", True),
        ("model.layers.1.", "model.layers.10.mlp", False),
        ("*.mlp.gate", "model.layers.1.mlp.gate", True),
        ("*.mlp.gate", "model.layers.1.mlp.gate_proj", False),
        ("mlp.gate", "model.layers.1.mlp.gate_proj", True),
        ("q_proj.weight", "a.q_proj", True),
        ("*.weight", "a.q_proj", True),
        ("layers.[01].*", "layers.1.x", True),
    ],
)
def test_patterns(pattern: str, name: str, fits: bool) -> None:
    assert matches(name, pattern) is fits


@pytest.mark.parametrize(
    "rules",
    [
        lambda: Rules(experts_only=True, include=("a",)),
        lambda: Rules(keep_first=-1),
        lambda: Rules(keep_last=-2),
        lambda: Rules(include=("a", "")),
        lambda: Rules(keep=("",)),
    ],
)
def test_rules_that_contradict_themselves(rules: type[Rules]) -> None:
    with pytest.raises(InputError):
        rules()


@pytest.mark.parametrize("rules", [Rules(keep_first=1), Rules(keep_last=1)])
def test_layers_to_keep_need_a_number_of_layers(rules: Rules) -> None:
    with pytest.raises(InputError, match="needs num_hidden_layers"):
        Selector(rules, Model())
    assert Selector(Rules(), Model()).reason("model.layers.0.mlp.up_proj", 64, 16) is None


def test_what_the_source_has_chosen_stays_quantized() -> None:
    """Heads and tables that are packed already stay so; a tied head does not, because no reader would look at it."""
    for module in ("lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"):
        assert selector("llama").reason(module, 64, 16, defaults=False) is None
    rules = Rules(keep=("lm_head",), keep_first=1)
    assert selector("llama", rules).reason("lm_head", 64, 16, defaults=False) == "--keep lm_head"
    assert selector("llama", rules).reason("model.layers.0.mlp.gate", 64, 16, defaults=False) is not None
    tied = Selector(Rules(), Model(layers=4, tied_head=True))
    assert tied.reason("lm_head", 64, 16, defaults=False) == "output head tied to the embedding"


# --- whole checkpoints ---


def test_the_missing_partner_of_a_checkpoint(tmp_path: Path) -> None:
    tensors = llama()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(
        CheckpointError, match=r"model.layers.1.mlp.gate_proj shares its scale with model.layers.1.mlp.up_proj"
    ):
        make_plan(write_checkpoint(tmp_path / "s", tensors), Options())


def test_patterns_that_fit_nothing_are_noted(tmp_path: Path) -> None:
    plan = make_plan(write_checkpoint(tmp_path / "s", llama()), Options(rules=Rules(keep=("*.mlp.donw_proj",))))
    assert "pattern '*.mlp.donw_proj' matches no module" in plan.notes


def test_nothing_left_to_convert_is_an_error_that_counts(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", {"lm_head.weight": random(0, 32, 32), "model.norm.weight": random(0, 32)})
    with pytest.raises(CheckpointError, match=r"nothing to convert \(1 output head\)"):
        make_plan(source, Options())


def test_experts_of_a_layer_that_are_not_alike_are_noted(tmp_path: Path) -> None:
    """Servers hold the experts of a layer in one tensor."""
    at = "model.layers.0.mlp.experts.0"
    tensors = {f"{at}.{name}.weight": random(1, 32, 32) for name in ("gate_proj", "up_proj", "down_proj")}
    source = write_checkpoint(tmp_path / "s", tensors, {"model_type": "qwen3_moe"})
    (note,) = [note for note in make_plan(source, Options(rules=Rules(keep=("gate_proj",)))).notes if "alike" in note]
    assert note.startswith(f"{at}.down_proj is quantized and {at}.")
    assert not [note for note in make_plan(source, Options()).notes if "alike" in note]
