"""A pytest plugin with three uses, each asked for by an environment variable that holds a path.

MUTATE_COPY: where the repository is; halfbyte must come from there, and from nowhere else.
MUTATE_RECORD: write there, as JSON, how long each test took and which functions it called, by file.
MUTATE_TESTS: read from there the names of tests, one per line, and run these alone, in that order.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = f"{ROOT}/src/"
called: set[CodeType] = set()
failed: set[str] = set()
records: dict[str, dict[str, object]] = {}


def note_call(frame: FrameType, event: str, argument: object) -> None:
    called.add(frame.f_code)


def functions(codes: set[CodeType]) -> list[str]:
    """`src/….py::Class.method` for every outermost function of ours among these."""
    ours = [code for code in codes if code.co_filename.startswith(SOURCE) and not code.co_qualname.startswith("<")]
    return sorted({f"src/{code.co_filename.removeprefix(SOURCE)}::{code.co_qualname.split('.<')[0]}" for code in ours})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if "MUTATE_RECORD" not in os.environ:
        return (yield)
    called.clear()
    begin = time.perf_counter()
    threading.settrace(note_call)
    sys.settrace(note_call)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        records[item.nodeid] = {"seconds": time.perf_counter() - begin, "functions": functions(set(called))}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    if path := os.environ.get("MUTATE_RECORD"):
        Path(path).write_text(json.dumps({name: entry for name, entry in records.items() if name not in failed}))


def pytest_collection_finish() -> None:
    package, copy = sys.modules.get("halfbyte"), os.environ.get("MUTATE_COPY")
    if package is not None and copy is not None and not str(package.__file__).startswith(f"{copy}/"):
        pytest.exit(f"halfbyte comes from {package.__file__}, not from the copy {copy}", returncode=3)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if path := os.environ.get("MUTATE_TESTS"):
        order = {name: place for place, name in enumerate(Path(path).read_text().splitlines())}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
