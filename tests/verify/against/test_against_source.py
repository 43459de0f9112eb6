"""Damage in the files of a checkpoint, found against its source: in stacks, after casts, relayouts and decoding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from halfbyte.verify import Problem, Report, verify
from tests.clients.converted import convert, converted
from tests.quantized import edit, load
from tests.tiny_models import BF16, E4M3, Config, Tensors, make, write_checkpoint

MODELOPT, COMPRESSED = ("--layout", "modelopt"), ("--layout", "compressed-tensors")


def damaged(path: Path, name: str, place: tuple[int, ...], bit: int) -> Path:
    """Flip one bit of a tensor; the manifest is gone, so that only the source can tell."""
    (path / "halfbyte.json").unlink(missing_ok=True)
    array = load(path)[name]
    values = array.view(np.uint8).reshape(*array.shape[:-1], -1).copy()
    values[place] ^= 1 << bit
    edit(path, {name: values.view(array.dtype)})
    return path


def found(report: Report) -> Problem:
    """The one problem of a report."""
    (problem,) = [problem for problem in report.problems if problem.level == "error"]
    return problem


def test_a_code_of_a_stack(tmp_path: Path) -> None:
    """gate and up of Llama-4 are halves of one transposed tensor: the place is that of the expert's own matrix."""
    path = converted(tmp_path, "llama4", "--to", "nvfp4", *MODELOPT)
    assert verify(path, tmp_path / "llama4").clean
    stack = "language_model.model.layers.1.feed_forward.experts.gate_up_proj"
    problem = found(verify(damaged(path, stack, (2, 9, 70), 2), tmp_path / "llama4"))
    assert (problem.rule, problem.name) == ("block", stack.replace("gate_up_proj", "2.up_proj"))
    assert problem.text.startswith("row 6, columns 16 to 31: the code in column 18 ")


@pytest.mark.parametrize("bit", [0, 2])
def test_a_scale_after_a_cast_of_mxfp4(tmp_path: Path, bit: int) -> None:
    """The source is FP4 itself, so every code stays the nearest under a scale that is off by one step."""
    path, source = converted(tmp_path, "deepseek_v4", "--to", "nvfp4", *MODELOPT), tmp_path / "deepseek_v4"
    report = verify(path, source)
    assert report.clean, report.problems
    assert {error.relative for error in report.errors if "fp4" in error.kind} == {0.0}
    module = "layers.1.ffn.experts.2.w1"
    problem = found(verify(damaged(path, f"{module}.weight_scale", (5, 1), bit), source))
    assert (problem.rule, problem.name) == ("block", module)
    assert problem.text.startswith("row 5, columns 16 to 31: ")


def test_a_scale_after_a_relayout(tmp_path: Path) -> None:
    """NVFP4 to NVFP4: equal to the last bit but for the reciprocal of the tensor scale."""
    source = converted(tmp_path, "llama", "--to", "nvfp4", *MODELOPT)
    path = convert(source, tmp_path / "moved", "--to", "nvfp4", *COMPRESSED)
    report = verify(path, source)
    assert report.clean, report.problems
    assert max(error.relative for error in report.errors) < 1e-6
    module = "model.layers.1.mlp.up_proj"
    problem = found(verify(damaged(path, f"{module}.weight_scale", (5, 1), 0), source))
    assert (problem.rule, problem.name) == ("block", module)


@pytest.mark.parametrize("rows", [slice(3, 4), slice(70, 90)])
def test_rows_that_spoil_the_norm_of_a_whole_weight(tmp_path: Path, rows: slice) -> None:
    """The weight is reported, and so is each of its rows, wherever they lie."""
    values = np.random.default_rng(0).standard_normal((96, 64)).astype(BF16)
    name, config = "model.layers.0.mlp.down_proj", Config({"model_type": "llama"})
    source = write_checkpoint(tmp_path / "source", {f"{name}.weight": values}, config, shards=1)
    path = convert(source, tmp_path / "converted", "--to", "nvfp4", *MODELOPT)
    (path / "halfbyte.json").unlink()
    codes = load(path)[f"{name}.weight"].view(np.uint8).copy()
    codes[rows] ^= 0x88  # every sign
    edit(path, {f"{name}.weight": codes})
    whole, *placed = [problem for problem in verify(path, source, limit=0.15).problems if problem.level == "error"]
    assert (whole.rule, whole.name) == ("values", name)
    assert whole.text.endswith("more than 0.15")
    assert [problem.text.partition(":")[0] for problem in placed] == [f"row {row}" for row in range(96)[rows]]


def test_a_kept_tensor_is_placed(tmp_path: Path) -> None:
    path = converted(tmp_path, "llama", "--to", "nvfp4", *MODELOPT)
    problem = found(verify(damaged(path, "lm_head.weight", (3, 21), 0), tmp_path / "llama"))
    assert problem.text == "kept as BF16, but not as in the source: they differ from element [3, 10] on"


def test_a_weight_that_was_decoded(tmp_path: Path) -> None:
    """FP8 becomes BF16: one bit in one value is told."""
    path = converted(tmp_path, "deepseek_v3", "--to", "bf16")
    source = tmp_path / "deepseek_v3"
    assert verify(path, source).clean
    module = "model.layers.0.self_attn.o_proj"
    problem = found(verify(damaged(path, f"{module}.weight", (3, 20), 1), source))
    assert (problem.rule, problem.name) == ("values", module)
    assert "row 3, column 10 is " in problem.text


def test_a_decoding_with_another_rounding_is_no_damage(tmp_path: Path) -> None:
    """A writer that cut bits off instead of rounding."""
    path = converted(tmp_path, "deepseek_v3", "--to", "bf16")
    source = tmp_path / "deepseek_v3"
    (path / "halfbyte.json").unlink()
    name = "model.layers.0.self_attn.o_proj.weight"
    stored = load(source)
    values = stored[name].astype(np.float32)
    scales = np.repeat(np.repeat(stored[f"{name}_scale_inv"].astype(np.float32), 128, 0), 128, 1)
    product = values * scales[: values.shape[0], : values.shape[1]]
    edit(path, {name: (product.view(np.uint32) >> 16).astype(np.uint16).view(BF16)})
    assert not np.array_equal(load(path)[name], product.astype(BF16))
    assert verify(path, source).clean


def test_fp8_that_stays_fp8(tmp_path: Path) -> None:
    path = converted(tmp_path, "deepseek_v4", "--to", "nvfp4", *MODELOPT)
    name = next(name for name in load(path) if name.endswith("shared_experts.w1.weight"))
    problem = found(verify(damaged(path, name, (7, 3), 4), tmp_path / "deepseek_v4"))
    assert (problem.rule, problem.name) == ("values", name.removesuffix(".weight"))
    assert "row 7, column 3 is " in problem.text


@pytest.mark.parametrize("scales", [(), (128, 1), (1, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_fp8_that_was_rounded_from_bf16(tmp_path: Path, scales: tuple[int, ...], seed: int) -> None:
    """One tensor scale, one per row, one per block: clean, and every flipped bit above -0 is told."""
    generator = np.random.default_rng(seed)
    values = (generator.standard_normal((128, 128)) * np.exp(generator.standard_normal((128, 1)))).astype(BF16)
    name, config = "model.layers.0.mlp.down_proj", Config({"model_type": "llama"})
    source = write_checkpoint(tmp_path / "source", {f"{name}.weight": values}, config, shards=1)
    wide = values.astype(np.float32)
    amax = np.abs(wide).max(axis=1, keepdims=True) if scales == (128, 1) else np.abs(wide).max()
    scale = np.broadcast_to((amax / 448).astype(np.float32), scales)
    codes = (wide / scale).astype(E4M3)
    stored: Tensors = {f"{name}.weight": codes, f"{name}.weight_scale": np.ascontiguousarray(scale)}
    path = write_checkpoint(
        tmp_path / "fp8", stored, {**config, "quantization_config": {"quant_method": "fp8"}}, shards=1
    )
    assert verify(path, source).problems == []
    row, column = (int(place) for place in np.argwhere(np.abs(codes.astype(np.float32)) > 1)[1000 + seed])
    damaged(path, f"{name}.weight", (row, column), seed)
    assert f"row {row}, column {column} is " in found(verify(path, source)).text


def test_places_beyond_the_first_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.verify.values.CHUNK", 1024)
    path = converted(tmp_path, "llama", "--to", "nvfp4", *MODELOPT)
    module = "model.layers.1.mlp.down_proj"
    problem = found(verify(damaged(path, f"{module}.weight", (100, 0), 2), tmp_path / "llama"))
    assert problem.text.startswith("row 100, columns 0 to 15: ")


def test_another_rounding_is_said_once(tmp_path: Path) -> None:
    """Codes moved one step up where the value is not far from the middle: not to nearest, in every row."""
    path = converted(tmp_path, "llama", "--to", "nvfp4", *MODELOPT)
    (path / "halfbyte.json").unlink()
    changed: Tensors = {}
    for name, values in load(path).items():
        if name.endswith("mlp.down_proj.weight"):
            codes = values.astype(np.uint8)
            even = np.zeros_like(codes)
            even[:, ::5] = 1
            changed[name] = np.asarray(np.where((even == 1) & (codes & 7 < 6), codes + 1, codes), np.uint8)
    edit(path, changed)
    report = verify(path, make("llama", tmp_path / "source"))
    assert report.clean, report.problems
    (warning,) = report.problems
    assert (warning.rule, warning.name) == ("rounding", "model.layers.0.mlp.down_proj")
    assert "(and 1 more weight)" in warning.text
