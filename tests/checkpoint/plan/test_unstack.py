"""Stacked experts: which rows belong to whom, in every orientation, packed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import halfbyte as hb
from halfbyte.checkpoint import Options, Resources, Rules, make_plan, run
from halfbyte.errors import CheckpointError, UnsupportedError
from halfbyte.testing import assert_same_bits
from halfbyte.verify import verify
from tests.checkpoint.toy import random, read_checkpoint, write_checkpoint

Array = npt.NDArray[Any]
SMALL = Resources(workers=2, max_memory=1 << 28, sync=False, chunk=700)
EXPERTS, HIDDEN, INNER = 3, 64, 96
AT = "model.layers.0.mlp.experts"


def amax(*tensors: Array) -> np.float32:
    return np.float32(max(np.abs(x.astype(np.float32)).max() for x in tensors))


def stacked(model_type: str) -> tuple[dict[str, Array], list[dict[str, Array]]]:
    """The tensors of a layer as that family stacks them, and each expert's matrices as (outputs, inputs)."""
    experts = []
    for e in range(EXPERTS):
        gate, up, down = (
            random(10 * e, INNER, HIDDEN),
            random(10 * e + 1, INNER, HIDDEN),
            random(10 * e + 2, HIDDEN, INNER),
        )
        experts.append({"gate_proj": gate, "up_proj": up * ml_dtypes.bfloat16(3), "down_proj": down})
    pairs = [(expert["gate_proj"], expert["up_proj"]) for expert in experts]
    down = np.stack([expert["down_proj"] for expert in experts])
    if model_type == "gpt_oss":
        both = np.stack([np.stack(pair, axis=1).reshape(2 * INNER, HIDDEN) for pair in pairs])
    else:
        both = np.stack([np.concatenate(pair) for pair in pairs])
    if model_type != "qwen3_5_moe":
        both, down = both.swapaxes(1, 2), down.swapaxes(1, 2)
    tensors = {f"{AT}.gate_up_proj": np.ascontiguousarray(both), f"{AT}.down_proj": np.ascontiguousarray(down)}
    tensors["model.layers.0.mlp.router.weight"] = random(99, EXPERTS, HIDDEN)
    return tensors, experts


def source(tmp_path: Path, model_type: str, tensors: dict[str, Array]) -> Path:
    config = {"model_type": model_type, "hidden_size": HIDDEN, "moe_intermediate_size": INNER}
    return write_checkpoint(tmp_path / "s", tensors, config, shards=2)


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen3_vl_moe", "llama4", "gpt_oss"])
def test_experts_are_taken_apart(tmp_path: Path, model_type: str) -> None:
    tensors, experts = stacked(model_type)
    plan = make_plan(source(tmp_path, model_type, tensors), Options(method="amax", layout="compressed-tensors"))
    run(plan, tmp_path / "d", SMALL)
    made = read_checkpoint(tmp_path / "d")
    for e, expert in enumerate(experts):
        shared = amax(expert["gate_proj"], expert["up_proj"])
        for name, x in expert.items():
            q = hb.quantize(x, "nvfp4", "modelopt", "amax", global_amax=amax(x) if name == "down_proj" else shared)
            assert_same_bits(made[f"{AT}.{e}.{name}.weight_packed"], q.codes)
            assert_same_bits(made[f"{AT}.{e}.{name}.weight_scale"], q.scales)
    assert f"{AT}.gate_up_proj" not in made


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "llama4"])
def test_stacks_that_were_saved_upright(tmp_path: Path, model_type: str) -> None:
    """Sizes of the config tell [experts, outputs, inputs] from what the family stores otherwise."""
    tensors, _ = stacked(model_type)
    upright, _ = stacked("qwen3_5_moe")
    made = {}
    for label, given in (("as usual", tensors), ("upright", upright)):
        folder = source(tmp_path / label, model_type, given)
        run(make_plan(folder, Options(method="amax", layout="compressed-tensors")), tmp_path / label / "d", SMALL)
        assert verify(tmp_path / label / "d", folder).clean
        made[label] = read_checkpoint(tmp_path / label / "d")
    assert set(made["as usual"]) == set(made["upright"])
    for name, x in made["as usual"].items():
        assert_same_bits(made["upright"][name], x)


@pytest.mark.parametrize("model_type", ["llama4", "gpt_oss"])
def test_modelopt_keeps_them_stacked_and_transposed(tmp_path: Path, model_type: str) -> None:
    tensors, experts = stacked(model_type)
    run(
        make_plan(source(tmp_path, model_type, tensors), Options(method="amax", activations="unit")),
        tmp_path / "d",
        SMALL,
    )
    made = read_checkpoint(tmp_path / "d")
    whole = tensors[f"{AT}.gate_up_proj"]
    shared = amax(whole)
    for e in range(EXPERTS):
        q = hb.quantize(np.ascontiguousarray(whole[e].T), "nvfp4", "modelopt", "amax", global_amax=shared)
        assert_same_bits(made[f"{AT}.gate_up_proj"][e], np.asarray(q.codes).T)
        assert_same_bits(made[f"{AT}.gate_up_proj_weight_scale"][e], np.asarray(q.scales).T)
    assert made[f"{AT}.gate_up_proj"].shape == (EXPERTS, HIDDEN // 2, 2 * INNER)
    assert made[f"{AT}.gate_up_proj_weight_scale_2"].shape == ()
    assert made[f"{AT}.down_proj_input_scale"] == 1
    assert len(experts) == EXPERTS


def test_gpt_oss_from_bf16(tmp_path: Path) -> None:
    tensors, _ = stacked("gpt_oss")
    tensors[f"{AT}.gate_up_proj_bias"] = random(5, EXPERTS, 2 * INNER)
    folder = source(tmp_path, "gpt_oss", tensors)
    plan = make_plan(folder, Options(to="mxfp4", layout="gpt-oss"))
    run(plan, tmp_path / "d", SMALL)
    made = read_checkpoint(tmp_path / "d")
    for name in ("gate_up_proj", "down_proj"):
        x = np.ascontiguousarray(tensors[f"{AT}.{name}"].swapaxes(1, 2))
        q = hb.quantize(x, "mxfp4", "ocp")
        shape = (*x.shape[:2], x.shape[2] // 32)
        assert_same_bits(made[f"{AT}.{name}_blocks"], np.asarray(q.codes).reshape(*shape, 16))
        assert_same_bits(made[f"{AT}.{name}_scales"], q.scales)
    assert_same_bits(made[f"{AT}.gate_up_proj_bias"], tensors[f"{AT}.gate_up_proj_bias"])
    assert plan.json_files["config.json"]["quantization_config"]["quant_method"] == "mxfp4"
    # and back: [experts, inputs, outputs] again
    run(make_plan(tmp_path / "d", Options(to="bf16")), tmp_path / "b", SMALL)
    plain = read_checkpoint(tmp_path / "b")
    q = hb.quantize(np.ascontiguousarray(tensors[f"{AT}.down_proj"].swapaxes(1, 2)), "mxfp4", "ocp")
    values = np.asarray(hb.dequantize(q, "bfloat16")).swapaxes(1, 2)
    assert_same_bits(plain[f"{AT}.down_proj"], np.ascontiguousarray(values))
    # and to its own layout: the very same bytes
    run(make_plan(tmp_path / "d", Options(to="mxfp4", layout="gpt-oss")), tmp_path / "same", SMALL)
    again = read_checkpoint(tmp_path / "same")
    assert set(again) == set(made)
    for name, x in made.items():
        assert_same_bits(again[name], x)


def test_gpt_oss_blocks_apart_with_their_biases(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (EXPERTS, 2 * INNER, HIDDEN // 32, 16), dtype=np.uint8)
    scales = generator.integers(118, 124, (EXPERTS, 2 * INNER, HIDDEN // 32), dtype=np.uint8)
    bias = random(1, EXPERTS, 2 * INNER)
    tensors: dict[str, Array] = {
        f"{AT}.gate_up_proj_blocks": blocks,
        f"{AT}.gate_up_proj_scales": scales,
        f"{AT}.gate_up_proj_bias": bias,
    }
    folder = source(tmp_path, "gpt_oss", tensors)
    run(make_plan(folder, Options(to="mxfp4", layout="compressed-tensors")), tmp_path / "d", SMALL)
    made = read_checkpoint(tmp_path / "d")
    for e in range(EXPERTS):
        for first, name in enumerate(("gate_proj", "up_proj")):
            codes = blocks[e, first::2].reshape(INNER, HIDDEN // 2)
            assert_same_bits(made[f"{AT}.{e}.{name}.weight_packed"], np.ascontiguousarray(codes))
            assert_same_bits(made[f"{AT}.{e}.{name}.weight_scale"], np.ascontiguousarray(scales[e, first::2]))
            assert_same_bits(made[f"{AT}.{e}.{name}.bias"], np.ascontiguousarray(bias[e, first::2]))
    assert f"{AT}.gate_up_proj_bias" not in made
    run(make_plan(folder, Options()), tmp_path / "n", SMALL)  # cast, one scale for all experts
    nvfp4 = read_checkpoint(tmp_path / "n")
    assert_same_bits(nvfp4[f"{AT}.gate_up_proj"][1], np.ascontiguousarray(blocks[1].reshape(2 * INNER, -1).T))
    assert nvfp4[f"{AT}.gate_up_proj_weight_scale_2"] == 2.0 ** (123 - 127 - 8)


def test_sizes_are_checked_against_the_config(tmp_path: Path) -> None:
    tensors, _ = stacked("qwen3_vl_moe")  # transposed, in a family that never is
    with pytest.raises(CheckpointError, match=r"Qwen3.5 experts should be \[192, 64\] .* but are \[64, 192\]"):
        make_plan(source(tmp_path, "qwen3_5_moe", tensors), Options(layout="compressed-tensors"))


def test_an_unknown_family_is_kept(tmp_path: Path) -> None:
    tensors, _ = stacked("qwen3_5_moe")
    tensors["model.layers.0.mlp.shared.down_proj.weight"] = random(0, 64, 64)
    plan = make_plan(source(tmp_path, "somebody_else", tensors), Options())
    assert plan.kept[f"{AT}.gate_up_proj"] == "stacked experts of a family whose orientation is not known"


def test_experts_are_kept_together(tmp_path: Path) -> None:
    tensors, _ = stacked("qwen3_5_moe")
    folder = source(tmp_path, "qwen3_5_moe", tensors)
    with pytest.raises(CheckpointError, match="stacked experts are kept or converted together"):
        make_plan(folder, Options(rules=Rules(keep=("*.experts.1.down_proj",))))
    plan = make_plan(folder, Options(rules=Rules(keep=("*.down_proj",))))
    assert f"{AT}.down_proj" in {copy.output.part.name for shard in plan.shards for copy in shard.copies}


def test_packed_experts_that_are_kept_stay_stacked(tmp_path: Path) -> None:
    tensors, _ = stacked("gpt_oss")
    tensors[f"{AT}.down_proj_bias"] = random(5, EXPERTS, HIDDEN)
    run(make_plan(source(tmp_path, "gpt_oss", tensors), Options(to="mxfp4", layout="gpt-oss")), tmp_path / "x", SMALL)
    options = Options(layout="compressed-tensors", rules=Rules(keep=("*.down_proj",)))
    plan = make_plan(tmp_path / "x", options)
    run(plan, tmp_path / "d", SMALL)
    made = read_checkpoint(tmp_path / "d")
    q = hb.quantize(np.ascontiguousarray(tensors[f"{AT}.down_proj"].swapaxes(1, 2)), "mxfp4", "ocp")
    values = np.asarray(hb.dequantize(q, "bfloat16")).swapaxes(1, 2)
    assert_same_bits(made[f"{AT}.down_proj"], np.ascontiguousarray(values))
    assert_same_bits(made[f"{AT}.down_proj_bias"], tensors[f"{AT}.down_proj_bias"])
    assert f"{AT}.0.gate_proj.weight_packed" in made


def test_the_gpt_oss_layout_holds_stacked_experts_only(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "s", {"model.layers.0.mlp.down_proj.weight": random(0, 32, 32)})
    with pytest.raises(CheckpointError, match="the gpt-oss layout holds stacked experts only"):
        make_plan(folder, Options(to="mxfp4", layout="gpt-oss"))


def test_formats_that_a_layout_does_not_hold(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "s", {"model.layers.0.mlp.down_proj.weight": random(0, 32, 32)})
    for to, layout in (("mxfp4", "modelopt"), ("nvfp4", "gpt-oss")):
        with pytest.raises(UnsupportedError, match=f"layout {layout} holds .*, not {to}"):
            make_plan(folder, Options(to=to, layout=layout))


def test_gate_and_up_are_halves(tmp_path: Path) -> None:
    """An odd number of rows has none; of down_proj any number will do."""
    tensors = {f"{AT}.gate_up_proj": random(0, 2, 33, 64), f"{AT}.down_proj": random(1, 2, 33, 64)}
    config = {"model_type": "qwen3_5_moe"}
    with pytest.raises(CheckpointError, match=rf"^{AT}.gate_up_proj: 33 rows of gate and up cannot be halved$"):
        make_plan(write_checkpoint(tmp_path / "s", tensors, config), Options(layout="compressed-tensors"))
    del tensors[f"{AT}.gate_up_proj"]
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors, config), Options(layout="compressed-tensors"))
    assert [unit.sources[0].rows for unit in plan.units] == [33, 33]
