"""What the commands print: help and tables at 80 columns, wide and stable output in a pipe, the progress of files."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from typer.main import get_command
from typer.testing import CliRunner

from halfbyte.checkpoint import Event
from halfbyte.cli import app
from halfbyte.cli.convert_output import Amount, Screen, Speed
from halfbyte.cli.tables import print_table
from tests.checkpoint.toy import llama, write_checkpoint

TERMINAL = {"TTY_COMPATIBLE": "1", "FORCE_COLOR": "1", "TERM": "xterm", "NO_COLOR": "1"}
"""Makes rich take any output for a terminal; before its version 14, FORCE_COLOR does."""
LONG = "model.language_model.transformer.decoder"


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def run(*arguments: object, columns: int | None = None) -> str:
    """The output of a command: in a terminal of that many columns, or in a pipe."""
    environment = {} if columns is None else {**TERMINAL, "COLUMNS": str(columns)}
    return plain(CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment).output)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors = {name.replace("model.layers", f"{LONG}.layers"): x for name, x in llama().items()}
    return write_checkpoint(tmp_path / "s", tensors, shards=2)


COMMANDS = sorted(getattr(get_command(app), "commands"))  # noqa: B009


@pytest.mark.parametrize("columns", [80, None])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_option_whole(command: str, columns: int | None) -> None:
    output = run(command, "--help", columns=columns)
    options = [name for option in getattr(get_command(app), "commands")[command].params for name in option.opts]  # noqa: B009
    for name in options:
        assert not name.startswith("-") or re.search(rf"(?m)(^| ){name}\b", output), name
    assert max(map(len, output.splitlines())) <= 80
    assert "…" not in output.replace("PATTERN…", "").replace("NAME…", "")


def test_the_list_of_commands_is_whole() -> None:
    output = run("--help", columns=80)
    assert all(re.search(rf"(?m)^  {command} .*[^.]\.$", output) for command in COMMANDS), output


def cells(output: str) -> list[list[str]]:
    """The rows of all tables in an output, cells that go on in the next line joined."""
    rows: list[list[str]] = []
    for line in output.splitlines():
        found = [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]
        if line.startswith("│") and rows and found and not found[1]:
            rows[-1] = [before + more for before, more in zip(rows[-1], found, strict=True)]
        elif line.startswith(("│", "┃")):
            rows.append(found)
    return rows


@pytest.mark.parametrize("columns", [80, None])
def test_names_in_tables_are_whole(tmp_path: Path, source: Path, columns: int | None) -> None:
    pattern = "decoder.layers.1.self_attn.o_proj"
    plan = run("convert", source, tmp_path / "d", "--device", "cpu", "--keep", pattern, columns=columns)
    assert ["embedding", "1", "model.embed_tokens"] in cells(plan)
    assert any(row[2] == f"{LONG}.layers.1.self_attn.o_proj" for row in cells(plan))
    verified = run("verify", tmp_path / "d", "--against", source, columns=columns)
    names = {row[0] for row in cells(verified)}
    assert {f"{LONG}.layers.{i}.mlp.gate_proj" for i in (0, 1)} <= names
    inspected = run("inspect", tmp_path / "d", columns=columns)
    assert f"{LONG}.layers.{{0-1}}.self_attn.k_proj.weight_scale" in {row[0] for row in cells(inspected)}
    for output in (plan, verified, inspected):
        assert "…" not in output
        assert columns is None or all(len(line) <= 80 for line in output.splitlines() if line[:1] in "│┃┏└┡")
        assert columns is not None or not any(row[0] == "" for row in cells(output))


def test_a_pipe_is_wide_whatever_the_terminal(source: Path) -> None:
    wide = CliRunner().invoke(app, ["inspect", str(source)], env={"COLUMNS": "30"}).output
    assert wide == run("inspect", source)
    assert max(map(len, wide.splitlines())) > 80


def test_columns_are_left_out_before_anything_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**TERMINAL, "COLUMNS": "40"}.items():
        monkeypatch.setenv(name, value)
    table = Table("name", "first", "second", "third")
    table.add_row("a-name", "0.123456789", "0.987654321", "some words here")
    print_table(table, ("second", "first"))
    output = plain(capsys.readouterr().out)
    assert "second" not in output.splitlines()[1]
    assert "0.123456789" in output
    assert "left out here, because all needs a width of 46: second" in output


def test_studies_fit_the_terminal() -> None:
    output = run("study", "--scenario", "subnormal-heavy", columns=80)
    assert "…" not in output
    assert "subnormal-heavy" in {row[0] for row in cells(output)}
    assert "left out here" in output
    assert "winner" in run("study", "--scenario", "subnormal-heavy", columns=160)


def test_the_bar_counts_files_while_they_get_their_names() -> None:
    screen, text = Screen(), StringIO()
    for event in (Event("begin", 0, 5_000_000), Event("progress", 2_500_000, 5_000_000), Event("close", 3, 7)):
        screen.event(event)
    converting, closing = screen._progress.tasks
    with Progress(Amount(), Speed(), console=Console(file=text, width=80)) as progress:
        progress.console.print(Amount().render(converting), Amount().render(closing), sep=" | ")
        progress.console.print(Speed().render(closing))
    assert text.getvalue().splitlines()[0] == "2.5/5.0 MB | 3/7 files"
    assert Speed().render(closing).plain == ""
