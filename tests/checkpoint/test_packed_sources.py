"""Packed integers, Quark's MXFP4 and the rarer grids of FP8: converted and verified from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from typer.testing import CliRunner, Result

import halfbyte as hb
from halfbyte.cli import app
from halfbyte.testing import assert_same_bits
from tests.checkpoint.test_sources import as_mxfp4, fp8, mxfp4
from tests.checkpoint.toy import random, read_checkpoint, write_checkpoint
from tests.tiny_models import make

Array = npt.NDArray[Any]
DOWN = "model.layers.0.mlp.down_proj"
INT4_CONFIG = {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}


def compared(folder: Path, source: Path) -> list[dict[str, Any]]:
    """The weights of a clean comparison."""
    result = halfbyte("verify", folder, "--against", source, "--json", folder.parent / "report.json")
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads((folder.parent / "report.json").read_text())["errors"]
    return rows


def halfbyte(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def int4(seed: int, group: int = 32) -> tuple[dict[str, Array], Array]:
    """A weight of 48 × 128 as compressed-tensors packs it, and its values."""
    codes = np.random.default_rng(seed).integers(0, 16, (48, 128), dtype=np.int64)
    packed = (codes.reshape(48, 16, 8) << (4 * np.arange(8))).sum(axis=-1).astype(np.uint32).view(np.int32)
    scale = np.abs(random(seed + 1, 48, 128 // group)) + ml_dtypes.bfloat16(0.01)
    values = (codes - 8).astype(np.float32) * np.repeat(scale.astype(np.float32), group, axis=1)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": np.array([48, 128])}, values


def write_int4(folder: Path, group: int = 32, extra: dict[str, Array] | None = None) -> tuple[Path, Array]:
    parts, values = int4(0, group)
    tensors = {f"{DOWN}.{name}": x for name, x in {**parts, **(extra or {})}.items()}
    return write_checkpoint(folder, tensors, INT4_CONFIG, shards=3), values


@pytest.mark.parametrize("group", [32, 64, 128])
def test_verify_decodes_an_int4_source(tmp_path: Path, group: int) -> None:
    source, values = write_int4(tmp_path / "s", group)
    assert halfbyte("convert", source, tmp_path / "d", "--quiet").exit_code == 0
    (row,) = compared(tmp_path / "d", source)
    q = hb.quantize(values, "nvfp4", "modelopt", "optimal")
    wanted = np.linalg.norm(np.asarray(hb.dequantize(q), np.float64) - values) / np.linalg.norm(values.astype(float))
    assert row["name"] == DOWN
    assert row["relative"] == pytest.approx(float(wanted), rel=1e-6)


def test_verify_finds_what_an_int4_source_does_not_say(tmp_path: Path) -> None:
    source, values = write_int4(tmp_path / "s")
    other = write_checkpoint(tmp_path / "bf16", {f"{DOWN}.weight": values[::-1].astype(ml_dtypes.bfloat16)})
    assert halfbyte("convert", other, tmp_path / "d", "--quiet").exit_code == 0
    result = halfbyte("verify", tmp_path / "d", "--against", source)
    assert result.exit_code == 1
    assert "relative error" in result.output


@pytest.mark.parametrize("extra", ["weight_zero_point", "weight_g_idx"])
def test_verify_says_which_int4_it_cannot_read(tmp_path: Path, extra: str) -> None:
    source, values = write_int4(tmp_path / "s", extra={extra: np.zeros((48, 4), np.int32)})
    other = write_checkpoint(tmp_path / "bf16", {f"{DOWN}.weight": values.astype(ml_dtypes.bfloat16)})
    result = halfbyte("verify", other, "--against", source)
    assert result.exit_code == 1
    assert "INT4 with zero points or permuted groups is not read" in " ".join(result.output.split())


def write_quark(folder: Path) -> tuple[Path, Array, Array]:
    codes, scales = mxfp4(3, 48, 128)
    tensors = {f"{DOWN}.weight": codes, f"{DOWN}.weight_scale": scales, "lm_head.weight": random(1, 32, 128)}
    config = {"quantization_config": {"quant_method": "quark", "exclude": ["lm_head"]}}
    return write_checkpoint(folder, tensors, config, shards=3), codes, scales


def test_quark_mxfp4_is_cast_to_nvfp4(tmp_path: Path) -> None:
    source, codes, scales = write_quark(tmp_path / "s")
    result = halfbyte("convert", source, tmp_path / "d", "--quiet")
    assert result.exit_code == 0, result.output
    q, report = hb.cast(as_mxfp4(codes, scales), "nvfp4")
    assert report.lossless
    made = read_checkpoint(tmp_path / "d")
    assert_same_bits(made[f"{DOWN}.weight"], q.codes)
    assert_same_bits(made[f"{DOWN}.weight_scale"], q.scales)
    assert_same_bits(made["lm_head.weight"], read_checkpoint(source)["lm_head.weight"])
    assert [row["relative"] for row in compared(tmp_path / "d", source)] == [0.0]


def test_quark_mxfp4_to_other_forms(tmp_path: Path) -> None:
    source, codes, scales = write_quark(tmp_path / "s")
    assert halfbyte("convert", source, tmp_path / "mx", "--to", "mxfp4", "--quiet").exit_code == 0
    plan = halfbyte("convert", source, tmp_path / "mx", "--to", "mxfp4", "--dry-run").output
    assert "1 weights are mxfp4 already: their codes stay" in plan
    moved = read_checkpoint(tmp_path / "mx")
    assert_same_bits(moved[f"{DOWN}.weight_packed"], codes)
    assert_same_bits(moved[f"{DOWN}.weight_scale"], scales)
    assert halfbyte("convert", source, tmp_path / "plain", "--to", "bf16", "--quiet").exit_code == 0
    plain = read_checkpoint(tmp_path / "plain")[f"{DOWN}.weight"]
    assert_same_bits(plain, hb.dequantize(as_mxfp4(codes, scales), "bfloat16"))


def test_one_row_of_model_optimizers_blocks(tmp_path: Path) -> None:
    """[1, 1, 3, 1] is three blocks along the width, although three would divide the rows too."""
    weight, scale = fp8(0, 96, 384), np.array([0.5, 1, 4], np.float32)
    tensors = {f"{DOWN}.weight": weight, f"{DOWN}.weight_scale": scale.reshape(1, 1, 3, 1)}
    source = write_checkpoint(tmp_path / "s", tensors, {"quantization_config": {"quant_method": "fp8"}})
    assert halfbyte("convert", source, tmp_path / "d", "--to", "bf16", "--quiet").exit_code == 0
    wanted = (weight.astype(np.float32) * np.repeat(scale, 128)).astype(ml_dtypes.bfloat16)
    assert_same_bits(read_checkpoint(tmp_path / "d")[f"{DOWN}.weight"], wanted)
    assert [row["relative"] for row in compared(tmp_path / "d", source)] == [0.0]


@pytest.mark.parametrize("shape", [(1, 272), (4, 5), (13, 17), (2, 1, 3, 1), (200, 1), (2, 272)])
def test_verify_reads_every_fp8_grid_that_convert_reads(tmp_path: Path, shape: tuple[int, ...]) -> None:
    scale = np.abs(random(4, *shape, dtype=np.float32)) + np.float32(0.1)
    tensors = {f"{DOWN}.weight": fp8(0, 200, 272), f"{DOWN}.weight_scale": scale}
    source = write_checkpoint(tmp_path / "s", tensors, {"quantization_config": {"quant_method": "fp8"}})
    result = halfbyte("convert", source, tmp_path / "d", "--to", "bf16", "--quiet")
    assert result.exit_code == 0, result.output
    (row,) = compared(tmp_path / "d", source)
    assert 0 < row["relative"] < 0.004


@pytest.mark.parametrize("model", ["gpt_oss", "llama4"])
def test_stacked_nvfp4_is_read_back(tmp_path: Path, model: str) -> None:
    """Model-Optimizer's stacks, transposed on disk: taken apart, moved and decoded as those of another layout."""
    source = make(model, tmp_path / "source")
    ways = {"stack": ["--layout", "modelopt"], "apart": ["--layout", "compressed-tensors"]}
    for way, options in ways.items():
        assert halfbyte("convert", source, tmp_path / way, "--quiet", *options).exit_code == 0
    stacked = read_checkpoint(tmp_path / "stack")
    assert any(name.endswith("experts.gate_up_proj_weight_scale") for name in stacked)
    result = halfbyte("convert", tmp_path / "stack", tmp_path / "moved", "--quiet", *ways["apart"])
    assert result.exit_code == 0, result.output
    compared(tmp_path / "moved", source)
    assert max(row["relative"] for row in compared(tmp_path / "moved", tmp_path / "stack")) < 1e-6
    again = halfbyte("convert", tmp_path / "stack", tmp_path / "same", "--quiet", *ways["stack"])
    assert again.exit_code == 0, again.output
    same = read_checkpoint(tmp_path / "same")
    assert set(same) == set(stacked)
    for name, x in stacked.items():
        assert_same_bits(same[name], x)
    assert halfbyte("convert", tmp_path / "stack", tmp_path / "plain", "--quiet", "--to", "bf16").exit_code == 0
    assert max(row["relative"] for row in compared(tmp_path / "plain", tmp_path / "stack")) < 0.004
