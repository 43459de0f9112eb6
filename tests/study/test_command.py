"""`halfbyte study`: its output, its files, and the errors it reports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from halfbyte.cli import app
from halfbyte.study.device import on_device
from tests.samples import gaussian


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "220"})


def test_one_scenario_with_every_output(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"study.{kind}" for kind in ("json", "csv", "html")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", path)]
    result = run("study", "--scenario", "constant", "--scenario", "conv", *options)
    assert result.exit_code == 0, result.output
    assert "exact: requantize, verbatim, hybrid, optimal" in result.output
    assert "2 scenarios. Exact: requantize 1, midpoint 2, verbatim 2, hybrid 2, modelopt 2, optimal 2." in result.output
    assert "2^-11" in result.output, "few scenarios are shown algorithm by algorithm"
    data = json.loads(files["json"].read_text())
    assert [row["scenario"] for row in data["rows"]] == ["constant", "conv"]
    assert len(files["csv"].read_text().splitlines()) == 1 + 2 * 8
    assert files["html"].read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("options", [[], ["--methods"]])
def test_a_reader_that_goes_away_costs_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """`halfbyte study --json FILE | head -1`: the work is done when the first table is printed."""

    def gone(*arguments: object, **options: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("halfbyte.cli.study.print_table", gone)
    run("study", "--scenario", "constant", *options, "--json", tmp_path / "study.json")
    assert json.loads((tmp_path / "study.json").read_text())["rows"]


def test_methods_on_weights(tmp_path: Path) -> None:
    save_file({"layer.weight": gaussian(64, 64)}, tmp_path / "w.safetensors")
    save_file({"layer.weight": gaussian(128, 64, seed=1)}, tmp_path / "x.safetensors")
    files = {kind: tmp_path / f"methods.{kind}" for kind in ("json", "csv", "html")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", path)]
    weights = ["--weights", tmp_path / "w.safetensors", "--statistics", tmp_path / "x.safetensors"]
    result = run("study", "--methods", *weights, *options)
    assert result.exit_code == 0, result.output
    assert "relative RMS error of the layer's output" in result.output
    row = json.loads(files["json"].read_text())["rows"][0]
    assert row["tensor"] == "layer.weight"
    assert {"amax", "4over6 MSE 256", "optimal", "hessian", "ideal scale", "Shannon bound"} <= set(
        row["relative_error"]
    )
    assert f"{row['relative_error']['optimal']:.2%}" in result.output
    assert "layer.weight,64x64,64,hessian" in files["csv"].read_text()
    assert "<svg" in files["html"].read_text()


def test_methods_on_a_scenario() -> None:
    result = run("study", "--methods", "--scenario", "conv", "--sample", "4096")
    assert result.exit_code == 0, result.output
    assert "Shannon bound" in result.output
    assert "4.42%" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scenario", "nothing"], "unknown scenario 'nothing'"),
        (["--device", "tpu"], "unknown device 'tpu'; known: cpu, cuda"),
        (["--weights", "x.safetensors"], "--weights and --statistics belong to --methods"),
        (["--methods", "--statistics", "x.safetensors"], "--statistics needs --weights"),
        (["--methods", "--weights", "nowhere"], "neither a safetensors file nor a directory"),
    ],
)
def test_refusals_are_exit_code_2(arguments: list[str], message: str) -> None:
    result = run("study", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_file_that_cannot_be_written_is_exit_code_2(tmp_path: Path) -> None:
    result = run("study", "--scenario", "conv", "--json", tmp_path / "nowhere" / "study.json")
    assert result.exit_code == 2
    assert "cannot be written" in result.output


def test_files_without_weights_are_exit_code_2(tmp_path: Path) -> None:
    save_file({"ids": np.arange(16)}, tmp_path / "ids.safetensors")
    result = run("study", "--methods", "--weights", tmp_path)
    assert result.exit_code == 2
    assert "holds no float matrix" in result.output


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("study", "--device", "cuda", "--scenario", "conv")
    assert result.exit_code == 2
    assert "PyTorch sees no CUDA device here; use device cpu" in result.output
    x = gaussian(2, 2)
    assert on_device("cpu")(x) is x
