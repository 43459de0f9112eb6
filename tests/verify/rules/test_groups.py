"""Groups of a config: how they are read, and which module each describes."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.verify.rules.groups import Group, group_of, idle_targets, read_groups

SCHEME = {"num_bits": 4}


def groups(**targets: list[str]) -> list[Group]:
    return [Group(name, tuple(found), SCHEME, None, None) for name, found in targets.items()]


def test_what_is_read() -> None:
    given: dict[Any, Any] = {
        "a": {"targets": ["Linear", 3], "weights": SCHEME, "input_activations": {}, "format": "f"},
        1: {"targets": "Linear", "weights": [4], "input_activations": 7, "format": 5},
        "c": "no group",
    }
    assert read_groups({"config_groups": given}) == [
        Group("a", ("Linear", "3"), SCHEME, {}, "f"),
        Group("1", (), None, None, None),
    ]
    assert read_groups({"config_groups": [given]}) == read_groups({}) == []


@pytest.mark.parametrize(
    ("module", "name"),
    [("a.q", "named"), ("a.k", "first"), ("a.kk", "first"), ("b.k", "classes"), ("b", "classes"), ("ab.q", "first")],
)
def test_names_before_expressions_before_classes(module: str, name: str) -> None:
    found = groups(classes=["Linear"], broken=["re:("], first=["re:a"], second=["re:a.k$"], named=["x", "a.q"])
    group = group_of(module, found)
    assert group is not None
    assert group.name == name


def test_modules_that_no_group_targets() -> None:
    found = groups(a=["re:q", "a.q", "Conv2d", "q"], b=["re:["])
    assert group_of("a.k", found) is None
    assert group_of("a.q", found) is not None


def test_targets_that_match_nothing() -> None:
    """Names of classes begin with a capital and have no dot."""
    first, second = groups(
        a=["a.q", "re:.*q", "b.q", "re:q", "Linear", "Conv_2d", "linear", "Layer.q", "re:("], b=["x", "re:a"]
    )
    told = [(group.name, target) for group, target in idle_targets([first, second], ["a.q", "c"])]
    assert told == [("a", target) for target in ("b.q", "re:q", "linear", "Layer.q", "re:(")] + [("b", "x")]
