"""FP8 caches of keys and values: their scales move with the layout, and verify follows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfbyte.checkpoint import Options, Plan, Resources, make_plan, run
from halfbyte.testing import assert_same_bits
from halfbyte.verify import verify
from halfbyte.verify.against.compare import Progress
from tests.checkpoint.toy import Array, llama, read_checkpoint, write_checkpoint
from tests.quantized import edit

SMALL = Resources(workers=1, max_memory=1 << 28, sync=False, chunk=5000)
NAMES = {"modelopt": "{0}_proj.{0}_scale", "compressed-tensors": "{0}_scale"}
SHAPES: dict[str, tuple[int, ...]] = {"modelopt": (), "compressed-tensors": (1,)}
CACHES: dict[str, dict[str, Any]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
    },
}


def scales(layout: str) -> dict[str, Array]:
    return {
        f"model.layers.{layer}.self_attn.{NAMES[layout].format(part)}": np.full(
            SHAPES[layout], 0.01 * (layer + 1) + (part == "v"), np.float32
        )
        for layer in range(2)
        for part in "kv"
    }


def source(folder: Path, layout: str, extra: dict[str, Array] | None = None, **config: Any) -> Path:
    """A model in FP8, one scale per weight, with the scales of its cache."""
    tensors: dict[str, Array] = {}
    for name, weight in llama().items():
        if "_proj.weight" in name:
            tensors[name] = (weight.astype(np.float32) * 8).astype("float8_e4m3fn")
            tensors[f"{name}_scale"] = np.array(0.125, np.float32)
        else:
            tensors[name] = weight
    tensors |= scales(layout) if extra is None else extra
    return write_checkpoint(folder, tensors, {"quantization_config": CACHES[layout], **config}, shards=2)


def convert(path: Path, target: Path, options: Options) -> tuple[Plan, dict[str, Array]]:
    plan = make_plan(path, options)
    run(plan, target, SMALL)
    return plan, read_checkpoint(target)


def errors(path: Path, against: Path) -> list[tuple[str, str]]:
    return [(problem.rule, problem.name) for problem in verify(path, against).problems if problem.level == "error"]


@pytest.mark.parametrize("before", NAMES)
@pytest.mark.parametrize("after", NAMES)
def test_scales_get_the_names_of_the_layout(tmp_path: Path, before: str, after: str) -> None:
    path = source(tmp_path / "source", before)
    plan, found = convert(path, tmp_path / "out", Options(layout=after))
    cache = {name: x for name, x in found.items() if name.endswith((".k_scale", ".v_scale"))}
    assert set(cache) == set(scales(after))
    for name, wanted in scales(after).items():
        assert_same_bits(cache[name], wanted)
    first = "model.layers.0.self_attn."
    old, new = (first + NAMES[layout].format("v") for layout in (before, after))
    moved = f"4 scales of the FP8 cache get the names that readers of {after} want: {old} becomes {new}"
    assert [note for note in plan.notes if "cache" in note] == ([] if before == after else [moved])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["kv_cache_scheme"]["num_bits"], config["kv_cache_scheme"]["type"]) == (8, "float")
    if after == "modelopt":
        nested = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
        assert nested["kv_cache_quant_algo"] == "FP8"
    else:
        assert config["kv_cache_scheme"]["strategy"] == "tensor"
    assert errors(tmp_path / "out", path) == []


def test_verify_counts_scales_that_moved_as_equal(tmp_path: Path) -> None:
    path = source(tmp_path / "source", "modelopt")
    counts = []
    for layout in NAMES:
        convert(path, tmp_path / layout, Options(layout=layout))
        seen: list[Progress] = []
        counts.append(verify(tmp_path / layout, path, progress=seen.append).equal)
        done = [progress.done for progress in seen]
        assert (done[0], done[-1]) == (1, seen[0].total)
        assert done == sorted(set(done))
    assert counts[0] == counts[1] > len(scales("modelopt"))


def test_verify_finds_a_scale_that_changed_or_is_gone(tmp_path: Path) -> None:
    path = source(tmp_path / "source", "modelopt")
    convert(path, tmp_path / "out", Options(layout="compressed-tensors"))
    name = "model.layers.1.self_attn.v_scale"
    edit(tmp_path / "out", {name: np.array([3], np.float32)})
    assert ("kept", name) in errors(tmp_path / "out", path)
    edit(tmp_path / "out", drop=(name,))
    assert ("lost", "model.layers.1.self_attn.v_proj.v_scale") in errors(tmp_path / "out", path)


def test_a_bf16_checkpoint_has_none_of_them(tmp_path: Path) -> None:
    path = source(tmp_path / "source", "modelopt")
    plan, found = convert(path, tmp_path / "out", Options(to="bf16"))
    assert not any(name.endswith(("k_scale", "v_scale")) for name in found)
    assert set(scales("modelopt")) <= set(plan.dropped)
    assert all("cache of keys and values" in plan.dropped[name] for name in scales("modelopt"))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert errors(tmp_path / "out", path) == []


def test_a_scheme_of_the_same_layout_stays_as_it_is(tmp_path: Path) -> None:
    own = {**CACHES["compressed-tensors"]["kv_cache_scheme"], "strategy": "attn_head"}
    heads = {name: np.full((2, 1, 1), 0.5, np.float32) for name in scales("compressed-tensors")}
    quantization = {**CACHES["compressed-tensors"], "kv_cache_scheme": own}
    path = source(tmp_path / "source", "compressed-tensors", heads, quantization_config=quantization)
    plan = make_plan(path, Options(layout="compressed-tensors"))
    assert plan.json_files["config.json"]["quantization_config"]["kv_cache_scheme"] == own
    assert set(heads).isdisjoint(plan.dropped)
    assert set(heads) <= set(make_plan(path, Options(layout="modelopt")).dropped)


def test_scales_that_no_config_asks_for_are_noted(tmp_path: Path) -> None:
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8"}
    path = source(tmp_path / "source", "modelopt", quantization_config=quantization)
    assert any("asks for no FP8 cache" in note for note in make_plan(path, Options()).notes)


def test_an_unquantized_model_may_have_parameters_of_that_name(tmp_path: Path) -> None:
    own = {"model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}
    path = write_checkpoint(tmp_path / "source", {**llama(), **own})
    plan = make_plan(path, Options(layout="modelopt"))
    assert "model.layers.0.self_attn.k_scale" in {output.part.name for output in plan.shards[0].outputs}
    assert not plan.dropped


def test_forms_that_are_not_known_are_copied_and_noted(tmp_path: Path) -> None:
    other = {f"model.layers.{layer}.self_attn.kv_scale": np.ones(1, np.float32) for layer in range(2)}
    plan = make_plan(source(tmp_path / "source", "modelopt", other), Options())
    assert set(other) <= {output.part.name for shard in plan.shards for output in shard.outputs}
    (note,) = [note for note in plan.notes if "quantized cache" in note]
    assert note.startswith("2 tensors of a quantized cache, model.layers.")
    assert note.endswith(".self_attn.kv_scale first, are in no form known for modelopt: copied under their own names")
    assert not [note for note in make_plan(source(tmp_path / "s", "modelopt"), Options()).notes if "cache" in note]
