"""The plan: complete, frozen, written down, and made from headers alone."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from benchmarks.synthetic import write_holes
from halfbyte.checkpoint import Options, Plan, Resources, Rules, make_plan, run
from halfbyte.checkpoint.io.header import read_header
from halfbyte.errors import CheckpointError, InputError, UnknownNameError, UnsupportedError
from halfbyte.models.architectures import from_description
from tests.checkpoint.toy import Array, llama, random, read_checkpoint, write_checkpoint

SMALL = Resources(workers=2, max_memory=1 << 28, sync=False)


def outputs(plan: Plan) -> dict[str, tuple[str, str, tuple[int, ...], int, int]]:
    return {
        output.part.name: (shard.name, output.part.dtype, output.part.shape, output.start, output.stop)
        for shard in plan.shards
        for output in shard.outputs
    }


def test_every_output_is_where_the_plan_says(tmp_path: Path) -> None:
    plan = make_plan(write_checkpoint(tmp_path / "s", llama(), shards=3), Options(activations="unit"))
    run(plan, tmp_path / "d", SMALL)
    found: dict[str, tuple[str, str, tuple[int, ...], int, int]] = {}
    for shard in plan.shards:
        header = read_header(tmp_path / "d" / shard.name)
        assert header.file_size == shard.size
        found |= {name: (shard.name, i.dtype, i.shape, i.start, i.stop) for name, i in header.tensors.items()}
    assert found == outputs(plan)


def test_tensors_start_at_multiples_of_their_elements(tmp_path: Path) -> None:
    odd = llama() | {"model.odd.weight": random(0, 3, 5), "model.layers.0.mlp.count": np.array([3], np.int64)}
    plan = make_plan(write_checkpoint(tmp_path / "s", odd), Options())
    sizes = {"I64": 8, "F32": 4, "BF16": 2}
    for _, dtype, _, start, _ in outputs(plan).values():
        assert start % sizes.get(dtype, 1) == 0


def test_every_source_tensor_has_an_account(tmp_path: Path) -> None:
    tensors = llama()
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors, shards=2), Options(rules=Rules(keep=("o_proj",))))
    copied = {copy.output.part.name for shard in plan.shards for copy in shard.copies}
    converted = {f"{unit.module}.weight" for unit in plan.units}
    assert copied | converted | set(plan.dropped) == set(tensors)
    assert not copied & converted
    weights = {name.removesuffix(".weight") for name, x in tensors.items() if x.ndim == 2}
    assert set(plan.kept) == weights - {unit.module for unit in plan.units}


def test_a_plan_is_frozen_and_can_be_written_down(tmp_path: Path) -> None:
    plan = make_plan(write_checkpoint(tmp_path / "s", llama(), shards=2), Options())
    for part in (plan, plan.shards[0], plan.units[0], plan.units[0].sources[0], plan.units[0].outputs[0]):
        assert dataclasses.is_dataclass(part)
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.__setattr__(dataclasses.fields(part)[0].name, None)
    described = json.loads(json.dumps(plan.as_json()))
    named = {
        tensor["name"]: (shard["name"], tensor["dtype"], tuple(tensor["shape"]), *tensor["offsets"])
        for shard in described["shards"]
        for tensor in shard["tensors"]
    }
    assert named == outputs(plan)
    assert described["output_bytes"] == sum(shard.size for shard in plan.shards)


def test_the_same_plan_has_the_same_fingerprint_and_another_has_not(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", llama(), shards=2)
    first = make_plan(source, Options()).fingerprint
    assert make_plan(source, Options()).fingerprint == first
    others = [
        Options(method="amax"),
        Options(contract="torchao", method="optimal"),
        Options(activations="unit"),
        Options(layout="compressed-tensors"),
        Options(rules=Rules(keep_first=1)),
    ]
    prints = [make_plan(source, options).fingerprint for options in others]
    assert len({first, *prints}) == 1 + len(others)
    write_checkpoint(tmp_path / "s", llama(hidden=32), shards=2)
    assert make_plan(source, Options()).fingerprint != first


def test_exclude_lists_do_not_swallow_a_quantized_module(tmp_path: Path) -> None:
    tensors = llama() | {"model.layers.0.mlp.gate.weight": random(0, 4, 64)}
    with pytest.raises(InputError, match=r"model.layers.0.mlp.gate stays unquantized, but its name is part of"):
        make_plan(write_checkpoint(tmp_path / "s", tensors), Options())


def test_routers_of_other_layers_are_no_clash(tmp_path: Path) -> None:
    tensors = llama() | {"model.layers.1.block.mlp.gate.weight": random(0, 4, 64)}
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors), Options())
    ignored = plan.json_files["config.json"]["quantization_config"]["ignore"]
    assert ignored == ["lm_head", "model.layers.1.block.mlp.gate"]


def test_tied_heads_are_listed_although_they_have_no_tensor(tmp_path: Path) -> None:
    tensors = llama()
    del tensors["lm_head.weight"]
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors, {"tie_word_embeddings": True}), Options())
    assert plan.json_files["config.json"]["quantization_config"]["ignore"] == ["lm_head"]


def test_a_quantization_config_in_text_config_goes(tmp_path: Path) -> None:
    config = {
        "model_type": "some_vl",
        "text_config": {"quantization_config": {"quant_method": "fp8"}, "hidden_size": 64},
    }
    plan = make_plan(write_checkpoint(tmp_path / "s", llama(), config), Options())
    assert plan.json_files["config.json"]["text_config"] == {"hidden_size": 64}


def test_notes_say_who_cannot_read_it(tmp_path: Path) -> None:
    experts = {
        f"model.layers.0.mlp.experts.0.{name}.weight": random(0, 64, 64)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    source = write_checkpoint(tmp_path / "s", experts, {"model_type": "qwen3_moe"})
    notes = "\n".join(make_plan(source, Options(layout="compressed-tensors")).notes)
    assert "transformers (through 5.22) reads NVFP4 experts in this layout wrongly" in notes
    assert "model.layers.0.mlp.experts.0.down_proj first, are too narrow for 8-way tensor parallelism" in notes


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (Options(to="int4"), UnknownNameError, "unknown target format 'int4'"),
        (Options(layout="awq"), UnknownNameError, "unknown layout 'awq'"),
        (Options(contract="nobody"), UnknownNameError, "unknown contract 'nobody'"),
        (
            Options(method="best"),
            UnknownNameError,
            "unknown method 'best'; known: amax, four_six, gptq, hessian, optimal, sweep$",
        ),
        (
            Options(to="mxfp4", layout="compressed-tensors", method="best"),
            UnknownNameError,
            "known: amax, gptq, hessian, optimal$",
        ),
        (
            Options(method="hessian"),
            UnsupportedError,
            r"^method 'hessian' needs statistics of the inputs of every layer: --stats DIR",
        ),
        (Options(contract="torchao", method="four_six"), UnsupportedError, "does not define method four_six"),
        (Options(contract="qwantize"), UnsupportedError, "no scale of the whole tensor to store"),
        (Options(contract="gguf"), UnsupportedError, "gguf"),
    ],
)
def test_options_without_a_meaning(tmp_path: Path, options: Options, kind: type[Exception], message: str) -> None:
    source = write_checkpoint(tmp_path / "s", llama())
    with pytest.raises(kind, match=message):
        make_plan(source, options)


def test_a_large_plan_is_made_from_headers_alone(tmp_path: Path) -> None:
    """6,000 tensors, 176 GB that are not there: ten times this in twenty seconds is promised."""
    made = write_holes(tmp_path / "s", 8, 250)
    began = time.process_time()
    plan = make_plan(tmp_path / "s", Options())
    assert plan.fingerprint
    seconds = time.process_time() - began
    assert (made.tensors, len(plan.units), len(plan.shared), len(plan.kept)) == (6016, 6000, 2000, 8)
    assert made.bytes > 170e9
    assert 3.5 < plan.source_bytes / plan.output_bytes < 3.6
    assert seconds < 10


def test_decoding_a_plan_gives_tensors_of_the_right_kind(tmp_path: Path) -> None:
    run(make_plan(write_checkpoint(tmp_path / "s", llama()), Options()), tmp_path / "d", SMALL)
    dtypes = {name.rpartition(".")[2]: x.dtype for name, x in read_checkpoint(tmp_path / "d").items() if "mlp" in name}
    assert dtypes == {"weight": np.uint8, "weight_scale": np.uint8, "weight_scale_2": np.float32}


@pytest.mark.parametrize(
    ("model_type", "leaves", "group"),
    [("qwen", ("w1", "w2"), ("w2", "w1")), ("exaone", ("c_fc_0", "c_fc_1"), ("c_fc_0", "c_fc_1"))],
)
def test_partners_are_those_of_the_model_type(
    tmp_path: Path, model_type: str, leaves: tuple[str, ...], group: tuple[str, ...]
) -> None:
    tensors = {f"h.0.mlp.{leaf}.weight": random(number, 32, 64) for number, leaf in enumerate((*leaves, "c_proj"))}
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors, {"model_type": model_type}), Options())
    assert plan.shared == [tuple(f"h.0.mlp.{leaf}" for leaf in group)]


def test_limits_of_readers_are_noted(tmp_path: Path) -> None:
    tensors = {"backbone.layers.0.mixer.in_proj.weight": random(1, 64, 32)}
    source = write_checkpoint(tmp_path / "s", tensors, {"model_type": "mamba"})
    assert any(
        note.startswith("vLLM (0.32) builds the projections of Mamba") for note in make_plan(source, Options()).notes
    )
    other = write_checkpoint(tmp_path / "t", tensors, {"model_type": "mamba2"})
    assert not any("vLLM" in note for note in make_plan(other, Options()).notes)


def test_nothing_of_two_axes_is_in_no_row(tmp_path: Path) -> None:
    """Experts in a tensor that is not taken apart, convolutions, parameters of their own: each is listed as kept."""
    at = "model.layers.0"
    tensors = llama() | {
        f"{at}.block_sparse_moe.input_linear.weight": random(1, 4, 64, 32),
        f"{at}.block_sparse_moe.router.layer.weight": random(2, 4, 64),
        f"{at}.conv.weight": random(3, 4, 1, 4),
        f"{at}.mixer.A_log": random(4, 4, 4),
        f"{at}.mixer.dt_bias": random(5, 4, 4),
        f"{at}.mixer.D": random(6, 4),
        f"{at}.mixer.count": np.zeros((4, 4), np.int64),
    }
    config = {"model_type": "granitemoe", "architectures": ["GraniteMoeForCausalLM"]}
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors, config), Options())
    assert plan.kept == {
        "model.embed_tokens": "embedding",
        "lm_head": "output head",
        f"{at}.block_sparse_moe.router.layer": "router",
        f"{at}.block_sparse_moe.input_linear": "a convolution, or experts in one tensor that is not taken apart",
        f"{at}.conv": "convolution",
        f"{at}.mixer.A_log": "a parameter of its own, no weight of a linear layer",
    }
    assert set(plan.json_files["config.json"]["quantization_config"]["ignore"]) >= {
        f"{at}.block_sparse_moe.input_linear",
        f"{at}.conv",
    }


def test_conv1d_weights_are_never_quantized(tmp_path: Path) -> None:
    """GPT-2 stores them as [inputs, outputs]: blocks along the last axis would be blocks of outputs."""
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    tensors = {f"transformer.h.0.{name}.weight": random(1, 64, 64) for name in names}
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    source = write_checkpoint(tmp_path / "s", tensors, config)
    for rules in (Rules(), Rules(include=("c_",))):
        with pytest.raises(CheckpointError, match=r"nothing to convert \(4 stored transposed \(Conv1D\)"):
            make_plan(source, Options(rules=rules))


def test_the_model_itself_is_asked_where_the_caller_wants_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, bool]] = []

    def describe(path: Path, trust_remote_code: bool) -> dict[str, object]:
        asked.append((path, trust_remote_code))
        modules = {"router": ["model.layers.#.mlp.up_proj"], "linear": ["lm_head", "model.layers.#.mlp.gate_proj"]}
        return {
            "modules": modules, "prefix": "model", "tied": {}, "tied_by_default": False, "stacks": {}, "renames": [],
            "model_type": "odd",
        }  # fmt: skip

    monkeypatch.setattr("halfbyte.checkpoint.plan.planner.modules_from_model", describe)
    source = write_checkpoint(tmp_path / "s", llama(), {"model_type": "odd", "architectures": ["OddLM"]})
    assert make_plan(source, Options()).kept["lm_head"] == "output head"
    assert asked == []
    plan = make_plan(source, Options(modules_from_model=True, trust_remote_code=True))
    assert asked == [(source, True)]
    assert "lm_head" in {unit.module for unit in plan.units}
    assert plan.kept["model.layers.1.mlp.up_proj"] == "router"
    assert plan.kept["model.layers.1.mlp.gate_proj"] == "its partner model.layers.1.mlp.up_proj is kept"
    assert not any("table of architectures" in note for note in plan.notes)


def test_a_partner_that_the_architecture_does_not_have_is_not_missed(tmp_path: Path) -> None:
    """The table knows that the MLP of this class has no gate; in an unknown one a lone k_proj is an error."""
    tensors = {f"model.decoder.layers.0.encoder_attn.{name}_proj.weight": random(1, 32, 32) for name in "kv"}
    with pytest.raises(CheckpointError, match=r"encoder_attn.k_proj shares its scale with .*q_proj, which is not in"):
        make_plan(write_checkpoint(tmp_path / "s", tensors, {"model_type": "new"}), Options())


def test_a_pattern_may_name_a_module_at_run_time(tmp_path: Path) -> None:
    tensors = {f"language_model.{name}": x for name, x in llama().items()}
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    source = write_checkpoint(tmp_path / "s", tensors, config)
    pattern = "model.language_model.layers.1.self_attn.o_proj"
    plan = make_plan(source, Options(rules=Rules(keep=(pattern,))))
    assert plan.kept["language_model.model.layers.1.self_attn.o_proj"] == f"--keep {pattern}"
    plan = make_plan(source, Options(rules=Rules(include=(pattern,))))
    assert [unit.module for unit in plan.units] == ["language_model.model.layers.1.self_attn.o_proj"]
    assert not [note for note in plan.notes if "matches no module" in note]


def test_a_head_that_is_in_no_file_may_be_kept_by_name(tmp_path: Path) -> None:
    tensors = llama()
    del tensors["lm_head.weight"]
    source = write_checkpoint(
        tmp_path / "s", tensors, {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    )
    for pattern in ("lm_head", "*lm_head*"):
        plan = make_plan(source, Options(rules=Rules(keep=(pattern,))))
        assert not [note for note in plan.notes if "matches no module" in note]
    plan = make_plan(source, Options(rules=Rules(include=("lm_head", "_proj"), keep=("lm_haed",))))
    unused = [note for note in plan.notes if "matches no module" in note]
    assert unused == ["pattern 'lm_haed' matches no module", "pattern 'lm_head' matches no module"]


def test_a_family_that_stays_fp8_needs_its_fp8_release(tmp_path: Path) -> None:
    tensors = {f"layers.0.ffn.experts.0.{name}.weight": random(1, 64, 64) for name in ("w1", "w2", "w3")}
    source = write_checkpoint(tmp_path / "s", tensors, {"model_type": "deepseek_v4"})
    with pytest.raises(
        CheckpointError, match=r"readers of DeepSeek-V4 expect FP8 .* convert the FP8 release of the model"
    ):
        make_plan(source, Options())


def test_what_a_quantized_source_left_out_stays_out(tmp_path: Path) -> None:
    """Whoever quantized the source had a reason."""
    source = write_checkpoint(tmp_path / "s", llama() | {"model.layers.0.mixer.A_log": random(4, 4, 4)})
    run(make_plan(source, Options(rules=Rules(keep=("down_proj",)))), tmp_path / "q", SMALL)
    plan = make_plan(tmp_path / "q", Options(layout="compressed-tensors"))
    down = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    assert {module: plan.kept[module] for module in down} == dict.fromkeys(down, "unquantized in the source")
    assert (
        make_plan(tmp_path / "q", Options(to="bf16")).kept == {}
    )  # where nothing is quantized, nothing is kept from it


def refused(folder: Path, tensors: dict[str, Array], config: dict[str, Any] | None = None, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        make_plan(write_checkpoint(folder, tensors, config), Options(**options))
    return str(caught.value)


def test_nothing_to_convert(tmp_path: Path) -> None:
    """Reasons are counted; without any it is said what is not there."""
    at = tmp_path / "s"
    norm = {"model.norm.weight": random(0, 3)}
    assert refused(at, norm) == f"{at}: nothing to convert (it holds no weight of a linear layer)"
    assert refused(at, norm, to="bf16") == f"{at}: nothing to convert (it holds no quantized weight)"
    assert refused(at, llama(), to="bf16") == f"{at}: nothing to convert (it holds no quantized weight)"
    rules = Rules(keep=("_proj",))
    assert refused(at, llama(), rules=rules) == (
        f"{at}: nothing to convert (1 embedding, 14 --keep _proj, 1 output head)"
    )
    config = {"quantization_config": {"quant_method": "gptq"}}
    assert refused(at, llama(), config) == (
        f"{at}: quantized by 'gptq', which no reader knows; known: compressed-tensors, fp8, modelopt, mxfp4, quark"
    )


E4M3 = ml_dtypes.float8_e4m3fn


def fp8(*names: str, size: int = 32) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for name in names:
        tensors[f"model.layers.0.{name}.weight"] = np.ones((size, size), E4M3)
        tensors[f"model.layers.0.{name}.weight_scale"] = np.ones((), np.float32)
    return tensors


FP8 = {"quantization_config": {"quant_method": "fp8"}}


def test_what_becomes_of_each_weight_of_a_quantized_source(tmp_path: Path) -> None:
    """Quantized anew, decoded because it is kept, or left as it is, unquantized, as whoever made the source wanted."""
    tensors = fp8("mlp.down_proj", "self_attn.o_proj") | {"model.layers.0.mlp.fc.weight": random(0, 32, 32)}
    tensors["model.layers.0.mlp.down_proj.input_scale"] = np.ones((), np.float32)
    source = write_checkpoint(tmp_path / "s", tensors, FP8)
    plan = make_plan(source, Options(rules=Rules(keep=("o_proj",))))
    assert [(unit.module.rpartition(".")[2], unit.action) for unit in plan.units] == [
        ("down_proj", "quantize"),
        ("o_proj", "decode"),
    ]
    assert plan.kept == {
        "model.layers.0.self_attn.o_proj": "--keep o_proj",
        "model.layers.0.mlp.fc": "unquantized in the source",
    }
    assert plan.dropped == {
        "model.layers.0.mlp.down_proj.input_scale": (
            "activation scale of model.layers.0.mlp.down_proj in the source's own format"
        )
    }
    assert "weights that become BF16 because they are kept: 1 fp8" in plan.notes
    copied = {copy.output.part.name for shard in plan.shards for copy in shard.copies}
    assert copied == {"model.layers.0.mlp.fc.weight"}
    decoded = make_plan(source, Options(to="bf16"))
    assert {unit.action for unit in decoded.units} == {"decode"}
    assert (decoded.kept, len(decoded.units), decoded.format, decoded.contract) == ({}, 2, None, None)


def test_the_callers_rules_count_in_a_quantized_source_and_the_models_do_not(tmp_path: Path) -> None:
    """Whoever quantized a router or a head to FP4 wanted that; FP8 is decided anew."""
    source = write_checkpoint(tmp_path / "s", fp8("mlp.gate", "mlp.down_proj", size=48), FP8)
    assert make_plan(source, Options()).kept == {"model.layers.0.mlp.gate": "router"}
    run(make_plan(write_checkpoint(tmp_path / "t", llama()), Options(rules=Rules(include=("lm_head", "*")))),
        tmp_path / "q", SMALL)  # fmt: skip
    plan = make_plan(tmp_path / "q", Options(layout="compressed-tensors"))
    assert "lm_head" in {unit.module for unit in plan.units}
    assert {unit.action for unit in plan.units} == {"relayout"}


def test_what_is_listed_as_kept_beside_weights(tmp_path: Path) -> None:
    """Nothing with one axis, no bias, no integers, nothing that is part of a weight; modules once."""
    at = "model.layers.0"
    tensors = {f"{at}.mlp.down_proj.weight": random(0, 32, 32)} | {
        f"{at}.conv1d.weight": random(1, 4, 1, 4),
        f"{at}.other.weight": random(2, 4, 4, 4),
        f"{at}.mlp.experts.weight": random(3, 2, 4, 4),
        f"{at}.mixer.D": random(4, 4),
        f"{at}.mixer.A": random(5, 4, 4),
        f"{at}.mixer.bias": random(6, 4, 4),
        f"{at}.mixer.count": np.ones((4, 4), np.int64),
        f"{at}.empty.weight": np.zeros((4, 0), np.float32),
    }
    kept = make_plan(write_checkpoint(tmp_path / "s", tensors), Options()).kept
    assert list(kept) == [f"{at}.conv1d", f"{at}.other", f"{at}.mlp.experts", f"{at}.mixer.A"]
    assert kept[f"{at}.mixer.A"] == "a parameter of its own, no weight of a linear layer"
    assert kept[f"{at}.other"] == "a convolution, or experts in one tensor that is not taken apart"


def test_stacked_experts_of_which_only_some_would_be_kept(tmp_path: Path) -> None:
    at = "model.layers.0.mlp.experts"
    tensors = {f"{at}.gate_up_proj": random(0, 2, 64, 32), f"{at}.down_proj": random(1, 2, 32, 32)}
    config = {"model_type": "qwen3_moe", "hidden_size": 32, "moe_intermediate_size": 32}
    rules = Rules(keep=("experts.1.up_proj",))
    assert refused(tmp_path / "s", tensors, config, rules=rules, layout="compressed-tensors") == (
        f"{at}.gate_up_proj holds {at}.0.gate_proj and {at}.1.gate_proj, of which only one would be kept; stacked "
        "experts are kept or converted together"
    )


@pytest.mark.parametrize(
    ("named", "name"), [(["OddLM", "Other"], "OddLM"), ([], "odd"), (None, "odd"), ("OddLM", "odd"), ({}, "odd")]
)
def test_what_a_model_that_describes_itself_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: object, name: str
) -> None:
    """As its config says, or by its type."""
    described: dict[str, object] = {
        "modules": {"linear": ["model.layers.#.mlp.down_proj"]}, "prefix": "model", "tied": {},
        "tied_by_default": False, "stacks": {}, "renames": [], "model_type": "odd",
    }  # fmt: skip
    monkeypatch.setattr("halfbyte.checkpoint.plan.planner.modules_from_model", lambda *given: described)
    called: list[str] = []

    def noted(name: str, description: Any) -> Any:
        called.append(name)
        return from_description(name, description)

    monkeypatch.setattr("halfbyte.checkpoint.plan.planner.from_description", noted)
    source = write_checkpoint(tmp_path / "s", llama(layers=1), {"model_type": "odd", "architectures": named})
    make_plan(source, Options(modules_from_model=True))
    assert called == [name]


def test_what_is_decoded_needs_every_scale(tmp_path: Path) -> None:
    """Also of a width that no block would have; what is no format of the source is copied."""
    tensors = fp8("mlp.down_proj") | {"model.layers.0.mlp.fc.weight": np.ones((4, 3), E4M3)}
    said = refused(tmp_path / "s", tensors, FP8, to="bf16")
    assert said.startswith("model.layers.0.mlp.fc.weight is quantized (F8_E4M3), but none of its possible scales")
    del tensors["model.layers.0.mlp.fc.weight"]
    tensors["model.layers.0.mlp.table.weight"] = np.ones((4, 3), np.int64)
    plan = make_plan(write_checkpoint(tmp_path / "t", tensors, FP8), Options(to="bf16"))
    assert [copy.output.part.name for shard in plan.shards for copy in shard.copies] == [
        "model.layers.0.mlp.table.weight"
    ]
    plain = {"model.layers.0.mlp.table.weight": np.ones((4, 3), np.int64), "model.norm.weight": random(0, 3)}
    assert "nothing to convert (it holds no quantized weight)" in refused(tmp_path / "u", plain, to="bf16")
