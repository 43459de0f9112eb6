"""What a plan says before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def test_an_unknown_architecture_is_said_with_what_was_taken_for_linear(tmp_path: Path) -> None:
    tensors = {f"eyes.{layer}.fc1.weight": random(layer, 64, 64) for layer in range(2)}
    tensors |= {"vpm.blocks.0.fc1.weight": random(3, 64, 64), "model.layers.0.mlp.down_proj.weight": random(4, 64, 64)}
    configs: tuple[tuple[dict[str, Any], bool], ...] = (
        ({"architectures": ["BrandNew"], "model_type": "brand_new"}, False),
        ({"architectures": ["BrandNew"], "model_type": "brand_new", "text_config": {"model_type": "llama"}}, True),
        ({"architectures": [None], "model_type": None}, False),
    )
    for config, by_type in configs:
        source = write_checkpoint(tmp_path / str(len(str(config))), tensors, config)
        (note,) = [note for note in make_plan(source, Options()).notes if "table of architectures" in note]
        named = config["architectures"][0] or "a model without a name"
        assert note.startswith(f"{named} is not in the table")
        assert "eyes.#.fc1" in note
        assert "vpm" not in note
        assert "--dry-run" in note
        assert "--modules-from-model" in note
        assert ("LlamaForCausalLM, of the same type, lacks modules of it" in note) is by_type
        assert ("mlp.down_proj" in note) is not by_type
    known = write_checkpoint(tmp_path / "known", {"model.layers.0.mlp.down_proj.weight": random(4, 64, 64)},
                             {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})  # fmt: skip
    assert not [note for note in make_plan(known, Options()).notes if "table of architectures" in note]
