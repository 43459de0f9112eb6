"""Whole plans of tiny checkpoints: each unit with its act, its group and the bytes it is made from; each output."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfbyte.checkpoint import Options, Plan, Rules, make_plan
from halfbyte.checkpoint.io.views import View
from halfbyte.errors import CheckpointError
from tests.checkpoint.toy import Array, llama, random, write_checkpoint

ONE, TWO = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def starts_of(folder: Path) -> dict[str, int]:
    """Tensor → its first byte, by the headers alone."""
    found = {}
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            found[name] = 8 + length + entry["data_offsets"][0]
    return found


def units_of(plan: Plan) -> dict[str, list[tuple[Any, ...]]]:
    """Module → shard, act, group, input scale; then for each source its kind, size and views.

    A view: tensor, byte from the tensor's start, rows, columns, strides.
    """
    starts = starts_of(plan.source)

    def told(view: View | None) -> tuple[Any, ...] | None:
        if view is None:
            return None
        at = view.offset - starts[view.tensor]
        return (view.tensor, at, view.rows, view.columns, view.row_stride, view.column_stride)

    found = {}
    for shard in plan.shards:
        for unit in shard.units:
            sources = [
                (
                    one.kind,
                    one.rows,
                    one.columns,
                    *map(told, (one.weight, one.scale, one.global_scale, one.input_scale)),
                )
                for one in unit.sources
            ]
            found[unit.module] = [(shard.name, unit.action, unit.group, unit.input_scale), *sources]
            assert unit.factors is None
    return found


def written(plan: Plan) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Output → dtype, shape and what it is made from."""
    return {
        tensor["name"]: (tensor["dtype"], tuple(tensor["shape"]), tensor["act"])
        for shard in plan.as_json()["shards"]
        for tensor in shard["tensors"]
    }


def matrix(name: str, rows: int, columns: int) -> tuple[Any, ...]:
    return ("float", rows, columns, (f"{name}.weight", 0, rows, columns, columns, 1), None, None, None)


AT = "model.layers.0"


def test_a_plain_model(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", llama(layers=1), shards=2)
    plan = make_plan(source, Options(activations="unit"))
    sizes = {
        "self_attn.q_proj": (TWO, 0, 64, 64), "self_attn.k_proj": (ONE, 0, 32, 64),
        "self_attn.v_proj": (TWO, 0, 32, 64), "self_attn.o_proj": (ONE, 2, 64, 64),
        "mlp.gate_proj": (TWO, 1, 96, 64), "mlp.up_proj": (ONE, 1, 96, 64),
        "mlp.down_proj": (TWO, 3, 64, 96),
    }  # fmt: skip
    wanted = {
        f"{AT}.{name}": [(shard, "quantize", group, 1.0), matrix(f"{AT}.{name}", rows, columns)]
        for name, (shard, group, rows, columns) in sizes.items()
    }
    assert units_of(plan) == wanted
    attention = tuple(f"{AT}.self_attn.{name}_proj" for name in "qkv")
    gate = (f"{AT}.mlp.gate_proj", f"{AT}.mlp.up_proj")
    assert plan.groups == (attention, gate, (f"{AT}.self_attn.o_proj",), (f"{AT}.mlp.down_proj",))
    assert plan.kept == {"model.embed_tokens": "embedding", "lm_head": "output head"}
    copied = {
        "model.embed_tokens.weight": (32, 64), f"{AT}.input_layernorm.weight": (64,), "model.norm.weight": (64,),
        f"{AT}.self_attn.q_proj.bias": (64,), "lm_head.weight": (32, 64),
    }  # fmt: skip
    outputs = {name: ("BF16", shape, "copy") for name, shape in copied.items()}
    for name, (_, _, rows, columns) in sizes.items():
        outputs |= {
            f"{AT}.{name}.weight": ("U8", (rows, columns // 2), "quantize"),
            f"{AT}.{name}.weight_scale": ("F8_E4M3", (rows, columns // 16), "quantize"),
            f"{AT}.{name}.weight_scale_2": ("F32", (), "quantize"),
            f"{AT}.{name}.input_scale": ("F32", (), "quantize"),
        }
    assert written(plan) == outputs
    starts = starts_of(source)
    assert {copy.output.part.name: (copy.file, copy.offset) for shard in plan.shards for copy in shard.copies} == {
        name: (TWO if name in ("lm_head.weight", f"{AT}.self_attn.q_proj.bias") else ONE, starts[name])
        for name in copied
    }
    assert (plan.dropped, plan.left_out, plan.repairs, plan.layout, plan.side_files) == (
        {}, {}, True, "modelopt", ("tokenizer.json",)
    )  # fmt: skip
    assert [(file.name, file.size) for file in plan.files] == [
        (name, (source / name).stat().st_size) for name in (ONE, TWO)
    ]
    index = plan.json_files["model.safetensors.index.json"]
    assert index["metadata"]["total_size"] == plan.output_bytes - sum(len(shard.header) for shard in plan.shards)
    assert list(index["weight_map"]) == sorted(outputs)
    for shard in plan.shards:
        assert shard.header[8:].startswith(b'{"__metadata__":{"format":"pt"},')


EXPERTS = f"{AT}.mlp.experts"
OSS = {
    "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip


def gpt_oss() -> dict[str, Array]:
    """One layer of two experts in MXFP4 with biases."""
    rng = np.random.default_rng(0)
    return {
        f"{EXPERTS}.gate_up_proj_blocks": rng.integers(0, 256, (2, 64, 2, 16), dtype=np.uint8),
        f"{EXPERTS}.gate_up_proj_scales": np.full((2, 64, 2), 120, np.uint8),
        f"{EXPERTS}.gate_up_proj_bias": random(1, 2, 64),
        f"{EXPERTS}.down_proj_blocks": rng.integers(0, 256, (2, 64, 1, 16), dtype=np.uint8),
        f"{EXPERTS}.down_proj_scales": np.full((2, 64, 1), 120, np.uint8),
        f"{EXPERTS}.down_proj_bias": random(1, 2, 64),
    }


def test_stacked_experts_are_taken_apart_with_their_biases(tmp_path: Path) -> None:
    """gate and up are the even and the odd rows: each is a view with every other row."""
    plan = make_plan(write_checkpoint(tmp_path / "s", gpt_oss(), OSS), Options(layout="compressed-tensors"))
    wanted, name = {}, "model.safetensors"
    for expert in range(2):
        for place, projection in enumerate(("gate_proj", "up_proj")):
            blocks = (f"{EXPERTS}.gate_up_proj_blocks", 2048 * expert + 32 * place, 32, 32, 64, 1)
            scales = (f"{EXPERTS}.gate_up_proj_scales", 128 * expert + 2 * place, 32, 2, 4, 1)
            wanted[f"{EXPERTS}.{expert}.{projection}"] = [
                (name, "cast", expert, None), ("mxfp4", 32, 64, blocks, scales, None, None)
            ]  # fmt: skip
            bias = (f"{EXPERTS}.gate_up_proj_bias", 128 * expert + 2 * place, 32, 1, 2, 1)
            wanted[f"{EXPERTS}.{expert}.{projection}.bias"] = [
                (name, "gather", -1, None), ("float", 32, 1, bias, None, None, None)
            ]  # fmt: skip
        blocks = (f"{EXPERTS}.down_proj_blocks", 1024 * expert, 64, 16, 16, 1)
        scales = (f"{EXPERTS}.down_proj_scales", 64 * expert, 64, 1, 1, 1)
        wanted[f"{EXPERTS}.{expert}.down_proj"] = [
            (name, "cast", 2 + expert, None), ("mxfp4", 64, 32, blocks, scales, None, None)
        ]  # fmt: skip
        bias = (f"{EXPERTS}.down_proj_bias", 128 * expert, 64, 1, 1, 1)
        wanted[f"{EXPERTS}.{expert}.down_proj.bias"] = [
            (name, "gather", -1, None), ("float", 64, 1, bias, None, None, None)
        ]  # fmt: skip
    assert units_of(plan) == wanted
    outputs: dict[str, tuple[str, tuple[int, ...], str]] = {}
    for expert in range(2):
        for projection, rows, columns in (("gate_proj", 32, 64), ("up_proj", 32, 64), ("down_proj", 64, 32)):
            at = f"{EXPERTS}.{expert}.{projection}"
            outputs[f"{at}.weight_packed"] = ("U8", (rows, columns // 2), "cast")
            outputs[f"{at}.weight_scale"] = ("F8_E4M3", (rows, columns // 16), "cast")
            outputs[f"{at}.weight_global_scale"] = ("F32", (1,), "cast")
            outputs[f"{at}.bias"] = ("BF16", (rows,), "gather")
    assert written(plan) == outputs
    assert set(plan.json_files) == {"config.json"}


def test_stacked_experts_are_decoded_whole_and_transposed(tmp_path: Path) -> None:
    plan = make_plan(write_checkpoint(tmp_path / "s", gpt_oss(), OSS), Options(to="bf16"))
    assert (plan.layout, plan.activations, plan.method, plan.groups) == ("plain", "", None, ())
    assert written(plan) == {
        f"{EXPERTS}.gate_up_proj_bias": ("BF16", (2, 64), "copy"),
        f"{EXPERTS}.down_proj_bias": ("BF16", (2, 64), "copy"),
        f"{EXPERTS}.gate_up_proj": ("BF16", (2, 64, 64), "decode"),
        f"{EXPERTS}.down_proj": ("BF16", (2, 32, 64), "decode"),
    }
    assert {unit.module: [output.part.transposed for output in unit.outputs] for unit in plan.units} == {
        f"{EXPERTS}.gate_up_proj": [True], f"{EXPERTS}.down_proj": [True]
    }  # fmt: skip
    down = units_of(plan)[f"{EXPERTS}.down_proj"]
    assert down[0] == ("model.safetensors", "decode", -1, None)
    assert down[2] == (
        "mxfp4", 64, 32, (f"{EXPERTS}.down_proj_blocks", 1024, 64, 16, 16, 1),
        (f"{EXPERTS}.down_proj_scales", 64, 64, 1, 1, 1), None, None,
    )  # fmt: skip


@pytest.mark.parametrize(("to", "layout", "act"), [("mxfp4", "gpt-oss", "relayout"), ("nvfp4", "modelopt", "cast")])
def test_stacked_experts_that_stay_stacked_keep_their_biases(tmp_path: Path, to: str, layout: str, act: str) -> None:
    """As they are, in one tensor each."""
    plan = make_plan(write_checkpoint(tmp_path / "s", gpt_oss(), OSS), Options(to=to, layout=layout))
    assert [(unit.module, unit.action) for unit in plan.units] == [
        (f"{EXPERTS}.gate_up_proj", act), (f"{EXPERTS}.down_proj", act)
    ]  # fmt: skip
    biases = {name: entry for name, entry in written(plan).items() if "bias" in name}
    assert biases == {
        f"{EXPERTS}.gate_up_proj_bias": ("BF16", (2, 64), "copy"),
        f"{EXPERTS}.down_proj_bias": ("BF16", (2, 64), "copy"),
    }


def test_stacked_experts_that_are_kept_stay_stacked(tmp_path: Path) -> None:
    """As their biases do; where all experts are taken apart, the biases are too."""
    tensors = gpt_oss() | {f"{AT}.mlp.other.weight": random(2, 64, 64)}
    tensors = {name: x for name, x in tensors.items() if "gate_up" not in name} | {
        f"model.layers.1.mlp.experts.{name.rpartition('.')[2]}": x for name, x in gpt_oss().items() if "down" in name
    }
    rules = Rules(keep=("layers.1",))
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors, OSS), Options(layout="compressed-tensors", rules=rules))
    kept = "model.layers.1.mlp.experts.down_proj"
    made = {name: entry for name, entry in written(plan).items() if "layers.1" in name}
    assert made == {kept: ("BF16", (2, 32, 64), "decode"), f"{kept}_bias": ("BF16", (2, 64), "copy")}
    assert written(plan)[f"{EXPERTS}.0.down_proj.bias"] == ("BF16", (64,), "gather")
    experts = [f"model.layers.1.mlp.experts.{e}.down_proj" for e in range(2)]
    assert {module: reason for module, reason in plan.kept.items() if module in experts} == dict.fromkeys(
        experts, "--keep layers.1"
    )


def test_input_scales_of_the_source_count_only_where_all_have_them(tmp_path: Path) -> None:
    names = ("mlp.gate_proj", "mlp.up_proj")
    tensors: dict[str, Array] = {}
    for name in names:
        tensors |= {
            f"{AT}.{name}.weight": np.ones((32, 32), np.uint8),
            f"{AT}.{name}.weight_scale": np.ones((32, 4), ml_dtypes.float8_e4m3fn),
            f"{AT}.{name}.weight_scale_2": np.ones((), np.float32),
            f"{AT}.{name}.input_scale": np.ones((), np.float32),
        }
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    source = write_checkpoint(tmp_path / "s", tensors, config)
    plan = make_plan(source, Options(layout="compressed-tensors"))
    assert plan.activations == "W4A4 with the source's own input scales"
    gate = units_of(plan)[f"{AT}.mlp.gate_proj"]
    assert gate[0] == ("model.safetensors", "relayout", 0, None)
    at = f"{AT}.mlp.gate_proj"
    assert gate[1] == (
        "nvfp4", 32, 64, (f"{at}.weight", 0, 32, 32, 32, 1), (f"{at}.weight_scale", 0, 32, 4, 4, 1),
        (f"{at}.weight_scale_2", 0, 1, 1, 1, 1), (f"{at}.input_scale", 0, 1, 1, 1, 1),
    )  # fmt: skip
    assert f"{at}.input_global_scale" in written(plan)
    del tensors[f"{AT}.mlp.up_proj.input_scale"]
    plan = make_plan(write_checkpoint(tmp_path / "t", tensors, config), Options(layout="compressed-tensors"))
    assert plan.activations.startswith("W4A16")
    assert f"{at}.input_global_scale" not in written(plan)


def test_an_output_of_the_name_of_a_tensor_elsewhere(tmp_path: Path) -> None:
    """A parameter of the model may be called like a part of a packed weight."""
    tensors = {f"{AT}.mlp.down_proj.weight": random(0, 32, 64), f"{AT}.mlp.down_proj.weight_scale": random(1, 3)}
    with pytest.raises(CheckpointError) as caught:
        make_plan(write_checkpoint(tmp_path / "s", tensors, shards=2), Options())
    assert str(caught.value) == (
        f"two output tensors would be called {AT}.mlp.down_proj.weight_scale: in {ONE} and {TWO}"
    )
    with pytest.raises(CheckpointError, match=f"^two output tensors are called {AT}.mlp.down_proj.weight_scale$"):
        make_plan(write_checkpoint(tmp_path / "t", tensors), Options())


def test_a_file_of_which_nothing_is_written_has_no_shard(tmp_path: Path) -> None:
    """Scales that are part of a weight in another file leave theirs empty."""
    tensors = {
        f"{AT}.mlp.down_proj.weight": np.ones((32, 64), ml_dtypes.float8_e4m3fn),
        f"{AT}.mlp.down_proj.weight_scale": np.ones((), np.float32),
    }
    config = {"quantization_config": {"quant_method": "fp8"}}
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors, config, shards=2), Options())
    assert [shard.name for shard in plan.shards] == [ONE]
    assert [file.name for file in plan.files] == [ONE, TWO]
    assert plan.json_files["model.safetensors.index.json"]["weight_map"]


def test_rules_and_layouts_reach_the_plan(tmp_path: Path) -> None:
    rules = Rules(keep=("o_proj", "misspelt"))
    plan = make_plan(
        write_checkpoint(tmp_path / "s", llama(layers=1)), Options(method="amax", rules=rules, ignore=("x",))
    )
    assert plan.kept[f"{AT}.self_attn.o_proj"] == "--keep o_proj"
    assert plan.notes[0] == "pattern 'misspelt' matches no module"
    assert plan.method == "amax"
    ignored = plan.json_files["config.json"]["quantization_config"]["ignore"]
    assert ignored == ["lm_head", f"{AT}.self_attn.o_proj", "x"]
