"""`-` as the file of --json, --csv and --html: standard output, with nothing else on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.main import get_command

from halfbyte.cli import app
from halfbyte.cli.app import out

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_file({"w": np.ones((2, 2), np.float32)}, tmp_path / "x.safetensors")
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command: exit code, standard output, standard error. typer's runner mixes the two in old versions."""

    def ran(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            get_command(app).main(list(arguments), "halfbyte")
        code = end.value.code
        assert isinstance(code, int)
        return code, *capsys.readouterr()

    return ran


@pytest.mark.parametrize(
    ("arguments", "key", "besides"),
    [
        (("inspect", "x.safetensors"), "tensors", "1 tensors in 1 file"),
        (("inspect", "x.safetensors", "--match", "no"), "tensors", "no tensor's name contains"),
        (("contracts",), "ocp", "compressed-tensors 0.20.0"),
        (("contracts", "gguf"), "gguf", "methods of mxfp4"),
        (("study", "--scenario", "constant"), "rows", "constant"),
    ],
)
def test_the_json_is_alone_there(arguments: tuple[str, ...], key: str, besides: str, run: Run) -> None:
    given = Path("out.json")
    assert run(*arguments, "--json", str(given))[0] == 0
    code, stdout, stderr = run(*arguments, "--json", "-")
    assert (code, stdout) == (0, given.read_text())
    assert key in json.loads(stdout)
    assert besides in stderr
    assert not Path("-").exists()


def test_conform_and_its_last_line(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr("halfbyte.cli.conform.load_vectors", lambda path: [])
    _, stdout, stderr = run("conform", "vectors.zip", "--json", "-")
    assert json.loads(stdout)
    assert "0 of 0 cases" in stderr


def test_csv_too_but_one_file_alone(run: Run) -> None:
    assert run("study", "--scenario", "constant", "--csv", "-")[1].startswith("scenario,")
    assert not Path("-").exists()
    code, stdout, stderr = run("study", "--scenario", "constant", "--csv", "-", "--json", "-")
    assert (code, stdout) == (2, "")
    assert "only one file can be -" in stderr
    assert "ocp" in run("contracts")[1]  # what was refused leaves nothing behind


def test_a_log_and_a_plan_do_not_mix(run: Run) -> None:
    code, stdout, _ = run("convert", ".", "d", "--json", "-", "--json-log")
    assert code == 2
    assert "both write to standard output" in stdout


def test_afterwards_standard_output_is_back(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    run("contracts", "--json", "-")
    out().print("here")
    assert capsys.readouterr().out == "here\n"
