"""The files around the code agree with each other: version, floors, targets, workflow, and the rooms of the C++."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

import halfbyte
from tests import oldest

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "src" / "halfbyte" / "backends" / "cpu" / "native"
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, flags=re.MULTILINE))


def test_the_changelog_has_this_version() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(halfbyte.__version__)} \(\d{{4}}-\d\d-\d\d\)", headings[1])


def floors() -> dict[str, str]:
    """The oldest allowed version of each dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return dict(dependency.split(">=") for dependency in project["dependencies"])


def pins(name: str) -> dict[str, str]:
    """Versions of a requirements file."""
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_the_oldest_environment_has_the_floors() -> None:
    pinned = pins("requirements-oldest.txt")
    for name, floor in floors().items():
        padded = [*floor.split("."), "0", "0"][:3]
        assert pinned[name] == ".".join(padded), name


@pytest.mark.parametrize("name", ["", "-dev", "-wheel", "-docs"])
def test_everything_is_pinned(name: str) -> None:
    for line in (ROOT / f"requirements{name}.txt").read_text().splitlines():
        assert re.fullmatch(r"#.*|-r \S+|[\w.-]+==[\w.]+", line), line


def test_the_oldest_environment_has_no_absent_package() -> None:
    assert {name.lower() for name in pins("requirements-oldest.txt")}.isdisjoint(oldest.ABSENT)


# --- targets and the workflow ---


def test_help_names_every_target() -> None:
    apart = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    shown = subprocess.run(["make", "help"], cwd=ROOT, env=apart, capture_output=True, text=True, check=True).stdout
    assert {line.split()[0] for line in shown.splitlines()} == TARGETS


def test_phony_targets_are_the_targets() -> None:
    phony = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", MAKEFILE, flags=re.MULTILINE)
    assert phony is not None
    assert set(phony[1].replace("\\\n", " ").split()) == TARGETS


def test_the_workflow_runs_our_targets_with_known_actions() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    run = [step["run"] for step in steps if "run" in step]
    made = {command.removeprefix("make ") for command in run if command.startswith("make ")}
    assert made <= TARGETS
    assert made >= {"check", "test-docs", "docs-site", "test-oldest", "wheel", "conform", "demo"}
    assert {command for command in run if not command.startswith("make ")} == {"git diff --exit-code docs"}
    assert {step["uses"] for step in steps if "uses" in step} == {"actions/checkout@v4", "actions/setup-python@v5"}
    systems = {system for job in workflow["jobs"].values() for system in systems_of(job)}
    assert systems == {"ubuntu-24.04", "ubuntu-24.04-arm"}


def systems_of(job: dict[str, object]) -> set[str]:
    """The machines that a job runs on, with those of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})  # type: ignore[attr-defined]
    named = [*matrix.get("os", []), *(entry["os"] for entry in matrix.get("include", []))]
    return set(named) if job["runs-on"] == "${{ matrix.os }}" else {str(job["runs-on"])}


# --- the rule of tests/oldest.py ---


@pytest.mark.parametrize("name", ["codec/test_element.py", "test_ledger.py", "checkpoint/toy.py", "test_project.py"])
def test_files_without_torch_run_with_the_oldest_dependencies(name: str) -> None:
    assert not oldest.needs_absent(ROOT / "tests" / name)


def test_a_file_that_needs_torch_is_left_out() -> None:
    assert oldest.needs_absent(ROOT / "tests" / "test_quantize.py")
    assert oldest.pytest_ignore_collect(ROOT / "tests" / "test_quantize.py")
    assert oldest.pytest_ignore_collect(ROOT / "tests" / "backends" / "gpu" / "test_arithmetic.py")


def test_a_page_whose_examples_need_torch_is_left_out() -> None:
    assert oldest.pytest_ignore_collect(ROOT / "docs" / "tutorial.md")
    assert not oldest.pytest_ignore_collect(ROOT / "docs" / "methods.md")


def test_an_import_by_way_of_another_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text("from tests.backends.gpu.card.checks import anything")
    assert oldest.needs_absent(path)
    path.with_name("test_y.py").write_text("if TYPE_CHECKING:\n    import torch\n")
    assert not oldest.needs_absent(path.with_name("test_y.py"))


@pytest.mark.parametrize("name", ["calibration/smooth.py", "scale/calibrate.py"])
def test_a_module_that_another_one_leads_to_torch_is_left_out(name: str, tmp_path: Path) -> None:
    """Its examples cannot be collected. A test that halfbyte leads to torch is not left out: that must fail."""
    assert not any(map(oldest.is_absent, oldest.top_imports(ROOT / "src" / "halfbyte" / name)))
    assert oldest.needs_absent(ROOT / "src" / "halfbyte" / name)
    assert not oldest.needs_absent(ROOT / "src" / "halfbyte" / "cli" / "__init__.py")
    path = tmp_path / "test_x.py"
    path.write_text(f"import halfbyte.{name.removesuffix('.py').replace('/', '.')}")
    assert not oldest.needs_absent(path)


@pytest.mark.parametrize(("importer", "outcome"), [("tests/x.py", "skipped"), ("src/halfbyte/x.py", "failed")])
def test_an_absent_package_excuses_a_test_but_not_the_product(
    request: pytest.FixtureRequest, importer: str, outcome: str
) -> None:
    source = compile("raise ModuleNotFoundError('absent', name='torch')", str(ROOT / importer), "exec")
    call: pytest.CallInfo[None] = pytest.CallInfo.from_call(lambda: exec(source), "call")
    hook = oldest.pytest_runtest_makereport(request.node, call)
    next(hook)
    with pytest.raises(StopIteration) as stopped:
        hook.send(pytest.TestReport.from_item_and_call(request.node, call))
    assert stopped.value.value.outcome == outcome


@pytest.mark.parametrize(("importer", "outcome"), [("<doctest x>", "skipped"), ("src/halfbyte/x.py", "failed")])
def test_an_example_is_excused_like_a_test(request: pytest.FixtureRequest, importer: str, outcome: str) -> None:
    """What fails within an example comes wrapped: by doctest's runner, not by its own module's import."""
    source = compile("raise ModuleNotFoundError('absent', name='torch')", str(ROOT / importer), "exec")

    def example() -> None:
        try:
            exec(source)
        except ModuleNotFoundError as error:
            raised = (type(error), error, error.__traceback__)
            raise doctest.UnexpectedException(EXAMPLE, EXAMPLE.examples[0], raised) from None  # type: ignore[arg-type]

    call: pytest.CallInfo[None] = pytest.CallInfo.from_call(example, "call")
    hook = oldest.pytest_runtest_makereport(request.node, call)
    next(hook)
    with pytest.raises(StopIteration) as stopped:
        hook.send(pytest.TestReport.from_item_and_call(request.node, call))
    assert stopped.value.value.outcome == outcome


EXAMPLE = doctest.DocTestParser().get_doctest(">>> import torch", {}, "x", None, None)


# --- rooms of the C++ ---


def test_native_files_are_small_and_folders_are_not_crowded() -> None:
    for folder in (NATIVE, *(path for path in NATIVE.rglob("*") if path.is_dir())):
        files = [path for path in folder.iterdir() if path.is_file()]
        assert len(files) <= 20, folder
        for path in files:
            assert len(path.read_text().splitlines()) <= 400, path
