"""Pages for outsiders: snippets run, half of them with torch; pictures and notebook are current; the site is whole."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import halfbyte as hb
from docs import check_site, docstrings, draw, notebook

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def snippets(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


# --- snippets ---


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_snippet_is_an_example_that_pytest_runs(page: Path) -> None:
    for snippet in snippets(page):
        assert snippet.startswith(">>> "), snippet
        assert snippet.endswith("\n\n"), "an empty line ends the output, so that the fence is not part of it"


def test_at_least_half_of_the_snippets_import_torch() -> None:
    found = [snippet for page in PAGES for snippet in snippets(page)]
    with_torch = [snippet for snippet in found if re.search(r"^>>> import .*\btorch\b", snippet, flags=re.MULTILINE)]
    assert 2 * len(with_torch) >= len(found), f"{len(with_torch)} of {len(found)}"


def alone(snippet: str, name: str) -> list[str]:
    """What fails when a snippet runs by itself."""
    failures: list[str] = []
    test = doctest.DocTestParser().get_doctest(snippet, {}, name, name, 0)
    doctest.DocTestRunner(optionflags=OPTIONS, verbose=False).run(test, out=failures.append)
    return failures


@pytest.mark.parametrize("name", ["tutorial.md", "glossary.md", "servers.md", "activations.md"])
def test_each_step_of_a_page_for_outsiders_stands_by_itself(name: str) -> None:
    pytest.importorskip("torch")
    steps = snippets(ROOT / "docs" / name)
    assert steps
    for at, snippet in enumerate(steps):
        assert alone(snippet, f"{name}, step {at + 1}") == []


def test_a_step_that_needs_an_earlier_one_is_noticed() -> None:
    assert alone(">>> x + 1\n2\n", "x")


# --- figures ---

MEASURED = re.compile(r"\d ?(?:%|GB/s|TB/s|µs|ms\b|ns\b)|\d×(?! ?\d)")
SOURCE = re.compile(
    r"make [a-z-]+|python3? -m [\w.]+|benchmarks/|halfbyte (?:study|convert)|tests/|\bseed\b|default_rng|^>>> ",
    flags=re.MULTILINE,
)


def sections(page: Path) -> list[str]:
    """The parts of a page between its headings; code is not a heading."""
    return re.split(r"^(?=#{1,3} )", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sections_with_measured_figures_name_a_seed_or_a_command(page: Path) -> None:
    for section in sections(page):
        figure = MEASURED.search(section)
        assert figure is None or SOURCE.search(section), f"{section.splitlines()[0]}: {figure and figure[0]}"


# --- the notebook and the pictures ---


def test_the_notebook_prints_what_it_holds() -> None:
    pytest.importorskip("torch")
    text = notebook.NOTEBOOK.read_text(encoding="utf-8")
    assert notebook.as_text(notebook.executed(json.loads(text))) == text, "run `python docs/notebook.py`"


def test_a_changed_output_of_the_notebook_is_noticed() -> None:
    cell = {"cell_type": "code", "source": ["x = 2\n", "print(x + 1)"], "outputs": [], "execution_count": 1}
    ran: dict[str, Any] = notebook.executed({"cells": [{"cell_type": "markdown", "source": []}, cell]})
    assert ran["cells"][1]["outputs"][0]["text"] == ["3\n"]


def test_a_cell_that_fails_is_an_error() -> None:
    with pytest.raises(ZeroDivisionError):
        notebook.executed({"cells": [{"cell_type": "code", "source": ["1 / 0"]}]})


@pytest.mark.parametrize("name", draw.PICTURES)
def test_pictures_are_what_the_script_draws(name: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == draw.PICTURES[name](), "run `make docs`"


@pytest.mark.parametrize("name", ["block.svg", "two_levels.svg", "convert.svg"])
def test_pictures_have_a_background_of_their_own(name: str) -> None:
    first = re.search(r"<(rect|text|path|line)\b[^>]*>", (ROOT / "docs" / name).read_text(encoding="utf-8"))
    assert first is not None
    assert first[1] == "rect"


# --- the site ---


def pages_of(nav: object) -> set[str]:
    """The files that a table of contents names."""
    if isinstance(nav, str):
        return {nav}
    inside = nav if isinstance(nav, list) else list(nav.values()) if isinstance(nav, dict) else []
    return {page for entry in inside for page in pages_of(entry)}


def test_the_site_has_every_page() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert pages_of(config["nav"]) == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_the_site_loads_nothing_from_elsewhere() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert config["theme"]["font"] is False
    assert "offline" in config["plugins"]
    for name in [*config["extra"]["polyfills"], *config["extra_css"]]:
        assert (ROOT / "docs" / name).exists()
    assert "iframe-worker" in config["extra"]["polyfills"][0], "without it, the plugin takes one from a CDN"


def test_the_api_page_has_every_public_name() -> None:
    shown = set(re.findall(r"^::: \S+\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE))
    tables = {"FORMATS", "METHODS", "contracts"}
    assert set(hb.__all__) - tables <= shown
    assert set(hb.contracts.CONTRACTS) <= shown


GOOD = """
<head><link href="a.css" rel="stylesheet"></head>
<body id="top"><a href="#top">x</a><a href="b.html#c">y</a></body>
"""


def site(folder: Path, index: str = GOOD, style: str = "") -> Path:
    (folder / "index.html").write_text(index)
    (folder / "b.html").write_text('<h2 id="c">c</h2><a href="https://example.org/page">elsewhere</a>')
    (folder / "a.css").write_text(style)
    return folder


def test_a_whole_site_passes(tmp_path: Path) -> None:
    assert check_site.main(site(tmp_path)) == 0


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("b.html#c", "b.html#d", "index.html: b.html#d: no such anchor"),
        ("b.html#c", "d.html", "index.html: d.html: no such file"),
        ("#top", "#bottom", "index.html: #bottom: no such anchor"),
        ("a.css", "//cdn.example/a.css", "index.html: loads //cdn.example/a.css"),
        ("</body>", '<script src="https://cdn.example/x.js"></script>', "index.html: loads https://cdn.example/x.js"),
        ("</head>", "<style>@import 'https://f.example/f';</style>", "index.html: loads https://f.example/f"),
        ("</body>", '<img src="x.png">', "index.html: x.png: no such file"),
    ],
)
def test_a_broken_link_or_something_from_elsewhere_fails(tmp_path: Path, old: str, new: str, problem: str) -> None:
    folder = site(tmp_path, GOOD.replace(old, new))
    assert list(check_site.problems(folder)) == [problem]
    assert check_site.main(folder) == 1


def test_a_font_from_elsewhere_fails(tmp_path: Path) -> None:
    folder = site(tmp_path, style="@font-face { src: url(https://fonts.example/f.woff2) }")
    assert list(check_site.problems(folder)) == ["a.css: loads https://fonts.example/f.woff2"]


def test_choices_of_a_parameter_are_a_list_within() -> None:
    first, second = '    "a": first,\n    in two lines', '    "b", "b:1" or `hb.B(1)`: second\n    `hb.c`: third'
    text = f'x: one of these\n{first}\n{second}\ny: "d" here'
    assert docstrings.as_markdown(text, ["x", "y"]).lstrip().splitlines() == [
        "- `x`: one of these",
        "",
        '    - "a": first,',
        "    in two lines",
        '    - "b", "b:1" or `hb.B(1)`: second',
        "    - `hb.c`: third",
        '- `y`: "d" here',
    ]


def test_docstrings_become_lists_and_code() -> None:
    text = "Do it.\n\nx: the\n    tensor\ny, z: others\nAfter; see docs/cast.md.\n\n>>> f(1)\n2"
    assert docstrings.as_markdown(text, ["x", "y", "z"]).split("\n\n") == [
        "Do it.",
        "\n- `x`: the\n    tensor\n- `y, z`: others",
        "After; see [cast](cast.md).",
        "\n```pycon\n>>> f(1)\n2\n```",
    ]
