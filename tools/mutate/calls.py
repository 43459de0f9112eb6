"""A pytest plugin. What it does is asked for by environment variables that hold a path.

MUTATE_COPY: where the repository is; halfbyte must come from there, and from nowhere else.
MUTATE_FAILED: write there the name of the first test or file that fails.
MUTATE_TESTS: read from there the names of tests, one per line, and run these alone, in that order.
MUTATE_SERVE: collect, and then run what is asked for in forks (`tools.mutate.forks`).
MUTATE_RECORD: write there, as JSON, how long each test computed and which functions it called, by file; and which
functions were called while tests were collected, as the import of the package calls some.
"""

from __future__ import annotations

import cProfile
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = f"{ROOT}/src/"
called: set[CodeType] = set()
imported: list[str] = []
failed: set[str] = set()
records: dict[str, dict[str, object]] = {}


profile = cProfile.Profile(builtins=False)
"""Of the main thread: several times as fast as a trace function, which other threads get."""


def note_call(frame: FrameType, event: str, argument: object) -> None:
    called.add(frame.f_code)


def watch(on: bool) -> None:
    if on:
        called.clear()
        profile.clear()
        threading.settrace(note_call)
        profile.enable()
    else:
        profile.disable()
        threading.settrace(None)
        called.update(entry.code for entry in profile.getstats() if isinstance(entry.code, CodeType))


def functions(codes: set[CodeType]) -> list[str]:
    """`src/….py::Class.method` for every outermost function of ours among these."""
    ours = [code for code in codes if code.co_filename.startswith(SOURCE) and not code.co_qualname.startswith("<")]
    return sorted({f"src/{code.co_filename.removeprefix(SOURCE)}::{code.co_qualname.split('.<')[0]}" for code in ours})


if "MUTATE_RECORD" in os.environ:
    watch(True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if "MUTATE_RECORD" not in os.environ:
        return (yield)
    begin = _work()
    watch(True)
    try:
        return (yield)
    finally:
        watch(False)
        records[item.nodeid] = {"seconds": _work() - begin, "functions": functions(set(called))}


def _work() -> float:
    """Seconds that this process and those that it started have computed: the same on a busy machine."""
    return sum(os.times()[:4])


def _failed(name: str) -> None:
    path = os.environ.get("MUTATE_FAILED")
    if path is not None and not failed:
        Path(path).write_text(name)
    failed.add(name)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _failed(report.nodeid)


def pytest_sessionfinish() -> None:
    if path := os.environ.get("MUTATE_RECORD"):
        tests = {name: entry for name, entry in records.items() if name not in failed}
        Path(path).write_text(json.dumps({"imported": imported, "tests": tests}))


def pytest_collection_finish() -> None:
    if "MUTATE_RECORD" in os.environ:
        watch(False)
        imported[:] = functions(set(called))
    package, copy = sys.modules.get("halfbyte"), os.environ.get("MUTATE_COPY")
    if package is not None and copy is not None and not str(package.__file__).startswith(f"{copy}/"):
        pytest.exit(f"halfbyte comes from {package.__file__}, not from the copy {copy}", returncode=3)


def choose(items: list[pytest.Item], names: list[str]) -> None:
    """Leave these tests alone, in that order."""
    order = {name: place for place, name in enumerate(names)}
    items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if path := os.environ.get("MUTATE_TESTS"):
        choose(items, Path(path).read_text().splitlines())


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if "MUTATE_SERVE" not in os.environ:
        return None
    from tools.mutate.forks import serve

    asked = serve()
    if asked is None:
        return True
    choose(session.items, asked)
    session.config.option.maxfail = 1
    return None
