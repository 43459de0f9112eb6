"""Conv1D in an architecture that the table does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.checkpoint import Options, Rules, make_plan
from halfbyte.models.roles import REASONS
from tests.checkpoint.toy import Array, random, write_checkpoint

UNHEARD = {"model_type": "unheard_of", "architectures": ["UnheardOfLMHeadModel"]}


def gpt2_like(upright: bool) -> dict[str, Array]:
    """A block of GPT-2, weights as Conv1D stores them or as linear layers do."""
    sizes = {"attn.c_attn": (64, 192), "attn.c_proj": (64, 64), "mlp.c_fc": (64, 256), "mlp.c_proj": (256, 64)}
    tensors = {}
    for number, (name, (inputs, outputs)) in enumerate(sizes.items()):
        values = random(number, inputs, outputs)
        tensors[f"h.0.{name}.weight"] = values.T.copy() if upright else values
        tensors[f"h.0.{name}.bias"] = random(9, 1, outputs)[0]
    return tensors | {"h.0.extra.fc.weight": random(7, 64, 64)}


@pytest.mark.parametrize("rules", [Rules(), Rules(include=("h.0",))])
def test_the_bias_tells_that_a_weight_is_stored_transposed(tmp_path: Path, rules: Rules) -> None:
    plan = make_plan(write_checkpoint(tmp_path / "s", gpt2_like(upright=False), UNHEARD), Options(rules=rules))
    kept = {name for name, reason in plan.kept.items() if reason == REASONS["transposed"]}
    assert kept == {"h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.mlp.c_fc", "h.0.mlp.c_proj"}
    assert [unit.module for shard in plan.shards for unit in shard.units] == ["h.0.extra.fc"]


def test_linear_layers_of_the_same_names_are_converted(tmp_path: Path) -> None:
    plan = make_plan(write_checkpoint(tmp_path / "s", gpt2_like(upright=True), UNHEARD), Options())
    assert not plan.kept
    assert len([unit for shard in plan.shards for unit in shard.units]) == 5
