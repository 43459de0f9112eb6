"""Generated pages are up to date, the README's figures agree with a run, and the demo runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from docs import generate
from examples import demo
from halfbyte.cli import app
from halfbyte.conform import load_vectors, run_vectors

ROOT = Path(__file__).parent.parent


def test_contract_tables_are_current() -> None:
    page = generate.PAGE.read_text()
    assert generate.render(page) == page, "run `make docs`"


def test_a_changed_table_is_noticed() -> None:
    page = generate.PAGE.read_text().replace("| vllm | encode factor |", "| vllm | multiplier |")
    assert generate.render(page) != page


def test_readme_counts_are_what_a_run_gives() -> None:
    vectors = load_vectors(ROOT / "conformance" / "vectors.zip")
    report = run_vectors(vectors)
    rows = re.findall(r"^\| (\S+) ?.*? \| (\d+) \| (\d+) \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    names = {
        "Model-Optimizer": "modelopt",
        "compressed-tensors": "compressed_tensors",
        "TransformerEngine": "transformer_engine",
    }
    shown = {names.get(name, name.lower()): (int(cases), int(agree)) for name, cases, agree in rows}
    counts = {
        peer: (sum(result.peer == peer for result in report.results), report.count("agree", peer))
        for peer in report.peers
    }
    assert shown == counts


SHOWN = {
    "transformer_engine, amax": ("nvfp4", "transformer_engine", "amax"),
    "transformer_engine, four_six (MAE, 448)": ("nvfp4", "transformer_engine", "four_six:mae:448"),
    "modelopt, four_six (MSE, 256)": ("nvfp4", "modelopt", "four_six:mse:256"),
    "modelopt, sweep of all scales": ("nvfp4", "modelopt", "sweep"),
    "transformer_engine, optimal": ("nvfp4", "transformer_engine", "optimal"),
    "MXFP4, ocp": ("mxfp4", "ocp", "amax"),
    "MXFP8, ocp": ("mxfp8", "ocp", "amax"),
}


def test_readme_errors_are_those_of_the_demo() -> None:
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| [\d.]+ \| (\S.*?) \| ([\d.]+) % \|$", text, flags=re.MULTILINE)
    tensors = {"gaussian weight": demo.make_tensors()["gaussian weight"]}
    measured = {name: demo.measure(tensors, *call)[1][0] for name, call in SHOWN.items()}
    assert dict(rows) == {name: f"{100 * error:.2f}" for name, error in measured.items()}


def test_readme_map_names_real_places() -> None:
    block = re.search(r"## Map\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert block is not None
    for line in block[1].splitlines():
        name = line.split()[0]
        base = ROOT / "src" / "halfbyte" if line.startswith("  ") else ROOT
        assert (base / name).exists(), name


def test_demo_runs_and_every_peer_agrees() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")], capture_output=True, text=True, check=True, timeout=120
    )
    assert "743 of 743 golden cases agree bit for bit" in result.stdout
    assert "differ" not in result.stdout


def test_commands_shown_in_the_readme_are_make_targets() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    shown = set(re.findall(r"make ([\w-]+)", (ROOT / "README.md").read_text()))
    assert shown >= {"demo", "test", "check"}
    assert shown <= targets


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "conformance" / "README.md",
]
COMMANDS = typer.main.get_command(app)
INVENTED = {"x.py", "invented.py"}
"""Files that recipes tell to make."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_in_documents_have_the_options_shown(page: Path) -> None:
    known = COMMANDS.commands  # type: ignore[attr-defined]
    shown = re.findall(rf"(?:^|[`$] ?)halfbyte ({'|'.join(known)})\b([^`\n#]*)", page.read_text(), flags=re.MULTILINE)
    for name, rest in shown:
        options = {option for parameter in known[name].params for option in parameter.opts} | {"--help"}
        assert set(re.findall(r"(?<!\w)--?[a-z][\w-]*", rest)) <= options, (name, rest)


def test_an_option_that_is_shown_is_seen() -> None:
    """The test above reads most of the commands."""
    texts = "\n".join(page.read_text() for page in PAGES)
    assert len(re.findall(r"halfbyte (?:convert|verify|calibrate|eval)\b[^`\n#]* --[a-z]", texts)) > 40


def test_files_named_in_documents_and_comments_exist() -> None:
    """A path with a folder in it; the folder may be any part of the tree."""
    roots = [ROOT / name for name in ("benchmarks", "conformance", "docs", "examples", "src", "tests", "tools")]
    paths = [path for root in roots for path in root.rglob("*.*") if "__pycache__" not in path.parts]
    there = {"/".join(path.parts[at:]) for path in paths for at in range(len(path.parts) - 1)}
    code = [
        path for path in paths if path.suffix in (".py", ".inc", ".h", ".cuh", ".cu", ".cpp") and "src" in path.parts
    ]
    named = {
        (path, name)
        for path in [*PAGES, *code]
        for name in re.findall(r"(?<![\w./{*-])((?:[\w-]+/)+[\w-]+\.(?:py|inc|cuh?|cpp))\b", path.read_text())
        if name.rsplit("/", 1)[1] not in INVENTED
    }
    assert len(named) > 60
    assert [f"{path.name}: {name}" for path, name in sorted(named) if name not in there] == []
