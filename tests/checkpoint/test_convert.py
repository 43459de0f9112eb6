"""From directory to directory: every output tensor is what the library gives for it, whatever does the work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import halfbyte as hb
from halfbyte.checkpoint import Event, Options, Resources, Rules, make_plan, run
from halfbyte.checkpoint.io.index import MANIFEST
from halfbyte.errors import CheckpointError, InputError
from halfbyte.testing import assert_same_bits
from tests.checkpoint.toy import all_bytes, llama, random, read_checkpoint, write_checkpoint

Array = npt.NDArray[Any]
SMALL = Resources(workers=2, max_memory=1 << 28, sync=False)

GROUPS = [
    ["model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.k_proj", "model.layers.{}.self_attn.v_proj"],
    ["model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"],
    ["model.layers.{}.mlp.down_proj"],
    ["model.layers.{}.self_attn.o_proj"],
]


def amax(*tensors: Array) -> np.float32:
    return np.float32(max(np.abs(x.astype(np.float32)).max() for x in tensors))


def groups(layers: int = 2) -> list[list[str]]:
    return [[name.format(layer) for name in group] for layer in range(layers) for group in GROUPS]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("method", ["amax", "optimal", "four_six"])
def test_modelopt_tensors_are_what_quantize_gives(tmp_path: Path, dtype: npt.DTypeLike, method: str) -> None:
    tensors = llama(dtype=dtype)
    source = write_checkpoint(tmp_path / "s", tensors, shards=3)
    run(make_plan(source, Options(method=method)), tmp_path / "d", SMALL)
    made = read_checkpoint(tmp_path / "d")
    left = dict(made)
    for group in groups():
        weights = [tensors[f"{module}.weight"] for module in group]
        whole = hb.quantize(np.concatenate(weights), "nvfp4", "modelopt", method)  # what shares a scale, as one tensor
        stops = np.cumsum([len(weight) for weight in weights])
        for module, weight, stop in zip(group, weights, stops, strict=True):
            q = whole[stop - len(weight) : stop]
            assert_same_bits(left.pop(f"{module}.weight"), q.codes)
            assert_same_bits(left.pop(f"{module}.weight_scale"), q.scales)
            assert q.global_scale is not None
            assert_same_bits(left.pop(f"{module}.weight_scale_2"), q.global_scale)
    kept = {name for name in tensors if f"{name}_scale" not in made}
    assert set(left) == kept
    for name in kept:
        assert_same_bits(made[name], tensors[name])


def test_compressed_tensors_has_the_same_blocks_and_a_divisor(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", llama(), shards=2)
    run(make_plan(source, Options()), tmp_path / "m", SMALL)
    run(make_plan(source, Options(layout="compressed-tensors")), tmp_path / "c", SMALL)
    ours, theirs = read_checkpoint(tmp_path / "m"), read_checkpoint(tmp_path / "c")
    for group in groups():
        for module in group:
            assert_same_bits(theirs[f"{module}.weight_packed"], ours[f"{module}.weight"])
            assert_same_bits(theirs[f"{module}.weight_scale"], ours[f"{module}.weight_scale"])
            divisor = theirs[f"{module}.weight_global_scale"]
            assert divisor.shape == (1,)
            assert_same_bits(divisor, (np.float32(1) / ours[f"{module}.weight_scale_2"]).reshape(1))
            assert f"{module}.weight" not in theirs


def test_their_contract_stores_its_own_divisor(tmp_path: Path) -> None:
    tensors = llama()
    source = write_checkpoint(tmp_path / "s", tensors)
    options = Options(layout="compressed-tensors", contract="compressed_tensors", method="amax")
    run(make_plan(source, options), tmp_path / "d", SMALL)
    made = read_checkpoint(tmp_path / "d")
    module = "model.layers.0.mlp.down_proj"
    q = hb.quantize(tensors[f"{module}.weight"], "nvfp4", "compressed_tensors", "amax")
    assert_same_bits(made[f"{module}.weight_packed"], q.codes)
    assert q.stored_scale is not None
    assert_same_bits(made[f"{module}.weight_global_scale"], np.asarray(q.stored_scale).reshape(1))


@pytest.mark.parametrize("method", ["amax", "four_six"])
def test_transformer_engine_in_a_file_is_miles(tmp_path: Path, method: str) -> None:
    tensors = {
        f"model.layers.0.mlp.experts.0.{name}.weight": random(number, 32, 64)
        for number, name in enumerate(("gate_proj", "up_proj", "down_proj"))
    }
    tensors["model.layers.0.self_attn.q_proj.weight"] = random(5, 32, 64)
    source = write_checkpoint(tmp_path / "s", tensors, {"model_type": "qwen3_moe"}, shards=2)
    options = Options(contract="transformer_engine", method=method, rules=Rules(experts_only=True))
    run(make_plan(source, options), tmp_path / "d", SMALL)
    made = read_checkpoint(tmp_path / "d")
    at = "model.layers.0.mlp.experts.0"
    shared = amax(tensors[f"{at}.gate_proj.weight"], tensors[f"{at}.up_proj.weight"])
    for name in ("gate_proj", "up_proj", "down_proj"):
        x = tensors[f"{at}.{name}.weight"]
        q = hb.quantize(x, "nvfp4", "miles", method, global_amax=amax(x) if name == "down_proj" else shared)
        assert_same_bits(made[f"{at}.{name}.weight"], q.codes)
        assert_same_bits(made[f"{at}.{name}.weight_scale"], q.scales)
        assert q.stored_scale is not None
        assert_same_bits(made[f"{at}.{name}.weight_scale_2"], q.stored_scale)
        assert_same_bits(made[f"{at}.{name}.input_scale"], np.array(1, np.float32))
    kept = "model.layers.0.self_attn.q_proj.weight"
    assert_same_bits(made[kept], tensors[kept])


def test_mxfp4(tmp_path: Path) -> None:
    tensors = llama()
    source = write_checkpoint(tmp_path / "s", tensors)
    run(make_plan(source, Options(to="mxfp4", layout="compressed-tensors")), tmp_path / "d", SMALL)
    made = read_checkpoint(tmp_path / "d")
    module = "model.layers.1.mlp.up_proj"
    q = hb.quantize(tensors[f"{module}.weight"], "mxfp4", "ocp", "amax")
    assert_same_bits(made[f"{module}.weight_packed"], q.codes)
    assert_same_bits(made[f"{module}.weight_scale"], q.scales)
    assert f"{module}.weight_global_scale" not in made


@pytest.mark.parametrize(
    "resources",
    [
        Resources(workers=1, max_memory=1 << 28, sync=False),
        Resources(workers=4, max_memory=1 << 28, sync=False),
        Resources(workers=2, max_memory=1 << 28, sync=True),
        Resources(workers=3, max_memory=1 << 28, sync=False, chunk=1),
        Resources(workers=2, max_memory=1 << 28, sync=False, chunk=1000),
        Resources(workers=2, max_memory=1_500_000, sync=False),
        Resources(workers=16, max_memory=1 << 28, sync=False),
        Resources(workers=16, max_memory=1 << 28, sync=False, chunk=1),
    ],
    ids=["one", "four", "sync", "row", "odd", "tight", "many", "many rows"],
)
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_no_resource_changes_a_byte(tmp_path: Path, resources: Resources, layout: str) -> None:
    source = write_checkpoint(tmp_path / "s", llama(), shards=3)
    plan = make_plan(source, Options(method="amax", layout=layout))
    run(plan, tmp_path / "usual", SMALL)
    run(plan, tmp_path / "other", resources)
    assert all_bytes(tmp_path / "usual") == all_bytes(tmp_path / "other")


def test_the_order_of_shards_changes_no_tensor(tmp_path: Path) -> None:
    tensors = llama()
    run(make_plan(write_checkpoint(tmp_path / "a", tensors, shards=3), Options()), tmp_path / "da", SMALL)
    backwards = dict(reversed(tensors.items()))
    run(make_plan(write_checkpoint(tmp_path / "b", backwards, shards=2), Options()), tmp_path / "db", SMALL)
    a, b = read_checkpoint(tmp_path / "da"), read_checkpoint(tmp_path / "db")
    assert set(a) == set(b)
    for name in a:
        assert_same_bits(a[name], b[name])


def test_too_little_memory_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", llama())
    with pytest.raises(InputError, match="is too little: a piece of the largest tensor needs"):
        run(make_plan(source, Options()), tmp_path / "d", Resources(max_memory=1000))
    assert not (tmp_path / "d").exists()


def test_zero_and_tiny_tensors_get_scales_that_every_reader_can_use(tmp_path: Path) -> None:
    tensors = llama()
    tensors["model.layers.0.mlp.down_proj.weight"][...] = 0
    tensors["model.layers.0.self_attn.o_proj.weight"] = np.full((64, 64), 1e-37, ml_dtypes.bfloat16)
    run(make_plan(write_checkpoint(tmp_path / "s", tensors), Options()), tmp_path / "d", SMALL)
    made = read_checkpoint(tmp_path / "d")
    assert made["model.layers.0.mlp.down_proj.weight_scale_2"] == 1
    assert not (made["model.layers.0.mlp.down_proj.weight"] & 0x77).any()
    assert made["model.layers.0.self_attn.o_proj.weight_scale_2"] == 2.0**-126
    for name, x in made.items():
        if name.endswith("weight_scale"):
            assert ((x > 0) & (x < 0x7F)).all(), name
        if name.endswith("weight_scale_2"):
            assert np.isfinite(x)
            assert x > 0


@pytest.mark.parametrize(("value", "word"), [(np.nan, "NaN"), (np.inf, "Inf")])
@pytest.mark.parametrize("to", ["nvfp4", "mxfp4"])
def test_broken_weights_are_refused_by_name(tmp_path: Path, value: float, word: str, to: str) -> None:
    tensors = llama()
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    source = write_checkpoint(tmp_path / "s", tensors)
    options = Options(to=to, layout="compressed-tensors")
    with pytest.raises(CheckpointError, match=rf"(?s)model.layers.1.mlp.down_proj holds {word}.*--keep"):
        run(make_plan(source, options), tmp_path / "d", SMALL)
    assert {path.name for path in (tmp_path / "d").iterdir()} == {".halfbyte"}
    kept = Options(to=to, layout="compressed-tensors", rules=Rules(keep=("model.layers.1.mlp.down_proj",)))
    run(make_plan(source, kept), tmp_path / "d", SMALL, overwrite=True)


def test_activations(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", llama())
    run(make_plan(source, Options(activations="unit")), tmp_path / "unit", SMALL)
    made = read_checkpoint(tmp_path / "unit")
    assert made["model.layers.0.mlp.up_proj.input_scale"] == 1
    config = json.loads((tmp_path / "unit" / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "NVFP4"
    amaxes = {module: 10.0 + number for number, group in enumerate(groups()) for module in group}
    amaxes["model.layers.0.self_attn.k_proj"] = 99.0
    (tmp_path / "amax.json").write_text(json.dumps(amaxes))
    calibrated = Options(activations=str(tmp_path / "amax.json"), layout="compressed-tensors")
    run(make_plan(source, calibrated), tmp_path / "file", SMALL)
    made = read_checkpoint(tmp_path / "file")
    wanted = np.float32(1) / (np.float32(99) / np.float32(2688))
    assert_same_bits(made["model.layers.0.self_attn.q_proj.input_global_scale"], wanted.reshape(1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "no amax for model.layers.0"),
        ({"model.layers.0.mlp.up_proj": -1}, "expected the largest magnitude, a positive number"),
        ({"model.layers.0.mlp.up_proj": True}, "expected the largest magnitude"),
        ([], "expected a JSON object"),
        (
            {"model.layers.1.mlp.down_prj": 2.0, "x": 1.0},
            r"amax.json: unknown module 'model.layers.1.mlp.down_prj'; nearest of \d+: model.layers.1.mlp.down_proj,.*"
            r" \(1 more names in it are unknown\)",
        ),
    ],
)
def test_bad_calibration(tmp_path: Path, content: object, message: str) -> None:
    source = write_checkpoint(tmp_path / "s", llama())
    (tmp_path / "amax.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        make_plan(source, Options(activations=str(tmp_path / "amax.json")))


def test_a_calibration_file_may_name_modules_that_are_kept(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", llama())
    amaxes = {module: 10.0 for group in groups() for module in group} | {"lm_head": 3.0, "model.norm": 2.0}
    (tmp_path / "amax.json").write_text(json.dumps(amaxes))
    assert "calibrated" in make_plan(source, Options(activations=str(tmp_path / "amax.json"))).activations


def test_a_calibration_file_may_have_the_names_of_run_time(tmp_path: Path) -> None:
    """A model that is calibrated in transformers knows no other names."""
    tensors = {f"language_model.{name}": x for name, x in llama().items()}
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    source = write_checkpoint(tmp_path / "s", tensors, config)
    scales = {}
    for number, (before, after) in enumerate([("", ""), ("language_model.model.", "model.language_model.")]):
        amaxes = {
            f"language_model.{module}".replace(before, after, 1): 10.0 + place
            for place, group in enumerate(groups())
            for module in group
        }
        (tmp_path / f"{number}.json").write_text(json.dumps(amaxes))
        plan = make_plan(source, Options(activations=str(tmp_path / f"{number}.json")))
        scales[number] = {unit.module: unit.input_scale for unit in plan.units}
    assert scales[0] == scales[1]
    assert len(set(scales[0].values())) > 2


def test_missing_calibration_file(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", llama())
    with pytest.raises(CheckpointError, match="neither none, unit nor stats, nor a file"):
        make_plan(source, Options(activations="units"))


def test_uncalibrated_experts_take_the_largest_of_the_others(tmp_path: Path) -> None:
    tensors = {
        f"model.layers.0.mlp.experts.{expert}.{name}.weight": random(expert, 32, 32)
        for expert in range(3)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    source = write_checkpoint(tmp_path / "s", tensors, {"model_type": "qwen3_moe"})
    amaxes = {
        f"model.layers.0.mlp.experts.{e}.{name}": 10.0 * (e + 1)
        for e in (0, 1)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    (tmp_path / "amax.json").write_text(json.dumps(amaxes))
    plan = make_plan(source, Options(activations=str(tmp_path / "amax.json")))
    scales = {unit.module: unit.input_scale for unit in plan.units}
    assert scales["model.layers.0.mlp.experts.2.down_proj"] == float(np.float32(20) / np.float32(2688))


def test_config_index_and_side_files(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", llama(), {"torch_dtype": "bfloat16"}, shards=2)
    (source / "modeling_x.py").write_text("code")
    run(make_plan(source, Options()), tmp_path / "d", SMALL)
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config.pop("quantization_config")["ignore"] == ["lm_head"]
    assert config == json.loads((source / "config.json").read_text())
    nested = json.loads((tmp_path / "d" / "hf_quant_config.json").read_text())
    assert nested["quantization"]["exclude_modules"] == ["lm_head"]
    index = json.loads((tmp_path / "d" / "model.safetensors.index.json").read_text())
    made = read_checkpoint(tmp_path / "d")
    assert set(index["weight_map"]) == set(made)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in made.values())
    for name in ("tokenizer.json", "modeling_x.py"):
        assert (tmp_path / "d" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "d" / ".halfbyte").exists()


def test_the_manifest_has_the_hash_of_every_tensor(tmp_path: Path) -> None:
    import hashlib

    tensors = llama() | {"model.layers.0.self_attn.rotary.inv": random(7, 33, 1000)}
    run(make_plan(write_checkpoint(tmp_path / "s", tensors, shards=2), Options()), tmp_path / "d", SMALL)
    manifest = json.loads((tmp_path / "d" / "halfbyte.json").read_text())
    hashes = {name: text for shard in manifest["shards"].values() for name, text in shard["tensors"].items()}
    made = read_checkpoint(tmp_path / "d")

    def tree(data: bytes) -> str:
        leaves = [hashlib.sha256(data[at : at + 16384]).digest() for at in range(0, len(data), 16384)]
        return hashlib.sha256(b"".join(leaves)).hexdigest()[:32]

    assert manifest["hash"] == "sha256, first 32 hex digits, of the sha256 of every 16384 bytes of each tensor"
    assert hashes == {name: tree(x.tobytes()) for name, x in made.items()}
    assert max(x.nbytes for x in made.values()) > 3 * 16384


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    events: list[Event] = []
    plan = make_plan(write_checkpoint(tmp_path / "s", llama(), shards=3), Options())
    run(plan, tmp_path / "d", SMALL, report=events.append)
    assert {event.shard for event in events if event.kind == "shard"} == {shard.name for shard in plan.shards}
    assert events[-1].kind == "end"
    assert all(event.done <= event.total for event in events)
    progress = [event for event in events if event.kind == "progress"]
    assert progress[-1].done == progress[-1].total == sum(x.nbytes for x in llama().values())


def test_json_files_are_readable(tmp_path: Path) -> None:
    """Configs as others write them, by two spaces; the manifest, which is long, by one."""
    source = write_checkpoint(tmp_path / "s", llama(), shards=2)
    run(make_plan(source, Options(method="amax")), tmp_path / "d", SMALL)
    for name, indent in (("config.json", 2), ("model.safetensors.index.json", 2), (MANIFEST, 1)):
        text = (tmp_path / "d" / name).read_text()
        assert text == json.dumps(json.loads(text), indent=indent, ensure_ascii=False) + "\n"
