"""What a plan says before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfbyte.checkpoint import Options, Resources, Rules, make_plan, run
from tests.checkpoint.toy import Array, llama, random, write_checkpoint


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


def notes_of(folder: Path, tensors: dict[str, Array], config: dict[str, Any], **options: Any) -> tuple[str, ...]:
    return make_plan(write_checkpoint(folder, tensors, config), Options(**options)).notes


def test_an_unknown_architecture_is_said_with_what_to_do(tmp_path: Path) -> None:
    tensors = llama(layers=1) | {"vpm.blocks.0.fc1.weight": random(0, 64, 64)}
    notes = notes_of(tmp_path / "s", tensors, {"architectures": ["NewLM"], "model_type": "new"})
    (note,) = [note for note in notes if "table of architectures" in note]
    taken = [f"model.layers.#.{name}_proj" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o")]
    taken += ["model.layers.#.mlp.gate_proj", "model.layers.#.mlp.up_proj"]
    assert note == (
        "NewLM is not in the table of architectures: modules were told apart by their names. Taken for linear layers: "
        f"{', '.join(taken)} and 1 more. Look at all of it with --dry-run, decide with --include and --keep, or ask "
        "the model itself with --modules-from-model"
    )
    few = notes_of(tmp_path / "s", tensors, {"model_type": ""}, rules=Rules(include=("q_proj", "k_proj", "v_proj")))
    (note,) = [note for note in few if "table of architectures" in note]
    assert note.startswith("a model without a name is not in")
    assert f"Taken for linear layers: {', '.join(taken[:3])}. Look" in note
    assert not [note for note in notes_of(tmp_path / "s", llama(), {}) if "table of architectures" in note]


def test_limits_of_transformers_are_said_of_the_layout_that_it_reads(tmp_path: Path) -> None:
    names = ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    tensors = {f"transformer.h.0.{name}.weight": random(0, 64, 64) for name in names}
    config = {"model_type": "falcon", "architectures": ["FalconForCausalLM"]}
    for to in ("nvfp4", "mxfp4"):
        notes = notes_of(tmp_path / "s", tensors, config, to=to, layout="compressed-tensors")
        assert len([note for note in notes if "cannot load FalconForCausalLM" in note]) == 1
    assert not [note for note in notes_of(tmp_path / "s", tensors, config) if "transformers" in note]
    rules = Rules(keep=("dense", "query_key_value"), include=("*",))
    tensors["transformer.h.0.mlp.other.weight"] = random(0, 64, 64)
    kept = notes_of(tmp_path / "s", tensors, config, layout="compressed-tensors", rules=rules)
    assert not [note for note in kept if "cannot load FalconForCausalLM" in note]


def test_experts_that_stay_plain_count_for_transformers(tmp_path: Path) -> None:
    at = "model.layers.0.mlp.experts.0"
    tensors = llama() | {f"{at}.{name}_proj.weight": random(1, 32, 32) for name in ("gate", "up", "down")}
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    rules = Rules(keep=("experts",))
    notes = notes_of(tmp_path / "s", tensors, config, layout="compressed-tensors", rules=rules)
    (note,) = [note for note in notes if "it will not load them" in note]
    listed = ", ".join(f"model.layers.#.mlp.experts.#.{name}_proj" for name in ("gate", "up", "down"))
    assert f"splits or joins {listed} while loading" in note
    whole = notes_of(tmp_path / "s", tensors, config, layout="compressed-tensors")
    assert not [note for note in whole if "it will not load them" in note]


def test_limits_by_model_type_count_what_is_quantized(tmp_path: Path) -> None:
    """Experts or other linear layers: a limit is of one of them."""
    at = "model.layers.0.mlp.experts.0"
    tensors = llama() | {f"{at}.{name}_proj.weight": random(1, 32, 32) for name in ("gate", "up", "down")}
    config = {"model_type": "qwen3_moe"}
    experts, dense = Rules(include=(".experts.",)), Rules(keep=(".experts.",))
    for rules, said in ((experts, False), (dense, True), (Rules(), True)):
        notes = notes_of(tmp_path / "s", tensors, config, to="mxfp4", layout="compressed-tensors", rules=rules)
        assert any("SGLang (0.5.23) reads MXFP4" in note for note in notes) is said
    for rules, said in ((experts, True), (dense, False)):
        notes = notes_of(tmp_path / "s", tensors, config, layout="compressed-tensors", rules=rules)
        assert any("reads NVFP4 experts in this layout wrongly" in note for note in notes) is said


def test_what_is_too_narrow_for_eight_devices(tmp_path: Path) -> None:
    wide = {f"model.layers.{layer}.mlp.down_proj.weight": random(0, 16, 128) for layer in range(2)}
    assert not [note for note in notes_of(tmp_path / "s", wide, {}) if "narrow" in note]
    wide["model.layers.1.mlp.down_proj.weight"] = random(0, 16, 64)
    wide["model.layers.1.mlp.fc1.weight"] = random(0, 16, 64)
    (note,) = [note for note in notes_of(tmp_path / "s", wide, {}) if "narrow" in note]
    assert note.startswith("1 row-parallel modules, model.layers.1.mlp.down_proj first")


def test_what_becomes_of_a_source_that_is_quantized(tmp_path: Path) -> None:
    run(
        make_plan(write_checkpoint(tmp_path / "s", llama()), Options()),
        tmp_path / "q",
        Resources(workers=1, sync=False),
    )
    rules = Rules(keep=("o_proj",))
    notes = make_plan(tmp_path / "q", Options(layout="compressed-tensors", rules=rules)).notes
    assert "12 weights are nvfp4 already: their codes stay, whatever the method and contract" in notes
    assert "weights that become BF16 because they are kept: 2 nvfp4" in notes
    assert make_plan(tmp_path / "q", Options(to="bf16")).notes == ()
    plain = make_plan(tmp_path / "s", Options(rules=rules)).notes
    assert not [note for note in plain if "already" in note or "become BF16" in note or "alike" in note]


def test_a_class_that_was_never_tried_in_transformers_is_said_where_transformers_reads_the_layout(
    tmp_path: Path,
) -> None:
    untried = "whether transformers loads {} packed was not tried: --check-load transformers tells"
    for name, model_type, tried in (
        ("LlamaForCausalLM", "llama", True),
        ("LlamaModel", "llama", False),
        ("X", "x", False),
    ):
        config = {"architectures": [name], "model_type": model_type}
        notes = notes_of(tmp_path / "s", llama(), config, layout="compressed-tensors")
        assert (untried.format(name) in notes) != tried
        assert untried.format(name) not in notes_of(tmp_path / "s", llama(), config)


NARROW = "{} row-parallel modules, {} first, are too narrow for 8-way tensor parallelism"
AT = "model.layers.0"


def test_all_notes_of_a_dense_model(tmp_path: Path) -> None:
    """The order is that of importance; nothing else is said."""
    narrow = NARROW.format(2, f"{AT}.self_attn.o_proj")
    assert notes_of(tmp_path / "a", llama(layers=1), {}) == (narrow,)
    half = llama(layers=1, dtype=np.float16)
    bfloat16 = (
        "config.json will ask for bfloat16 in place of the source's dtype: transformers decodes packed weights to BF16 "
        "and computes in one dtype"
    )
    rules = Rules(include=("_proj", "misspelt"))
    assert notes_of(tmp_path / "b", half, {}, layout="compressed-tensors", rules=rules) == (
        "pattern 'misspelt' matches no module", bfloat16, narrow
    )  # fmt: skip
    assert notes_of(tmp_path / "b", half, {"dtype": "bfloat16"}, layout="compressed-tensors") == (narrow,)
    assert notes_of(tmp_path / "b", half, {}) == (narrow,)


@pytest.mark.parametrize(
    ("columns", "to", "said"), [(128, "nvfp4", False), (256, "mxfp4", False), (128, "mxfp4", True)]
)
def test_eight_blocks_are_wide_enough(tmp_path: Path, columns: int, to: str, said: bool) -> None:
    tensors = {f"{AT}.mlp.down_proj.weight": random(0, 16, columns)}
    layout = "compressed-tensors"
    found = notes_of(tmp_path / "s", tensors, {}, to=to, layout=layout)
    assert (NARROW.format(1, f"{AT}.mlp.down_proj") in found) is said


def test_experts_that_are_not_alike(tmp_path: Path) -> None:
    """Only where the same layer has both; the last quantized and the first kept one are named."""
    experts = {
        f"model.layers.{layer}.mlp.experts.{e}.{name}_proj.weight": random(e, 128, 128)
        for layer in range(2)
        for e in range(2)
        for name in ("gate", "up", "down")
    }
    config = {"model_type": "qwen3_moe"}
    at = "model.layers.1.mlp.experts"
    assert notes_of(tmp_path / "s", experts, config, rules=Rules(keep=(f"{at}.0.",))) == (
        f"{at}.1.down_proj is quantized and {at}.0.gate_proj kept: servers want all experts of a layer alike and will "
        "not load this; keep or include them all",
    )
    assert notes_of(tmp_path / "s", experts, config, rules=Rules(keep=(at,))) == ()
    assert notes_of(tmp_path / "s", experts, config) == ()


def test_a_module_that_a_reader_takes_for_a_kept_one(tmp_path: Path) -> None:
    tensors = {
        f"model.layers.{layer}.self_attn.{name}.weight": random(layer, 64, 64)
        for layer in range(2)
        for name in ("q_a_proj", "kv_a_proj_with_mqa")
    }
    notes = notes_of(tmp_path / "s", tensors, {}, rules=Rules(keep_first=1))
    taken = {note.split(" is quantized, but SGLang would take ")[0]: note for note in notes if "SGLang" in note}
    at = "model.layers.1.self_attn"
    assert list(taken) == [f"{at}.q_a_proj"]
    assert taken[f"{at}.q_a_proj"] == (
        f"{at}.q_a_proj is quantized, but SGLang would take {at}.fused_qkv_a_proj as excluded because "
        "model.layers.0.self_attn.kv_a_proj_with_mqa is kept; keep or include both"
    )


def test_weights_that_stay_or_become_bf16_are_counted_by_kind(tmp_path: Path) -> None:
    tensors: dict[str, Array] = {}
    for layer, kind in enumerate(("fp8", "fp8", "mxfp4", "mxfp4")):
        at = f"model.layers.{layer}.mlp.fc"
        if kind == "fp8":
            tensors[f"{at}.weight"] = np.ones((32, 32), ml_dtypes.float8_e4m3fn)
            tensors[f"{at}.weight_scale"] = np.ones((), np.float32)
        else:
            tensors[f"{at}.weight_packed"] = np.ones((32, 16), np.uint8)
            tensors[f"{at}.weight_scale"] = np.ones((32, 1), np.uint8)
    config = {"num_hidden_layers": 4, "quantization_config": {"quant_method": "compressed-tensors"}}
    options = {"to": "mxfp4", "layout": "compressed-tensors", "rules": Rules(keep_last=1)}
    found = notes_of(tmp_path / "s", tensors, config, **options)
    assert found[:1] == ("1 weights are mxfp4 already: their codes stay, whatever the method and contract",)
    assert found[-1] == "weights that become BF16 because they are kept: 1 mxfp4"
    rules = Rules(keep=("layers.0", "layers.1", "layers.2"))
    found = notes_of(tmp_path / "s", tensors, config, **(options | {"rules": rules}))
    assert found[-1] == "weights that become BF16 because they are kept: 2 fp8, 1 mxfp4"
    assert not [note for note in notes_of(tmp_path / "s", tensors, config) if "already" in note]


def test_unknown_modules_are_told_apart_by_patterns(tmp_path: Path) -> None:
    """Six are listed, and how many more there are."""
    for count, more in ((6, ""), (7, " and 1 more")):
        tensors = {f"eyes.{layer}.fc{i}.weight": random(i, 32, 32) for layer in range(2) for i in range(count)}
        notes = notes_of(tmp_path / str(count), tensors, {"architectures": ["X"], "model_type": "x"})
        listed = ", ".join(f"eyes.#.fc{i}" for i in range(6))
        assert notes[0] == (
            "X is not in the table of architectures: modules were told apart by their names. Taken for linear layers: "
            f"{listed}{more}. Look at all of it with --dry-run, decide with --include and --keep, or ask the model "
            "itself with --modules-from-model"
        )


def test_experts_one_by_one_in_bf16_are_said_where_transformers_wants_a_stack(tmp_path: Path) -> None:
    tensors: dict[str, Array] = {}
    for name in ("gate", "up", "down"):
        tensors[f"{AT}.mlp.experts.0.{name}_proj.weight"] = np.ones((32, 32), ml_dtypes.float8_e4m3fn)
        tensors[f"{AT}.mlp.experts.0.{name}_proj.weight_scale"] = np.ones((), np.float32)
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "fp8"}}
    (note,) = notes_of(tmp_path / "s", tensors, config, to="bf16")
    listed = ", ".join(f"model.layers.#.mlp.experts.#.{name}_proj" for name in ("gate", "up", "down"))
    assert note == f"transformers (5.22.2) wants the experts of gpt_oss in one tensor and will not load {listed}"
