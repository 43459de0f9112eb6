"""The tests that need neither torch nor a peer, for an environment that holds the oldest allowed dependencies.

    python -m tests.oldest [options of pytest]

`make test-oldest` makes the environment (requirements-oldest.txt) and runs this. What is left out follows from the
imports, not from a list of names:

- a test file that imports an ABSENT package at its top, itself or by way of another test file;
- a module of halfbyte, whose docstrings are tests too, that imports one at its top or by way of another module;
- a page of documentation whose examples import one;
- a test that imports one while it runs. An import by halfbyte itself is a failure: nothing here gives it a tensor;
- the folders WITH_TORCH, which are about kernels for GPUs and about other projects as clients.

Any other failure counts, and so does a run with fewer passed tests than LEAST.
"""

from __future__ import annotations

import ast
import doctest
import functools
import importlib.util
import re
import sys
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

ABSENT = {
    "compressed_tensors",
    "gguf",
    "jax",
    "mlx",
    "modelopt",
    "qwantize",
    "ray",
    "safetensors.torch",
    "tokenizers",
    "torch",
    "torchao",
    "transformer_engine",
    "transformers",
    "triton",
}
"""What the environment does not have; `safetensors.torch` is there but needs torch."""

WITH_TORCH = ("tests/backends/gpu", "tests/clients", "src/halfbyte/backends/gpu")

OURS = ("tests", "benchmarks", "conformance", "examples", "docs")
"""Packages of this repository whose imports count as those of the test that uses them."""

LEAST = 7000
"""Passed tests. Far fewer would mean that the rule leaves out what it should not."""


def is_absent(module: str) -> bool:
    """Whether a module is one of the absent packages or lies in one."""
    return any(module == name or module.startswith(f"{name}.") for name in ABSENT)


@functools.cache
def top_imports(path: Path) -> frozenset[str]:
    """Every module that a file imports when it is loaded; what only type checkers see is not among them."""
    return frozenset(_top_imports(path))


def _top_imports(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def file_of(module: str) -> Path | None:
    """The file of a module of this repository."""
    path = (SOURCE if module.startswith("halfbyte.") else ROOT).joinpath(*module.split("."))
    return next((found for found in (path.with_suffix(".py"), path / "__init__.py") if found.exists()), None)


@functools.cache
def needs_absent(path: Path) -> bool:
    """Whether loading a file loads an absent package.

    What halfbyte's modules import counts for themselves alone: a test that they lead to an absent package must fail.
    """
    followed = (*OURS, "halfbyte") if path.is_relative_to(SOURCE) else OURS
    seen, waiting = {path}, [path]
    while waiting:
        modules = top_imports(waiting.pop())
        if any(map(is_absent, modules)):
            return True
        files = {file_of(module) for module in modules if module.split(".")[0] in followed}
        new = {file for file in files if file is not None} - seen
        seen |= new
        waiting += new
    return False


def shows_absent(page: Path) -> bool:
    """Whether an example of a page imports an absent package."""
    imported = re.findall(r"^>>> (?:import|from) (.*)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return any(is_absent(word) for line in imported for word in re.findall(r"[\w.]+", line))


# --- pytest loads this module as a plugin: the hooks ---


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if any(collection_path.is_relative_to(ROOT / folder) for folder in WITH_TORCH):
        return True
    if collection_path.suffix == ".md":
        return True if shows_absent(collection_path) else None
    return True if collection_path.suffix == ".py" and needs_absent(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    error, importer = call.excinfo.value if call.excinfo else None, item.path
    if isinstance(error, doctest.UnexpectedException):  # of an example: by itself, or by the module that it calls
        _, error, trace = error.exc_info
        importer = Path(traceback.extract_tb(trace)[-1].filename)
    elif call.excinfo:
        importer = Path(str(call.excinfo.traceback[-1].path))
    absent = isinstance(error, ModuleNotFoundError) and is_absent(error.name or "")
    if absent and not importer.is_relative_to(ROOT / "src"):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, str(error))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed = len(terminalreporter.stats.get("passed", []))
    left_out = len(terminalreporter.stats.get("skipped", []))
    terminalreporter.write_line(f"oldest: {passed} tests passed, {left_out} left out")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    chosen = session.config.option.keyword or session.config.args_source == pytest.Config.ArgsSource.ARGS
    if reporter is None or chosen or exitstatus != 0:  # a worker, or somebody's choice of tests
        return
    if len(reporter.stats.get("passed", [])) < LEAST:
        reporter.write_line(f"oldest: fewer than {LEAST} tests passed", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def main() -> None:
    there = sorted(name for name in ABSENT if "." not in name and importlib.util.find_spec(name))
    if there:
        raise SystemExit(f"oldest: {', '.join(there)} must not be installed here; use `make test-oldest`")
    sys.exit(pytest.main(["-p", "tests.oldest", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
