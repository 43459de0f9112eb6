"""Quantized modules by role, exclude lists by name, limits of readers, and how a report prints many of a kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from halfbyte.cli import app
from halfbyte.models import model_of
from halfbyte.verify import Problem, Report, verify
from halfbyte.verify.rules.modules import is_linear, runtime_names
from tests.quantized import Layout, edit, load, write_quantized
from tests.tiny_models import BF16, Tensors, make, write_checkpoint

MODULE = "model.layers.0.mlp.down_proj"


def rename(path: Path, module: str) -> None:
    """The tensors of one quantized module under another name."""
    parts = {
        name.replace(MODULE, module): values for name, values in load(path).items() if name.startswith(f"{MODULE}.")
    }
    edit(path, parts, (f"{module}.weight",) if f"{module}.weight" not in parts else ())


def config_of(model_type: str) -> dict[str, object]:
    return {"model_type": model_type, "architectures": []}


def found(report: Report, rule: str) -> list[tuple[str, str]]:
    return [(problem.level, problem.name) for problem in report.problems if problem.rule == rule]


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(
    ("module", "level"),
    [
        ("model.embed_tokens", "error"),
        ("lm_head", "warning"),
        ("model.layers.0.mlp.gate", "warning"),
        ("visual.blocks.0.fc1", "warning"),
        ("multi_modal_projector.linear_1", "warning"),
    ],
)
def test_quantized_modules_that_are_no_linear_layers(tmp_path: Path, layout: Layout, module: str, level: str) -> None:
    path = write_quantized(tmp_path / "q", layout=layout)
    rename(path, module)
    assert found(verify(path), "role") == [(level, module)]


@pytest.mark.parametrize(
    ("architecture", "module", "reason"),
    [
        ("GPT2LMHeadModel", "transformer.h.0.attn.c_attn", "stored as [in, out] (Conv1D): the blocks lie along"),
        ("MambaForCausalLM", "backbone.layers.0.mixer.dt_proj", "read by the model without its module"),
        ("MambaForCausalLM", "backbone.layers.0.mixer.conv1d", "a convolution: no reader has a quantized one"),
        ("ZambaForCausalLM", "model.layers.2.shared_transf.self_attn.q_proj", "one weight of several layers"),
        ("LlamaForCausalLM", "model.layers.0.input_layernorm", "a norm, which has no matrix"),
        ("JetMoeForCausalLM", "model.layers.0.mlp.input_linear", "no linear layer in this architecture"),
        ("T5ForConditionalGeneration", "shared", "a lookup table: readers take rows out of it"),
    ],
)
def test_quantized_modules_that_the_table_knows_better(
    tmp_path: Path, architecture: str, module: str, reason: str
) -> None:
    path = write_quantized(tmp_path / "q", layout="compressed-tensors")
    rename(path, module)
    config = json.loads((path / "config.json").read_text()) | {"architectures": [architecture]}
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    (problem,) = [problem for problem in verify(path).problems if problem.rule == "role"]
    assert (problem.level, problem.name) == ("error", module)
    assert f"but it is {reason}" in problem.text


def test_modules_that_readers_build_no_linear_layer_of() -> None:
    jetmoe = model_of({"architectures": ["JetMoeForCausalLM"]})
    mamba = model_of({"architectures": ["MambaForCausalLM"]})
    assert not is_linear(jetmoe, "model.layers.0.mlp.input_linear")
    assert not is_linear(jetmoe, "model.embed_tokens")
    assert not is_linear(mamba, "backbone.layers.0.mixer.conv1d")
    assert not is_linear(mamba, "backbone.norm_f")
    assert is_linear(mamba, "backbone.layers.0.mixer.dt_proj")
    assert is_linear(mamba, "lm_head")
    qwen = model_of({"architectures": ["Qwen3MoeForCausalLM"]})
    assert runtime_names(qwen, "model.layers.0.mlp.experts.0.up_proj") == ()  # part of a stack
    assert runtime_names(qwen, "model.layers.0.self_attn.q_proj") == ("model.layers.0.self_attn.q_proj",)


def test_limits_of_readers_are_warnings(tmp_path: Path) -> None:
    """Those by model type, and those that the table tells of transformers."""
    path = write_quantized(tmp_path / "q", "qwen3_moe", "compressed-tensors")
    texts = [
        problem.text for problem in verify(path).problems if (problem.level, problem.rule) == ("warning", "reader")
    ]
    assert len([text for text in texts if "reads NVFP4 experts in this layout wrongly" in text]) == 1
    path = write_quantized(tmp_path / "l", layout="compressed-tensors")
    assert not found(verify(path), "reader")
    config = json.loads((path / "config.json").read_text()) | {"architectures": ["NanoChatForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config))
    (problem,) = [problem for problem in verify(path).problems if problem.rule == "reader"]
    assert (problem.level, problem.name) == ("warning", "config.json")
    assert "cannot load NanoChatForCausalLM with model.layers.#.self_attn.o_proj packed" in problem.text
    path = write_quantized(tmp_path / "m", layout="modelopt")
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | config_of("mamba")))
    sglang, problem = (problem for problem in verify(path).problems if problem.rule == "reader")
    assert "SGLang (0.5.23) has no model of its own" in sglang.text
    assert "vLLM (0.32) builds the projections of Mamba" in problem.text


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_tied_head_must_be_listed(tmp_path: Path, layout: Layout) -> None:
    """It is in no file, but readers build it."""
    path = write_quantized(tmp_path / "q", layout=layout)
    edit(path, drop=("lm_head.weight",))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert verify(path).clean
    (path / "hf_quant_config.json").unlink(missing_ok=True)
    edit(path, ignore=[])
    assert ("error", "lm_head") in found(verify(path), "not-excluded")


def test_a_kept_layer_must_be_listed_under_its_name_at_run_time(tmp_path: Path) -> None:
    """transformers calls the projector of LLaVA by another name than the file does."""
    path = write_quantized(tmp_path / "q", layout="compressed-tensors")
    disk, there = "multi_modal_projector.linear_1", "model.multi_modal_projector.linear_1"
    moved: Tensors = {f"language_model.{name}": values for name, values in load(path).items()}
    moved[f"{disk}.weight"] = np.ones((128, 64), BF16)
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    config["quantization_config"]["ignore"] = ["lm_head", "language_model.lm_head", disk]
    shutil.rmtree(path)
    write_checkpoint(path, moved, config)
    (problem,) = [problem for problem in verify(path).problems if problem.level == "error"]
    assert (problem.rule, problem.name) == ("not-excluded", disk)
    assert f"transformers calls it {there}" in problem.text
    edit(path, ignore=["lm_head", "language_model.lm_head", disk, there])
    assert verify(path).clean


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_member_of_a_fused_layer_without_partners(tmp_path: Path, layout: Layout) -> None:
    """An up_proj that no gate_proj stands beside is asked for under its own name."""
    path = write_quantized(tmp_path / "q", layout=layout)
    (path / "hf_quant_config.json").unlink(missing_ok=True)
    module = "encoder.layers.0.ff1.up_proj"
    edit(path, {f"{module}.weight": np.ones((64, 64), BF16)}, ignore=["lm_head", module])
    assert found(verify(path), "not-excluded") == []
    edit(path, ignore=["lm_head"])
    assert ("error", module) in found(verify(path), "not-excluded")


@pytest.mark.parametrize("entry", ["model.layers.7.mlp.gate", "re:.*vision.*", "*visual*"])
def test_entries_that_name_nothing_are_a_warning(tmp_path: Path, entry: str) -> None:
    path = write_quantized(tmp_path / "q", layout="compressed-tensors")
    edit(path, ignore=["lm_head", entry])
    report = verify(path)
    assert (report.clean, found(report, "idle-entry")) == (True, [("warning", "config.json")])
    assert entry in next(problem.text for problem in report.problems)
    assert "more)" not in next(problem.text for problem in report.problems)
    edit(path, ignore=["lm_head", entry, "nowhere.0", "nowhere.1"])
    assert f"names {entry!r} (and 2 more), which" in next(problem.text for problem in verify(path).problems)


@pytest.mark.parametrize("entry", ["lm_head", "re:.*lm_head", "*embed*", "model.embed_tokens", "model.norm"])
def test_entries_that_name_something_are_none(tmp_path: Path, entry: str) -> None:
    path = write_quantized(tmp_path / "q", layout="compressed-tensors")
    edit(path, ignore=["lm_head", entry])
    assert found(verify(path), "idle-entry") == []


def test_an_unquantized_checkpoint_is_said_to_be_one(tmp_path: Path) -> None:
    report = verify(make("llama", tmp_path / "source"))
    assert (report.clean, found(report, "unquantized")) == (True, [("warning", "config.json")])
    assert report.last_line.endswith("(unquantized: none of them is)")


def test_many_alike_are_one_line(tmp_path: Path) -> None:
    """One line on the terminal, and every one of them in the file."""
    path = write_quantized(tmp_path / "q", "qwen3_moe", activations=True)
    lost = tuple(name for name in load(path) if name.endswith("_proj.input_scale") and ".experts." in name)
    edit(path, drop=lost)
    result = CliRunner().invoke(
        app, ["verify", str(path), "--json", str(tmp_path / "report.json")], env={"COLUMNS": "200"}
    )
    lines = [line for line in result.output.splitlines() if line.startswith("error [input-scale]")]
    assert len(lines) == 3  # gate, up and down
    assert all(line.endswith("(and 7 more like it)") for line in lines)
    problems = json.loads((tmp_path / "report.json").read_text())["problems"]
    assert sum(problem["rule"] == "input-scale" for problem in problems) == len(lost) == 24


def test_groups_keep_apart_what_differs_in_words() -> None:
    report = Report("p")
    for level, name, text in [
        ("warning", "a.1", "x 2"),
        ("error", "a.1", "x 2"),
        ("error", "a.7", "x 9"),
        ("error", "b", "x"),
    ]:
        report.problems.append(Problem("error" if level == "error" else "warning", "rule", name, text))
    assert [[problem.name for problem in group] for group in report.alike()] == [["a.1", "a.7"], ["b"], ["a.1"]]


def test_values_are_right_in_one_tensor_and_wrong_in_the_other(tmp_path: Path) -> None:
    """A report of many damaged weights names each of them."""
    path = write_quantized(tmp_path / "q")
    changes: Tensors = {}
    for name, values in load(path).items():
        if name.endswith("up_proj.weight"):
            codes = values.astype(np.uint8)
            codes[3] = 0
            changes[name] = codes
    edit(path, changes)
    report = verify(path, make("llama", tmp_path / "source"))
    assert found(report, "row") == [("error", f"model.layers.{layer}.mlp.up_proj") for layer in range(2)]
