"""Scales of a cache of keys and values: one scale under the names of each layout."""

from __future__ import annotations

import pytest

from halfbyte.layouts.kv_cache import CacheScale, cache_scale, is_cache_tensor, move_cache_scales

ATTENTION = "model.layers.3.self_attn"


@pytest.mark.parametrize("name", ["k_proj.k_scale", "qkv_proj.k_scale", "k_proj.output_scale", "k_scale"])
def test_one_scale_under_four_names(name: str) -> None:
    assert cache_scale(f"{ATTENTION}.{name}") == CacheScale(ATTENTION, "k")


@pytest.mark.parametrize(
    "name",
    ["k_proj.weight_scale", "k_proj.input_scale", "logit_scale", "block_scale", "k_scale", "q_proj.output_scale"],
)
def test_other_scales_are_none_of_the_cache(name: str) -> None:
    assert cache_scale(name if name == "k_scale" else f"{ATTENTION}.{name}") is None
    assert not is_cache_tensor(f"{ATTENTION}.{name}") or name == "k_scale"


@pytest.mark.parametrize(
    ("layout", "source", "target", "shape"),
    [
        ("modelopt", f"{ATTENTION}.k_scale", f"{ATTENTION}.k_proj.k_scale", ()),
        ("modelopt", f"{ATTENTION}.qkv_proj.v_scale", f"{ATTENTION}.v_proj.v_scale", ()),
        ("modelopt", "backbone.layers.1.mixer.v_scale", "backbone.layers.1.mixer.v_proj.v_scale", ()),
        ("modelopt", "h.0.attention.k_scale", "h.0.attention.k_scale", ()),
        ("compressed-tensors", f"{ATTENTION}.k_proj.k_scale", f"{ATTENTION}.k_scale", (1,)),
        ("compressed-tensors", f"{ATTENTION}.v_proj.output_scale", f"{ATTENTION}.v_scale", (1,)),
    ],
)
def test_names_that_each_layout_wants(layout: str, source: str, target: str, shape: tuple[int, ...]) -> None:
    moves = move_cache_scales({source: (1,), "lm_head.weight": (4, 4)}, layout)
    assert moves.moved == {source: (target, shape)}
    assert not moves.dropped
    assert not moves.unknown


def test_layouts_of_one_model_keep_the_names_of_the_source() -> None:
    assert move_cache_scales({f"{ATTENTION}.k_scale": ()}, "gpt-oss").moved == {}


def test_two_names_for_one_scale() -> None:
    right, other = f"{ATTENTION}.k_scale", f"{ATTENTION}.k_proj.k_scale"
    moves = move_cache_scales({other: (), right: (1,)}, "compressed-tensors")
    assert moves.moved == {right: (right, (1,))}
    assert moves.dropped == {other: f"the same scale of the cache as {right}"}
    third = f"{ATTENTION}.qkv_proj.k_scale"
    moves = move_cache_scales({other: (), third: ()}, "compressed-tensors")
    assert moves.moved == {other: (right, (1,))}
    assert moves.dropped == {third: f"the same scale of the cache as {other}"}


def test_one_scale_per_head_has_a_place_in_one_layout() -> None:
    name = f"{ATTENTION}.k_scale"
    assert move_cache_scales({name: (8, 1, 1)}, "compressed-tensors").moved == {name: (name, (8, 1, 1))}
    moves = move_cache_scales({name: (8, 1, 1)}, "modelopt")
    assert not moves.moved
    assert "one scale per head" in moves.dropped[name]


def test_forms_that_are_not_known_are_copied_and_named() -> None:
    names = [f"{ATTENTION}.{tail}" for tail in ("kv_scale", "k_cache.scale", "q_scale", "k_zero_point")]
    moves = move_cache_scales(dict.fromkeys(names, ()), "modelopt")
    assert moves.unknown == names
    assert not moves.moved
    assert not moves.dropped


def test_a_plain_checkpoint_has_no_place_for_any_of_them() -> None:
    names = [f"{ATTENTION}.{tail}" for tail in ("k_scale", "v_proj.v_scale", "kv_scale", "q_scale")]
    moves = move_cache_scales({**dict.fromkeys(names, ()), f"{ATTENTION}.k_proj.weight": (4, 4)}, None)
    assert list(moves.dropped) == names
