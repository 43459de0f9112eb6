"""What the commands print: help and tables at 80 columns, wide and stable output in a pipe, the progress of files."""

from __future__ import annotations

import contextlib
import json
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
from halfbyte.contracts import CONTRACTS
from halfbyte.contracts.spec import formulas
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
    options = [
        name
        for option in getattr(get_command(app), "commands")[command].params  # noqa: B009
        if not getattr(option, "hidden", False)
        for name in option.opts
    ]
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


def test_a_table_that_is_too_wide_for_the_terminal_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**TERMINAL, "COLUMNS": "24"}.items():
        monkeypatch.setenv(name, value)
    table = Table("name", "first")
    table.add_column("second", no_wrap=True)
    table.add_row("a-rather-long-name", "0.123456789", "0.987654321")
    print_table(table, ("first",))
    output = plain(capsys.readouterr().out)
    assert "…" not in output
    columns = zip(*(re.split("[│]", line)[1:-1] for line in output.splitlines() if line.startswith("│")), strict=True)
    assert ["".join(cell.strip() for cell in column) for column in columns] == ["a-rather-long-name", "0.987654321"]


@pytest.mark.parametrize("columns", [80, None])
def test_contracts_can_be_told_apart(columns: int | None) -> None:
    listed = run("contracts", columns=columns)
    rows = [row for row in cells(listed) if row[0]]
    assert [row[0] for row in rows][1:] == list(CONTRACTS)
    assert "…" not in listed
    for name, make in CONTRACTS.items():
        shown = "".join(row[1] for row in cells(run("contracts", name, columns=columns))).replace(" ", "")
        wanted = {formula for rule in make().rules.values() for formula in formulas(rule).values()}
        assert all(formula.replace(" ", "") in shown for formula in wanted), name


@pytest.mark.parametrize("columns", [80, None])
def test_the_demo_is_whole(columns: int | None) -> None:
    """At 80 columns each row is one line, with the names of contracts and methods; in a pipe no column is missing."""
    from examples import demo

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(StringIO()) as text:
        for name, value in ({} if columns is None else {**TERMINAL, "COLUMNS": str(columns)}).items():
            patch.setenv(name, value)
        demo.main()
    output = plain(text.getvalue())
    assert "…" not in output
    names = [tuple(row[:3]) for row in cells(output)[-len(demo.quantizers()) :]]
    assert names == demo.quantizers()
    assert all(len(line) <= (columns or 1000) for line in output.splitlines() if line[:1] in "│┃┏└┡")
    assert sum(line.startswith("│") for line in output.splitlines()) == len(names), "one line each"
    assert ("left out here" in output) == (columns is not None)


def test_studies_fit_the_terminal() -> None:
    output = run("study", "--scenario", "subnormal-heavy", columns=80)
    assert "…" not in output
    assert "subnormal-heavy" in {row[0] for row in cells(output)}
    assert "left out here" in output
    assert "least error" in run("study", "--scenario", "subnormal-heavy", columns=160)


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


# --- the same as JSON ---


def test_every_command_that_prints_a_table_writes_json(tmp_path: Path, source: Path) -> None:
    vectors = Path(__file__).parents[2] / "conformance" / "vectors.zip"
    file = tmp_path / "out.json"
    commands: dict[str, tuple[object, ...]] = {
        "contracts": (),
        "convert": (source, tmp_path / "d", "--device", "cpu"),
        "verify": (tmp_path / "d", "--against", source),
        "inspect": (tmp_path / "d",),
        "study": ("--scenario", "constant"),
        "conform": (vectors,),
    }
    elsewhere = {"calibrate", "eval"}  # they run a model: test_calibrate.py
    assert sorted({*commands, *elsewhere, "finish", "warm"}) == COMMANDS  # the last two print no table
    for command, arguments in commands.items():
        run(command, *arguments, "--json", file)
        assert json.loads(file.read_text()), command
        file.unlink()


@pytest.mark.parametrize("command", ["contracts", "conform", "study"])
def test_json_that_cannot_be_written(tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.cli.conform.load_vectors", lambda path: [])
    given = {"conform": ["vectors.zip"], "study": ["--scenario", "constant"]}
    arguments = [command, *map(str, given.get(command, [])), "--json", str(tmp_path / "none" / "out.json")]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2
    assert re.search(rf"halfbyte {command}: .*none/out.json.*: ", found.output)


def test_contracts_as_json(tmp_path: Path) -> None:
    run("contracts", "--json", tmp_path / "all.json")
    run("contracts", "torchao", "--json", tmp_path / "one.json")
    found, one = (json.loads((tmp_path / name).read_text()) for name in ("all.json", "one.json"))
    assert list(found) == list(CONTRACTS)
    assert one == {"torchao": found["torchao"]}
    assert one["torchao"]["options"]["scaling_mode"] == "floor"
    assert one["torchao"]["formulas"]["nvfp4"]["pre_scale"] == "(v/6)/p"
    assert found["gguf"]["formats"] == ["mxfp4", "nvfp4 (decode)"]
    assert not (tmp_path / "none.json").exists()
    run("contracts", "nothing", "--json", tmp_path / "none.json")
    assert not (tmp_path / "none.json").exists()


def test_the_plan_as_json(tmp_path: Path, source: Path) -> None:
    run("convert", source, tmp_path / "d", "--dry-run", "--json", tmp_path / "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["to"], plan["layout"]) == ("nvfp4", "modelopt")
    assert not (tmp_path / "d").exists()
