"""Names of kept modules under which only servers ask: fused layers, and towers that they build with other classes.

`tests/clients/check_sglang_families.py` has SGLang ask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halfbyte.checkpoint import Options, Resources, Rules, make_plan, run
from halfbyte.layouts import get_layout
from halfbyte.verify import verify
from tests.checkpoint.toy import Array, llama, random, write_checkpoint

BOTH = pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
QWEN = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"], "num_hidden_layers": 1}


def ignored(folder: Path, tensors: dict[str, Array], config: dict[str, Any] | None, options: Options) -> list[str]:
    """The exclude list, after verify has found nothing wrong with it."""
    plan = make_plan(write_checkpoint(folder / "s", tensors, config), options)
    run(plan, folder / "d", Resources(workers=1, sync=False))
    rules = [problem.rule for problem in verify(folder / "d", folder / "s").problems]
    assert not {"swallowed", "idle-entry", "not-excluded"} & set(rules)
    found: list[str] = plan.json_files["config.json"]["quantization_config"]["ignore"]
    return found


def entry(layout: str, name: str) -> str:
    return get_layout(layout).all_under.format(name)


@BOTH
def test_kept_layers_that_servers_fuse_are_listed_under_the_fused_name_too(tmp_path: Path, layout: str) -> None:
    """Most models of SGLang do not say what qkv_proj is made of."""
    found = ignored(tmp_path, llama(), None, Options(layout=layout, rules=Rules(keep_first=1)))
    first = "model.layers.0"
    members = [f"{first}.self_attn.{part}_proj" for part in "qkvo"]
    members += [f"{first}.mlp.{part}_proj" for part in ("gate", "up", "down")]
    assert found == sorted([*members, f"{first}.self_attn.qkv_proj", f"{first}.mlp.gate_up_proj", "lm_head"])


def tower(at: str) -> dict[str, Array]:
    names = ("blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.fc1", "merger.mlp.0")
    return {f"{at}.{name}.weight": random(number, 64, 64) for number, name in enumerate(names)}


@BOTH
@pytest.mark.parametrize("at", ["visual", "model.visual"])
def test_a_tower_is_excluded_as_a_whole(tmp_path: Path, layout: str, at: str) -> None:
    """By the last part of its name: servers put it elsewhere."""
    found = ignored(tmp_path, llama(layers=1) | tower(at), QWEN, Options(layout=layout))
    assert entry(layout, "visual") in found
    for reader in get_layout(layout).readers:
        assert reader.excludes("visual.blocks.0.attn.out_proj", found)
        assert not reader.excludes("model.layers.0.self_attn.qkv_proj", found)


@BOTH
def test_not_where_a_part_of_it_is_quantized(tmp_path: Path, layout: str) -> None:
    rules = Rules(include=("model.layers", "blocks.0.mlp.fc1"))
    found = ignored(tmp_path, llama(layers=1) | tower("visual"), QWEN, Options(layout=layout, rules=rules))
    assert entry(layout, "visual") not in found
    assert {entry(layout, "visual.blocks.0.attn"), entry(layout, "merger")} <= set(found)


@BOTH
def test_by_its_full_name_where_the_last_part_is_a_quantized_module_too(tmp_path: Path, layout: str) -> None:
    tensors = llama(layers=1) | tower("model.vit") | {"model.layers.0.vit.fc1.weight": random(8, 64, 64)}
    rules = Rules(include=("model.layers",))
    found = ignored(tmp_path, tensors, {"model_type": "unheard_of"}, Options(layout=layout, rules=rules))
    assert entry(layout, "model.vit") in found
    assert entry(layout, "vit") not in found


def test_not_where_a_reader_would_take_a_quantized_module_along(tmp_path: Path) -> None:
    """vLLM reads Model-Optimizer's lists by substring."""
    tensors = llama(layers=1) | tower("vit") | {"model.layers.0.mlp.vitamin.weight": random(9, 64, 64)}
    found = ignored(tmp_path, tensors, {"model_type": "unheard_of"}, Options(layout="modelopt"))
    assert "vit*" not in found
    assert "vit.blocks.0.attn.qkv" in found
