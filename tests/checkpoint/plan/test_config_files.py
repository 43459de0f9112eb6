"""The JSON files of an output: which modules they exclude, under which names, and the dtype that they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfbyte.checkpoint import Options, Plan, Resources, Rules, make_plan, run
from halfbyte.verify import verify
from tests.checkpoint.toy import Array, llama, random, write_checkpoint

LLAVA = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "num_hidden_layers": 1}
BOTH = pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])


def plan_of(
    folder: Path,
    tensors: dict[str, Array],
    config: dict[str, Any] | None = None,
    layout: str = "modelopt",
    **more: Any,
) -> Plan:
    return make_plan(write_checkpoint(folder, tensors, config), Options(layout=layout, **more))


def ignored(plan: Plan) -> list[str]:
    found: list[str] = plan.json_files["config.json"]["quantization_config"]["ignore"]
    return found


def config_of(plan: Plan) -> dict[str, Any]:
    """config.json without what is said of quantization."""
    return {key: value for key, value in plan.json_files["config.json"].items() if key != "quantization_config"}


def llava() -> dict[str, Array]:
    tensors = {f"language_model.{name}": values for name, values in llama(layers=1).items()}
    tensors["multi_modal_projector.linear_1.weight"] = random(1, 64, 64)
    tensors["multi_modal_projector.linear_2.weight"] = random(2, 64, 64)
    tensors["vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"] = random(3, 64, 64)
    tensors["grid"] = random(4, 4, 64)
    return tensors


ON_DISK = [
    "language_model.lm_head", "multi_modal_projector.linear_1", "multi_modal_projector.linear_2",
    "vision_tower.vision_model.encoder.layers.0.mlp.fc1",
]  # fmt: skip
AT_RUN_TIME = [
    "lm_head", "model.multi_modal_projector.linear_1", "model.multi_modal_projector.linear_2",
    "model.vision_tower.encoder.layers.0.mlp.fc1",
]  # fmt: skip


def test_names_on_disk_and_those_at_run_time_where_a_reader_asks_for_them(tmp_path: Path) -> None:
    """Heads are listed under both in either layout; tables and parameters of their own are no linear layers."""
    towers = ["multi_modal_projector", "vision_tower"]
    stars, expressions = [f"{name}*" for name in towers], [rf"re:(.*\.)?{name}\..*" for name in towers]
    found = ignored(plan_of(tmp_path / "s", llava(), LLAVA, "modelopt"))
    assert found == sorted([*ON_DISK, "lm_head", *stars])
    found = ignored(plan_of(tmp_path / "s", llava(), LLAVA, "compressed-tensors"))
    assert found == sorted([*ON_DISK, *AT_RUN_TIME, *expressions])


@BOTH
@pytest.mark.parametrize("config", [{"architectures": ["GemmaForCausalLM"]}, {"model_type": "unheard_of"}])
def test_a_head_that_is_in_no_file_and_of_which_the_config_says_nothing(
    tmp_path: Path, layout: str, config: dict[str, Any]
) -> None:
    tensors = llama()
    del tensors["lm_head.weight"]
    assert ignored(plan_of(tmp_path / "s", tensors, config, layout)) == ["lm_head"]


@BOTH
@pytest.mark.parametrize("config", [{}, {"model_type": "unheard_of"}, LLAVA | {"num_hidden_layers": 2}])
def test_a_head_that_is_quantized_is_not_excluded(tmp_path: Path, layout: str, config: dict[str, Any]) -> None:
    prefix = "language_model." if config.get("model_type") == "llava" else ""
    tensors = {f"{prefix}{name}": values for name, values in llama().items()}
    plan = plan_of(tmp_path / "s", tensors, config, layout, rules=Rules(include=("lm_head", "_proj")))
    assert f"{prefix}lm_head" in {unit.module for unit in plan.units}
    assert not [name for name in ignored(plan) if "lm_head" in name]
    run(plan, tmp_path / "d", Resources(workers=1, sync=False))
    assert [
        problem.text for problem in verify(tmp_path / "d", tmp_path / "s").problems if problem.level == "error"
    ] == []


@BOTH
def test_names_to_ignore_are_listed_as_given(tmp_path: Path, layout: str) -> None:
    plan = plan_of(tmp_path / "s", llama(), layout=layout, ignore=("re:vision.*", "model.head"))
    assert ignored(plan) == ["lm_head", "model.head", "re:vision.*"]


def test_linear_layers_that_the_class_has_and_the_file_has_not(tmp_path: Path) -> None:
    """transformers makes them new, and would look for packed weights."""
    tensors = llava()
    del tensors["multi_modal_projector.linear_2.weight"]
    assert "model.multi_modal_projector.linear_2" in ignored(
        plan_of(tmp_path / "s", tensors, LLAVA, "compressed-tensors")
    )
    assert not [name for name in ignored(plan_of(tmp_path / "s", tensors, LLAVA)) if name.endswith("linear_2")]
    other = LLAVA | {"architectures": ["LlavaForKnitting"]}  # its model type is known, the class is not
    names = ignored(plan_of(tmp_path / "s", tensors, other, "compressed-tensors"))
    assert not [name for name in names if name.endswith("linear_2")]


def test_what_is_packed_in_the_source_is_there(tmp_path: Path) -> None:
    """A source in the same layout has no tensor called weight for it."""
    rules = Rules(include=("*proj*",))
    plan = plan_of(tmp_path / "s", llava(), LLAVA, "compressed-tensors", rules=rules)
    assert "multi_modal_projector.linear_1" in {unit.module for unit in plan.units}
    run(plan, tmp_path / "q", Resources(workers=1, sync=False))
    again = make_plan(tmp_path / "q", Options(layout="compressed-tensors"))
    assert ignored(again) == ignored(plan)
    assert not [name for name in ignored(again) if "linear_" in name]


def test_layers_with_one_weight_are_listed_wherever_they_may_stand(tmp_path: Path) -> None:
    """Zamba stores the weight of its shared layer once; transformers has the module in several layers."""
    at = "model.layers.{}.shared_transf.self_attn.q_proj"
    tensors = {f"{at.format(1)}.weight": random(0, 64, 64), "model.layers.0.mamba.in_proj.weight": random(1, 64, 64)}
    config = {"model_type": "zamba", "architectures": ["ZambaForCausalLM"], "num_hidden_layers": 3}
    names = ignored(plan_of(tmp_path / "s", tensors, config, "compressed-tensors"))
    assert [name for name in names if name.endswith("self_attn.q_proj")] == [at.format(layer) for layer in range(3)]
    unsaid = config | {"num_hidden_layers": None}
    names = ignored(plan_of(tmp_path / "s", tensors, unsaid, "compressed-tensors"))
    assert [name for name in names if name.endswith("self_attn.q_proj")] == [at.format(1)]


def test_stacked_experts_that_are_kept_have_the_names_that_readers_ask_for(tmp_path: Path) -> None:
    at = "model.layers.0.mlp.experts"
    tensors = llama() | {f"{at}.gate_up_proj": random(0, 2, 64, 64), f"{at}.down_proj": random(1, 2, 64, 32)}
    stacks = [f"{at}.down_proj", f"{at}.gate_up_proj"]
    plan = plan_of(tmp_path / "s", tensors, {"model_type": "unheard_of"}, "modelopt")
    assert ignored(plan) == ["lm_head", at, *stacks]
    plan = plan_of(tmp_path / "s", tensors, {"model_type": "unheard_of"}, "compressed-tensors")
    first = [f"{at}.0.{name}_proj" for name in ("down", "gate", "up")]
    assert ignored(plan) == ["lm_head", at, *first, *stacks]


@BOTH
def test_a_layer_of_experts_is_listed_only_if_all_of_it_is_kept(tmp_path: Path, layout: str) -> None:
    experts = {
        f"model.layers.{layer}.mlp.experts.0.{name}_proj.weight": random(1, 32, 32)
        for layer in range(2)
        for name in ("gate", "up", "down")
    }
    rules = Rules(keep=("layers.0", "layers.1.mlp.experts.0.down_proj"))
    names = ignored(plan_of(tmp_path / "s", experts, {"model_type": "qwen3_moe"}, layout, rules=rules))
    assert "model.layers.0.mlp.experts" in names
    assert "model.layers.1.mlp.experts" not in names


# --- the dtype ---

HALF = {"torch_dtype": "float16"}


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_transformers_is_asked_to_compute_in_bfloat16(tmp_path: Path, dtype: type[np.floating[Any]]) -> None:
    parts = {"text_config": {"dtype": "float16"}, "vision_config": {"torch_dtype": "float16", "depth": 1}, "other": {}}
    plan = plan_of(tmp_path / "s", llama(dtype=dtype), HALF | parts, "compressed-tensors")
    config = config_of(plan)
    assert (config["dtype"], "torch_dtype" in config) == ("bfloat16", False)
    assert config["text_config"] == {"dtype": "bfloat16"}
    assert config["vision_config"] == {"torch_dtype": "bfloat16", "depth": 1}
    assert config["other"] == {}
    assert any(note.startswith("config.json will ask for bfloat16 in place of") for note in plan.notes)


@pytest.mark.parametrize(
    ("layout", "dtype", "config"),
    [
        ("modelopt", np.float16, HALF),
        ("compressed-tensors", np.float16, {"dtype": "bfloat16"}),
        ("compressed-tensors", np.float16, {"torch_dtype": "bfloat16"}),
        ("compressed-tensors", "bfloat16", HALF),
    ],
)
def test_where_nothing_needs_another_dtype_the_config_stays(
    tmp_path: Path, layout: str, dtype: Any, config: dict[str, Any]
) -> None:
    plan = plan_of(tmp_path / "s", llama(dtype=dtype), config, layout)
    assert config_of(plan) == {"model_type": "llama", "num_hidden_layers": 2, **config}
    assert not any("bfloat16" in note for note in plan.notes)


def test_a_decoded_checkpoint_is_bfloat16_and_says_so(tmp_path: Path) -> None:
    config = {
        "torch_dtype": "float16",
        "text_config": {"dtype": "float32", "quantization_config": {}},
        "rest": {"dtype": 1},
    }
    run(plan_of(tmp_path / "s", llama(), config), tmp_path / "q", Resources(workers=1, sync=False))
    plan = make_plan(tmp_path / "q", Options(to="bf16"))
    assert config_of(plan) == {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "torch_dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16"},
        "rest": {"dtype": 1},
    }
    assert "quantization_config" not in plan.json_files["config.json"]


# --- the index ---


def test_one_file_of_the_usual_name_needs_no_index(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", llama())
    assert "model.safetensors.index.json" not in make_plan(source, Options()).json_files
    (source / "model.safetensors").rename(source / "weights.safetensors")
    plan = make_plan(source, Options())
    index = plan.json_files["model.safetensors.index.json"]
    (shard,) = plan.shards
    assert index["weight_map"] == {output.part.name: "weights.safetensors" for output in shard.outputs}
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(output.stop - output.start for output in shard.outputs)


def test_several_files_need_an_index_whatever_their_names(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", llama(), shards=2)
    index = source / "model.safetensors.index.json"
    text = index.read_text()
    for number, name in (("00001", "model"), ("00002", "more")):
        (source / f"model-{number}-of-00002.safetensors").rename(source / f"{name}.safetensors")
        text = text.replace(f"model-{number}-of-00002.", f"{name}.")
    index.write_text(text)
    plan = make_plan(source, Options())
    assert plan.shards[0].name == "model.safetensors"
    assert set(plan.json_files["model.safetensors.index.json"]["weight_map"].values()) == {x.name for x in plan.shards}


def test_dtypes_in_every_part_of_a_config(tmp_path: Path) -> None:
    """A decoded checkpoint is BF16 in all its language parts; a packed one where transformers decodes to it."""
    half = {name: x.astype(np.float16) for name, x in llama(layers=1).items()}
    config = {
        "dtype": "float16",
        "torch_dtype": "float16",
        "text_config": {"torch_dtype": "float16", "quantization_config": {"quant_method": "fp8"}},
        "vision_config": {"dtype": "float32"},
        "list": [{"dtype": "float16"}],
    }
    plan = plan_of(tmp_path / "a", half, config, layout="compressed-tensors")
    found = config_of(plan)
    assert {key: found[key] for key in ("dtype", "text_config", "vision_config", "list")} == {
        "dtype": "bfloat16",
        "text_config": {"torch_dtype": "bfloat16"},
        "vision_config": {"dtype": "bfloat16"},
        "list": [{"dtype": "float16"}],
    }
    assert "torch_dtype" not in found
    same = config_of(plan_of(tmp_path / "b", half, config))
    assert (same["dtype"], same["torch_dtype"], same["vision_config"]) == ("float16", "float16", {"dtype": "float32"})
    assert same["text_config"] == {"torch_dtype": "float16"}


def test_the_index_counts_data_alone(tmp_path: Path) -> None:
    plan = make_plan(write_checkpoint(tmp_path / "s", llama(layers=1), shards=3), Options())
    index = plan.json_files["model.safetensors.index.json"]
    outputs = [(output, shard) for shard in plan.shards for output in shard.outputs]
    assert index == {
        "metadata": {"total_size": sum(output.bytes for output, _ in outputs)},
        "weight_map": {output.part.name: shard.name for output, shard in outputs},
    }
    assert list(index["weight_map"]) == sorted(index["weight_map"])
