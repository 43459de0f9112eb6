"""Exclude lists against what is stored: every sentence, and which entries count as naming something."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.layouts.description import Claim
from halfbyte.layouts.storage import read_config
from halfbyte.models import model_of
from halfbyte.verify.rules.excluded import _names_something, exclude_problems, unquantized_modules
from halfbyte.verify.stored import read_contents
from tests.verify.headers import Headers, checkpoint, compressed, contents, fp8, lines, modelopt, mxfp4, plain

CT = "compressed-tensors"


def found(headers: Headers, claim: Claim, **config: Any) -> list[str]:
    made = checkpoint(headers, config)
    return lines(exclude_problems(made, read_contents(made), claim, model_of(config)))


def test_modules_that_readers_build_as_linear_layers() -> None:
    headers: Headers = {
        "l.q_proj.weight": ("BF16", (4, 4)),
        "l.norm.weight": ("BF16", (4, 4)),
        "l.ids.weight": ("I64", (4, 4)),
        "l.vector.weight": ("BF16", (4,)),
        "l.cube.weight": ("BF16", (4, 4, 4)),
        "l.matrix": ("BF16", (4, 4)),
        "l.experts.gate_up_proj": ("BF16", (4, 4, 4)),
        "l.experts.down_proj": ("F32", (4, 4, 4)),
        "k.experts.down_proj": ("BF16", (4, 4)),
        "j.experts.down_proj": ("I32", (4, 4, 4)),
        "a.q_proj.weight": ("F16", (4, 4)),
    }
    assert unquantized_modules(contents(headers), model_of({})) == ["a.q_proj", "l.experts", "l.q_proj"]


def test_nothing_is_asked_of_other_configs() -> None:
    """No reader, no quantized weight, or a layout that is not known."""
    assert found(compressed("a") | plain("b"), Claim("fp8", False)) == []
    assert found(plain("b"), Claim(CT, False)) == []
    assert found(compressed("a") | plain("b"), Claim(None, False)) == []
    assert found(compressed("a") | plain("b"), Claim("other", False)) == []


SWALLOWED = "quantized, but {} asks for {} and finds it excluded{}: it will not load"
MISSED = "{}, but not in the exclude list as {} reads it, which expects FP4 tensors there"


def test_quantized_modules_that_are_excluded() -> None:
    """By each reader in its way; a fused layer is named once."""
    headers = modelopt("l.q_proj") | modelopt("l.k_proj") | modelopt("l.v_proj") | modelopt("l.o_proj")
    told = found(headers, Claim("modelopt", False, ignore=("l.o", "lm_head")))
    assert told == ["error [swallowed] l.o_proj: " + SWALLOWED.format("vLLM", "l.o_proj", " by 'l.o'")]
    told = found(headers, Claim("modelopt", False, ignore=("l.q_proj", "l.k_proj", "l.v_proj", "lm_head")))
    assert told == [
        f"error [swallowed] l.q_proj: {SWALLOWED.format('vLLM', 'l.qkv_proj', '')}",
        f"error [swallowed] l.q_proj: {SWALLOWED.format('SGLang', 'l.qkv_proj', '')}",
        *(
            f"error [swallowed] l.{leaf}_proj: "
            + SWALLOWED.format("TensorRT-LLM", f"l.{leaf}_proj", f" by 'l.{leaf}_proj'")
            for leaf in "qkv"
        ),
    ]
    assert found(headers | compressed("c"), Claim("modelopt", False, ignore=("c", "lm_head"))) == []


def test_plain_modules_that_are_not_excluded() -> None:
    """TensorRT-LLM is not asked; the router is called one."""
    headers = modelopt("l.o_proj") | plain("l.gate") | plain("l.up_proj") | plain("l.down_proj")
    expected = [
        f"error [not-excluded] l.{leaf}: {MISSED.format(what, reader)}"
        for reader in ("vLLM", "SGLang")
        for leaf, what in (("down_proj", "unquantized"), ("gate", "a router"), ("up_proj", "unquantized"))
    ]
    assert found(headers, Claim("modelopt", False, ignore=("lm_head",))) == expected
    assert found(headers, Claim("modelopt", False, ignore=("lm_head", "l.gate", "l.up_proj", "l.down_proj"))) == []


@pytest.mark.parametrize("partner", [False, True])
def test_members_of_fused_layers(partner: bool) -> None:
    """With its partner there, a listed member is not enough."""
    headers = compressed("l.o_proj") | plain("l.up_proj") | (compressed("l.gate_proj") if partner else {})
    told = found(headers, Claim(CT, False, ignore=("lm_head", "l.up_proj")))
    expected = f"error [not-excluded] l.up_proj: {MISSED.format('unquantized', 'vLLM')}"
    assert told == ([expected] if partner else [])
    both = compressed("l.o_proj") | plain("l.up_proj") | plain("l.gate_proj")
    assert found(both, Claim(CT, False, ignore=("lm_head", "l.up_proj", "l.gate_proj"))) == []
    assert len(found(both, Claim(CT, False, ignore=("lm_head", "l.up_proj")))) == 2


def test_only_modules_that_a_group_targets_are_asked_for() -> None:
    headers = compressed("l.o_proj") | plain("l.down_proj")
    for targets, expected in (
        (["Linear"], [f"error [not-excluded] l.down_proj: {MISSED.format('unquantized', 'vLLM')}"]),
        (["re:.*o_proj"], []),
    ):
        config = {
            "quant_method": CT,
            "ignore": ["lm_head"],
            "config_groups": {"g": {"targets": targets, "weights": {}}},
        }
        claim = read_config(config)
        assert found(headers, claim, quantization_config=config) == expected


def test_names_at_run_time() -> None:
    """transformers calls LLaVA's projector by another name; vLLM asks for the one in the file."""
    disk, there = "multi_modal_projector.linear_1", "model.multi_modal_projector.linear_1"
    headers = compressed("language_model.model.layers.0.mlp.down_proj") | plain(disk)
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    text = f"transformers calls it {there}, which is not in the exclude list: it expects FP4"
    line = f"error [not-excluded] {disk}: unquantized, and {text}"
    heads = ("lm_head", "language_model.lm_head")
    assert found(headers, Claim(CT, False, ignore=(*heads, disk)), **config) == [line]
    assert found(headers, Claim(CT, False, ignore=heads), **config) == [
        f"error [not-excluded] {disk}: {MISSED.format('unquantized', 'vLLM')}",
        line,
    ]
    assert found(headers, Claim(CT, False, ignore=(*heads, disk, there)), **config) == []
    twin = {name.replace("weight_packed", "weight"): entry for name, entry in headers.items()}
    twin["language_model.model.layers.0.mlp.down_proj.weight_scale_2"] = ("F32", ())
    del twin["language_model.model.layers.0.mlp.down_proj.weight_global_scale"]
    assert found(twin, Claim("modelopt", False, ignore=(*heads, disk)), **config) == []


@pytest.mark.parametrize("stored", [None, modelopt, plain])
@pytest.mark.parametrize("tied", [False, True])
def test_heads_that_are_in_no_file(tied: bool, stored: Any) -> None:
    headers = modelopt("model.layers.0.mlp.down_proj") | (stored("lm_head") if stored else {})
    told = found(headers, Claim("modelopt", False), tie_word_embeddings=tied)
    told = [line for line in told if ": unquantized, but" not in line]
    text = "the output head, tied to the embedding, but not in the exclude list as {} reads it"
    expected = [f"error [not-excluded] lm_head: {text.format(reader)}" for reader in ("vLLM", "SGLang")]
    assert told == (expected if tied and not stored else [])


IDLE = "warning [idle-entry] config.json: the exclude list names {}, which is no part of the name of any module"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ((), None),
        (("n.1",), "'n.1'"),
        (("n.1", "*.norm", "n.2"), "'n.1' (and 1 more)"),
        (("n.3", "n.1", "n.2"), "'n.3' (and 2 more)"),
        (("model.norm.weight", "model.layers.0.mlp.gate_up_proj", "lm_head"), None),
    ],
)
def test_entries_that_name_nothing(entries: tuple[str, ...], said: str | None) -> None:
    headers = modelopt("model.layers.0.mlp.gate_proj") | modelopt("model.layers.0.mlp.up_proj")
    headers["model.norm.weight"] = ("BF16", (4,))
    told = [line for line in found(headers, Claim("modelopt", False, ignore=entries)) if "idle" in line]
    assert told == ([] if said is None else [IDLE.format(said)])


def test_entries_that_the_model_knows_are_not_idle() -> None:
    """A list may be that of a whole family: vision towers that this checkpoint does not have."""
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    entry = "model.multi_modal_projector.linear_2"
    headers = compressed("language_model.model.layers.0.mlp.down_proj")
    heads = ("lm_head", "language_model.lm_head")
    assert found(headers, Claim(CT, False, ignore=(*heads, entry)), **config) == []
    assert found(headers, Claim(CT, False, ignore=(*heads, entry + "0")), **config) == [IDLE.format(f"'{entry}0'")]


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ("model.layers.0", True), ("layers.0.m", True), ("layers.1", False), ("re:model", True), ("re:^model", True),
        ("re:layers", False), ("re:.*layers", True), ("re:lm_head", True), ("re:(", False), ("*.0.*", True),
        ("model*mlp", True), ("model*b", False), ("model?layers", True), ("mo.el*", False), ("*up*", True),
        ("model.layers.0.", True), ("mlp.", True), ("lm_head.", True), ("model.layers.0.mlp.*x", False),
    ],
)  # fmt: skip
def test_the_most_generous_reading(entry: str, names: bool) -> None:
    assert _names_something(entry, "lm_head\nmodel.layers.0.mlp.up") is names


def test_a_config_that_names_each_layer() -> None:
    """Only what it names is quantized: nothing is asked of the list."""
    headers = modelopt("a") | modelopt("b") | modelopt("c") | fp8("d") | mxfp4("e") | plain("f")
    left_out = "but quantized_layers does not name it: readers take it as unquantized"
    assert found(headers, Claim("modelopt", False, layers=("b", "z", "f", "d"))) == [
        *(f"error [not-listed] {name}: NVFP4, {left_out}" for name in "ac"),
        *(f"error [not-listed] {name}: named by quantized_layers, but not stored as quantized" for name in "fz"),
    ]
