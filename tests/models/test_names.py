"""What the name of a module says."""

from __future__ import annotations

from halfbyte.models.names import is_expert, is_row_parallel, layer_index, routed_layer, same_projection


def test_layer_numbers() -> None:
    assert layer_index("model.layers.12.mlp.up_proj") == 12
    assert layer_index("module.module.decoder.layers.3.mlp.experts.linear_fc1.weight0") == 3
    assert layer_index("lm_head") is None


def test_experts_by_name() -> None:
    assert is_expert("model.layers.0.mlp.experts.3.up_proj")
    assert is_expert("model.layers.0.mlp.shared_experts.up_proj")
    assert not is_expert("model.layers.0.mlp.up_proj")
    assert routed_layer("model.layers.0.mlp.experts.3.up_proj") == "model.layers.0.mlp.experts"
    assert routed_layer("model.layers.0.mlp.shared_experts.up_proj") is None


def test_one_key_for_a_projection_of_all_experts() -> None:
    assert same_projection("l.0.experts.3.w1") == same_projection("l.0.experts.12.w1") == "l.0.experts.*.w1"
    assert same_projection("l.0.experts.gate_up_proj") == "l.0.experts.gate_up_proj"
    assert same_projection("l.0.mlp.up_proj") == "l.0.mlp.up_proj"


def test_modules_that_are_cut_along_their_width() -> None:
    assert is_row_parallel("a.o_proj")
    assert is_row_parallel("e.0.w2")
    assert not is_row_parallel("a.foo_proj")
    assert not is_row_parallel("e.0.w1")
