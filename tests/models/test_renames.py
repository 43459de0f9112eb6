"""Rules that turn names on disk into names at run time, and what a row of the table says of them."""

from __future__ import annotations

import re

import pytest

from halfbyte.models.architectures import Architecture, Rename, find_architecture, from_description
from halfbyte.models.experts import Stacking
from halfbyte.models.roles import Role


def row(*renames: Rename, exact: bool = True) -> Architecture:
    roles: dict[str, Role] = {
        "lm_head": "head",
        "model.heads.#.out": "head",
        "model.embed": "table",
        "model.layers.#.up": "linear",
        "model.layers.#.mlp.gate": "router",
        "model.proj": "projector",
        "model.mix": "shared",
        "model.tower.in": "tower",
        "model.dt": "direct",
        "model.flat": "linear",
        "model.layers.#.tied": "shared",
        "model.layers.#.list.#.tied": "shared",
    }
    stacks: dict[str, Stacking | None] = {"model.layers.#.mlp.experts.up_proj": "halves"}
    return Architecture("X", roles, "model", {}, False, stacks, renames, exact=exact)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model.text.old.weight", "model.text.new.weight"),
        ("text.old.weight", "text.new.weight"),
        ("model.vision.old.weight", None),
        ("old.weight", None),
        ("text.other.weight", None),
    ],
)
def test_a_rule_for_one_part_of_a_model(name: str, found: str | None) -> None:
    """With or without the prefix of the whole; what stands before is no matter of the rule."""
    rule = Rename(re.compile("(?P<g0>^old)"), ("new",), scope=("text", "model"))
    assert rule.apply(name) == (None if found is None else [found])


def test_a_rule_for_a_part_of_a_model_without_a_prefix() -> None:
    rule = Rename(re.compile("(?P<g0>old)"), ("new",), scope=("text", ""))
    assert rule.apply("text.old") == ["text.new"]
    assert rule.apply("model.text.old") is None


def test_alternatives_with_one_target_or_one_each() -> None:
    find = re.compile(r"(?P<g0>gate)|(?P<g1>up)")
    assert Rename(find, ("both",)).apply("a.up.up") == ["a.both.up"]  # the first place only
    assert Rename(find, ("x", "y"), paired=True).apply("a.up") == ["a.y"]
    assert Rename(find, ("x", "y"), paired=True).apply("a.gate") == ["a.x"]
    assert Rename(find, ("x", "y")).apply("a.gate") == ["a.x", "a.y"]
    assert Rename(find, ("x",)).apply("a.down") is None


def test_numbers_are_carried_over() -> None:
    rule = Rename(re.compile(r"(?P<g0>other)|(?P<g1>layers\.linear_(\d+)(\.x)?)"), (r"encoder\.\1.proj\2",))
    assert rule.apply("layers.linear_12.weight") == ["encoder.12.proj.weight"]
    assert rule.apply("layers.linear_12.x.weight") == ["encoder.12.proj.x.weight"]


def test_all_names_are_changed_and_then_values_once() -> None:
    rules = (
        Rename(re.compile("(?P<g0>^transformer)"), ("model",)),
        Rename(re.compile("(?P<g0>blocks)"), ("layers",)),
        Rename(
            re.compile(r"(?P<g0>wide\.weight)"), ("up.weight", "down.weight"), operations=("Chunk",), of_weights=True
        ),
        Rename(re.compile("(?P<g0>up)"), ("never",), operations=("Transpose",)),
    )
    found = row(*rules).run_time("transformer.blocks.3.wide.weight")
    assert found.names == ("model.layers.3.up.weight", "model.layers.3.down.weight")
    assert (found.operations, found.rule) == (("Chunk",), rules[2])
    plain = row(*rules[:2]).run_time("transformer.blocks.3.up.weight")
    assert (plain.names, plain.operations, plain.rule) == (("model.layers.3.up.weight",), (), None)


def test_the_prefix_is_added_or_taken_away_where_only_that_makes_a_name_known() -> None:
    assert row().run_time("layers.3.up.weight").names == ("model.layers.3.up.weight",)
    assert row().run_time("model.lm_head.weight").names == ("lm_head.weight",)
    assert row().run_time("layers.3.down.weight").names == ("layers.3.down.weight",)
    assert row(exact=False).run_time("layers.3.up.weight").names == ("layers.3.up.weight",)
    assert row(exact=False).role("layers.3.up") == "linear"


def test_experts_are_one_by_one_on_disk_and_stacked_at_run_time() -> None:
    merge = Rename(
        re.compile(r"(?P<g0>experts\..*\.up_proj\.weight)"), ("experts.up_proj",), operations=("MergeModulelist",)
    )
    found = row(merge).run_time("model.layers.0.mlp.experts.17.up_proj.weight")
    assert found.names == ("model.layers.0.mlp.experts.up_proj",)
    assert (found.merges_experts, found.is_reshaped) == (True, False)
    assert row(merge).finds("model.layers.0.mlp.experts.17.up_proj")
    alone = row()  # no rule: each keeps its number
    assert alone.run_time("model.layers.0.mlp.experts.17.up_proj.weight").names == (
        "model.layers.0.mlp.experts.17.up_proj.weight",
    )
    assert alone.role("model.layers.0.mlp.experts.17.up_proj") == "linear"
    assert alone.role("model.layers.0.mlp.experts.up_proj") == "linear"
    assert alone.role("model.layers.0.other.experts.17.up_proj") is None
    assert alone.role("model.layers.0.mlp.experts_17.up_proj") is None
    assert not alone.finds("model.layers.0.mlp.experts.17.up_proj")


def test_what_a_row_lists() -> None:
    assert row().heads() == ("lm_head",)
    assert row().single_linears() == ("lm_head", "model.proj", "model.mix", "model.tower.in", "model.dt", "model.flat")
    assert row().repeated("shared", 2) == ["model.layers.0.tied", "model.layers.1.tied"]
    assert row().layer_stacks == 1


def test_a_split_tensor_is_what_its_first_known_part_is() -> None:
    rule = Rename(re.compile("(?P<g0>both)"), ("nothing", "gate"), operations=("Split",))
    assert row(rule).role("model.layers.0.mlp.both") == "router"
    assert not row(rule).finds("model.layers.0.mlp.both")


def test_a_row_of_another_class_or_of_a_part_is_not_exact() -> None:
    text = {"text_config": {"model_type": "llama"}}
    for config, exact in (
        ({"model_type": "llama"}, True),
        ({"model_type": "llama", "architectures": ["NewLM"]}, False),
        (text, False),
        ({"model_type": "new", **text}, False),
    ):
        found = find_architecture(config)
        assert found is not None
        assert (found.name, found.exact) == ("LlamaForCausalLM", exact)


def test_a_row_from_a_description() -> None:
    description = {
        "modules": {"head": ["out"], "linear": ["layers.#.up"]},
        "prefix": "inner",
        "tied": {"out.weight": "words.weight"},
        "tied_by_default": True,
        "stacks": {},
        "renames": [{"find": "(?P<g0>old)", "put": ["layers"], "scope": ["part", None]}],
        "read_at_start": ["layers.#.up"],
    }
    found = from_description("OddLM", description)
    assert (found.name, found.exact, found.tied_by_default, found.prefix) == ("OddLM", True, True, "inner")
    assert found.tied == {"out": "words"}
    assert found.read_at_start == ("layers.#.up",)
    assert found.renames[0].scope == ("part", "")
    assert (found.renames[0].operations, found.renames[0].paired, found.renames[0].of_weights) == (None, False, False)
    assert found.role("layers.4.up") == "linear"
