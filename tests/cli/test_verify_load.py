"""`halfbyte verify --load`: a client is asked, and its answer counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfbyte.cli import app
from halfbyte.load_check import LoadReport
from tests.quantized import write_quantized

command = sys.modules["halfbyte.cli.verify"]  # halfbyte.cli.verify is also the name of the function


@pytest.mark.parametrize("missing", [(), ("lm_head.weight",)])
def test_the_answer_of_a_client_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    report = LoadReport("transformers", "5.0", tensors=3, missing=missing)
    monkeypatch.setattr(command, "check_load", lambda path, client, trust_remote_code: report)
    monkeypatch.setattr(command, "check_client", lambda name: None)  # installed or not
    path = write_quantized(tmp_path / "q", "llama")
    arguments = ["verify", str(path), "--load", "transformers", "--json", str(tmp_path / "report.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == (1 if missing else 0), result.output
    assert report.sentences()[0] in result.output
    assert json.loads((tmp_path / "report.json").read_text())["load"]["missing"] == list(missing)


def test_an_unknown_client_is_exit_code_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["verify", str(write_quantized(tmp_path / "q", "llama")), "--load", "ollama"])
    assert (result.exit_code, "unknown client 'ollama'; known: transformers, vllm" in result.output) == (2, True)
