"""verify: correct checkpoints have no problems, and each known kind of mistake is found and named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from halfbyte.cli import app
from halfbyte.verify import Report, verify
from tests.quantized import Layout, edit, load, write_quantized
from tests.tiny_models import E4M3, MODELS, Tensors, make

LAYER = "model.layers.1"
LAYOUTS: list[Layout] = ["modelopt", "compressed-tensors"]


def rules(report: Report, level: str = "error") -> set[str]:
    return {problem.rule for problem in report.problems if problem.level == level}


def named(report: Report, rule: str) -> list[str]:
    return sorted(problem.name for problem in report.problems if problem.rule == rule and problem.level == "error")


def said(report: Report, rule: str) -> str:
    return "\n".join(problem.text for problem in report.problems if problem.rule == rule)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make("llama", tmp_path / "source")


# --- clean ---


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_a_good_checkpoint_is_clean(tmp_path: Path, model: str, layout: Layout, activations: bool) -> None:
    source = make(model, tmp_path / "source")
    report = verify(write_quantized(tmp_path / "q", model, layout, activations=activations), source)
    assert report.clean, report.problems
    assert len(report.errors) == sum(report.kinds.values()) == {"llama": 14, "qwen3_moe": 32}[model]
    assert all(0.08 < error.relative < 0.11 for error in report.errors)
    assert report.equal == len(MODELS[model](0)[0]) - len(report.errors)


def test_mxfp4_is_clean(tmp_path: Path, source: Path) -> None:
    report = verify(write_quantized(tmp_path / "q", "llama", "compressed-tensors", "mxfp4"), source)
    assert report.clean
    assert report.kinds == {"mxfp4 (compressed-tensors)": 14}
    assert all(0.10 < error.relative < 0.13 for error in report.errors)


@pytest.mark.parametrize("model", MODELS)
def test_every_source_format_equals_itself(tmp_path: Path, model: str) -> None:
    """A checkpoint of any format agrees with itself, and every tensor is compared."""
    source = make(model, tmp_path / "source")
    report = verify(source, source)
    assert report.clean, report.problems
    assert {error.relative for error in report.errors} <= {0.0}


def test_errors_come_worst_first(tmp_path: Path, source: Path) -> None:
    report = verify(write_quantized(tmp_path / "q"), source)
    values = [error.relative for error in report.errors]
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1]


def test_error_is_that_of_a_plain_computation(tmp_path: Path, source: Path) -> None:
    """Compute the error of one weight by hand: table, scales, product, norm."""
    path = write_quantized(tmp_path / "q")
    report = verify(path, source)
    name = "model.layers.0.mlp.down_proj"
    tensors = load(path)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = tensors[f"{name}.weight"].astype(np.int64)
    both = np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)
    values = np.where(both & 8, -1.0, 1.0) * table[both & 7]
    scales = np.repeat(tensors[f"{name}.weight_scale"].astype(np.float64), 16, axis=1)
    values *= scales * tensors[f"{name}.weight_scale_2"].astype(np.float64)
    wanted = load(source)[f"{name}.weight"].astype(np.float64)
    expected = np.linalg.norm(values - wanted) / np.linalg.norm(wanted)
    (found,) = (error.relative for error in report.errors if error.name == name)
    assert found == pytest.approx(float(expected), rel=1e-6)


# --- scales that servers share ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_projection_with_a_scale_of_its_own(tmp_path: Path, layout: Layout) -> None:
    path = write_quantized(tmp_path / "q", layout=layout)
    name = f"{LAYER}.self_attn.k_proj." + ("weight_scale_2" if layout == "modelopt" else "weight_global_scale")
    edit(path, {name: np.nextafter(load(path)[name], np.float32(1e9))})
    report = verify(path)
    assert rules(report) == {"shared-scale"}
    assert named(report, "shared-scale") == [name]


def test_an_expert_with_a_scale_of_its_own(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q", "qwen3_moe")
    name = f"{LAYER}.mlp.experts.2.up_proj.weight_scale_2"
    edit(path, {name: load(path)[name].astype(np.float32) * np.float32(3)})
    assert named(verify(path), "shared-scale") == [name]
    against = verify(path, make("qwen3_moe", tmp_path / "source"))
    assert named(against, "values") == [f"{LAYER}.mlp.experts.2.up_proj"]
    assert "right when divided by" in said(against, "values")


def test_input_scales_are_shared_too(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q", activations=True)
    edit(path, {f"{LAYER}.self_attn.v_proj.input_scale": np.asarray(np.float32(0.5))})
    assert named(verify(path), "shared-scale") == [f"{LAYER}.self_attn.v_proj.input_scale"]


def test_half_a_fused_layer(tmp_path: Path, source: Path) -> None:
    path = write_quantized(tmp_path / "q")
    module = f"{LAYER}.self_attn.q_proj"
    plain = {f"{module}.weight": load(source)[f"{module}.weight"]}
    edit(path, plain, (f"{module}.weight_scale", f"{module}.weight_scale_2"))
    assert module in named(verify(path), "fused-mix")


# --- parts ---


@pytest.mark.parametrize(
    ("layout", "suffix"), [("modelopt", "input_scale"), ("compressed-tensors", "input_global_scale")]
)
def test_a_missing_input_scale(tmp_path: Path, layout: Layout, suffix: str) -> None:
    path = write_quantized(tmp_path / "q", layout=layout, activations=True)
    edit(path, drop=(f"{LAYER}.mlp.down_proj.{suffix}",))
    report = verify(path)
    assert named(report, "input-scale") == [f"{LAYER}.mlp.down_proj"]
    assert rules(report) == {"input-scale"}


def test_input_scales_that_nobody_reads_are_a_warning(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q")
    edit(path, {f"{LAYER}.mlp.down_proj.input_scale": np.asarray(np.float32(1))})
    report = verify(path)
    assert (report.clean, rules(report, "warning")) == (True, {"input-scale"})


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_2"])
def test_a_missing_part(tmp_path: Path, source: Path, part: str) -> None:
    path = write_quantized(tmp_path / "q")
    edit(path, drop=(f"{LAYER}.mlp.down_proj.{part}",))
    report = verify(path, source)
    assert named(report, "missing-part") == [f"{LAYER}.mlp.down_proj"]
    assert rules(report) == {"missing-part"}
    assert len(report.errors) == 13


def test_codes_that_are_missing_leave_strays(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q")
    edit(path, drop=(f"{LAYER}.mlp.down_proj.weight",))
    strays = [f"{LAYER}.mlp.down_proj.weight_scale", f"{LAYER}.mlp.down_proj.weight_scale_2"]
    assert named(verify(path), "stray-tensor") == strays


def test_a_dtype_no_reader_accepts(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q")
    name = f"{LAYER}.mlp.down_proj.weight_scale_2"
    edit(path, {name: load(path)[name].astype(np.float16)})
    assert named(verify(path), "dtype") == [name]


def test_a_shape_that_does_not_fit(tmp_path: Path, source: Path) -> None:
    path = write_quantized(tmp_path / "q")
    name = f"{LAYER}.mlp.down_proj.weight_scale"
    edit(path, {name: load(path)[name][:, :-1]})
    report = verify(path, source)
    assert named(report, "shape") == [f"{LAYER}.mlp.down_proj"]
    assert rules(report) == {"shape"}
    assert len(report.errors) == 13


# --- values ---


def test_a_reciprocal_scale(tmp_path: Path, source: Path) -> None:
    path = write_quantized(tmp_path / "q")
    modules = [f"{LAYER}.mlp.down_proj"]
    edit(
        path,
        {f"{name}.weight_scale_2": 1 / load(path)[f"{name}.weight_scale_2"].astype(np.float32) for name in modules},
    )
    report = verify(path, source)
    assert named(report, "values") == modules
    assert "reciprocal" in said(report, "values")
    assert rules(verify(path), "warning") == {"scalar"}


def test_swapped_nibbles(tmp_path: Path, source: Path) -> None:
    path = write_quantized(tmp_path / "q")
    name = f"{LAYER}.mlp.down_proj.weight"
    codes = load(path)[name].astype(np.uint8)
    edit(path, {name: (codes << 4) | (codes >> 4)})
    report = verify(path, source)
    assert verify(path).clean
    assert named(report, "values") == [f"{LAYER}.mlp.down_proj"]
    assert "nibbles of each byte are swapped" in said(report, "values")


def test_a_weight_of_another_layer(tmp_path: Path, source: Path) -> None:
    path = write_quantized(tmp_path / "q")
    tensors = load(path)
    at = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)]
    edit(path, {at[0] + end: tensors[at[1] + end] for end in ("", "_scale", "_scale_2")})
    assert "it holds the values of model.layers.1.mlp.down_proj" in said(verify(path, source), "values")


def test_swapped_gate_and_up(tmp_path: Path) -> None:
    source = make("qwen3_moe", tmp_path / "source")
    path = write_quantized(tmp_path / "q", "qwen3_moe")
    tensors, expert = load(path), f"{LAYER}.mlp.experts.3"
    swapped = {
        name.replace("gate_proj", "?").replace("up_proj", "gate_proj").replace("?", "up_proj"): values
        for name, values in tensors.items()
        if name.startswith(f"{expert}.") and "down_proj" not in name
    }
    edit(path, swapped)
    report = verify(path, source)
    assert named(report, "values") == [f"{expert}.gate_proj", f"{expert}.up_proj"]
    assert "holds the values of up_proj: the two are swapped" in said(report, "values")


def test_a_kept_tensor_that_changed(tmp_path: Path, source: Path) -> None:
    path = write_quantized(tmp_path / "q")
    edit(path, {"model.norm.weight": load(path)["model.norm.weight"][::-1]})
    assert named(verify(path, source), "kept") == ["model.norm.weight"]


def test_lost_and_invented_tensors(tmp_path: Path, source: Path) -> None:
    path = write_quantized(tmp_path / "q")
    extra: Tensors = {"model.extra.weight": np.zeros((4, 4), np.float32), "model.other": np.zeros(4, np.float32)}
    edit(path, extra, ("model.norm.weight", "lm_head.weight"))
    report = verify(path, source)
    assert named(report, "lost") == ["lm_head", "model.norm.weight"]
    assert named(report, "no-source") == ["model.extra", "model.other"]


# --- block scales ---


@pytest.mark.parametrize(("byte", "text"), [(0x7F, "NaN"), (0xFF, "NaN"), (0x00, "are 0"), (0xB8, "negative")])
def test_bad_scale_bytes(tmp_path: Path, byte: int, text: str) -> None:
    path = write_quantized(tmp_path / "q")
    name = f"{LAYER}.mlp.down_proj.weight_scale"
    scales = load(path)[name].view(np.uint8).copy()
    scales[3, 2] = byte
    edit(path, {name: scales.view(E4M3)})
    report = verify(path)
    assert named(report, "block-scale") == [name]
    assert text in said(report, "block-scale")
    assert verify(path, headers_only=True).clean


def test_a_zero_scale_over_zero_codes_is_a_warning(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q")
    module = f"{LAYER}.mlp.down_proj"
    scales, codes = load(path)[f"{module}.weight_scale"].view(np.uint8).copy(), load(path)[f"{module}.weight"].copy()
    scales[3, 2], codes[3, 16:24] = 0, 0x80
    edit(path, {f"{module}.weight_scale": scales.view(E4M3), f"{module}.weight": codes})
    report = verify(path)
    assert (report.clean, rules(report, "warning")) == (True, {"block-scale"})


def test_a_nan_exponent(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q", "llama", "compressed-tensors", "mxfp4")
    name = f"{LAYER}.mlp.down_proj.weight_scale"
    scales = load(path)[name].copy()
    scales[0, 0] = 255
    edit(path, {name: scales})
    assert named(verify(path), "block-scale") == [name]


# --- configs ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_exclude_list_without_the_router(tmp_path: Path, layout: Layout) -> None:
    path = write_quantized(tmp_path / "q", "qwen3_moe", layout)
    (path / "hf_quant_config.json").unlink(missing_ok=True)
    edit(path, ignore=["lm_head", "model.layers.0.mlp.gate"])
    report = verify(path)
    assert set(named(report, "not-excluded")) == {"model.layers.1.mlp.gate"}
    assert rules(report) == {"not-excluded"}
    assert "a router" in said(report, "not-excluded")


@pytest.mark.parametrize("pattern", ["model.layers.1*", "model.layers.1", "model.layers.1.mlp", "*.mlp.gate*"])
def test_an_exclude_list_that_swallows_a_quantized_module(tmp_path: Path, pattern: str) -> None:
    path = write_quantized(tmp_path / "q")
    (path / "hf_quant_config.json").unlink()
    edit(path, ignore=["lm_head", pattern])
    report = verify(path)
    assert rules(report) == {"swallowed"}
    assert any(name.startswith("model.layers.1.mlp") for name in named(report, "swallowed"))
    assert f"by {pattern!r}" in said(report, "swallowed")


def test_config_files_that_disagree(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q")
    edit(path, quant_algo="NVFP4")
    report = verify(path)
    assert named(report, "config") == ["hf_quant_config.json"]
    assert len(named(report, "input-scale")) == 14


def test_no_config_at_all(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q", layout="compressed-tensors")
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    assert named(verify(path), "config") == ["config.json"]


def test_a_tied_head_must_not_be_quantized(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q")
    tensors = load(path)
    parts = {
        name.replace("model.layers.0.mlp.down_proj", "lm_head"): v
        for name, v in tensors.items()
        if ".0.mlp.down" in name
    }
    edit(path, parts)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert named(verify(path), "tied") == ["lm_head"]


# --- the command ---


def test_exit_codes_and_json(tmp_path: Path, source: Path) -> None:
    path = write_quantized(tmp_path / "q")
    clean = run("verify", path, "--against", source, "--json", tmp_path / "report.json")
    assert clean.exit_code == 0, clean.output
    assert clean.output.splitlines()[-1].endswith("0 problems, 0 warnings in 49 tensors (14 nvfp4 (modelopt))")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["clean"], report["equal"], len(report["errors"])) == (True, 7, 14)
    edit(path, drop=("model.norm.weight",))
    wrong = run("verify", path, "--against", source)
    assert wrong.exit_code == 1
    assert "error [lost] model.norm.weight: in the source (BF16 [128]), but not in the checkpoint" in wrong.output
    (path / "model-00002-of-00003.safetensors").unlink()
    unreadable = run("verify", path)
    assert unreadable.exit_code == 2
    assert "fetch the missing shard" in unreadable.output


def test_a_stricter_limit(tmp_path: Path, source: Path) -> None:
    path = write_quantized(tmp_path / "q")
    assert run("verify", path, "--against", source, "--max-error", "0.05").exit_code == 1
