"""What a plan says before it runs."""

from __future__ import annotations

from pathlib import Path

from halfbyte.checkpoint import Options, Rules, make_plan
from tests.checkpoint.toy import random, write_checkpoint


def test_a_kept_module_that_a_reader_takes_for_all_layers(tmp_path: Path) -> None:
    """SGLang matches projections of latent attention by their last part, in every layer."""
    tensors = {
        f"model.layers.{layer}.self_attn.{name}.weight": random(layer, 64, 64)
        for layer in range(2)
        for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
    }
    source = write_checkpoint(tmp_path / "s", tensors)
    plan = make_plan(source, Options(rules=Rules(keep_first=1)))
    (note,) = [note for note in plan.notes if "SGLang" in note]
    assert note.startswith("model.layers.1.self_attn.q_a_proj is quantized, but SGLang would take")
    assert "because model.layers.0.self_attn.kv_a_proj_with_mqa is kept" in note
    assert not [note for note in make_plan(source, Options()).notes if "SGLang" in note]
    exact = make_plan(source, Options(layout="compressed-tensors", rules=Rules(keep_first=1)))
    assert not [note for note in exact.notes if "excluded" in note]
