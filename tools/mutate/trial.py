"""Try mutations in a copy of the repository: the most specific tests first, the rest of what calls the function, then
the folder that mirrors its own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from tools.mutate.changes import Mutation
from tools.mutate.pytest_run import NO_TEST_CHOSEN, TOO_LONG, run_tests

ROOT = Path(__file__).resolve().parents[2]
FIRST_ROUND = 40
"""How many of the most specific tests run alone: they import few files, and most mutations fall to them."""
STRUCTURE = ("tests/test_dataclasses.py",)
"""Tests that read the source, and so may notice a change anywhere."""
PATIENCE = 10
"""A test may take this many times as long as when it was recorded, and a minute more for all."""


@dataclass(frozen=True)
class RecordedTest:
    """A test as it was recorded."""

    name: str
    seconds: float
    functions: frozenset[str]
    """`src/….py::Class.method` each."""


def copy_of_the_repository(place: Path) -> Path:
    """What git knows or would add: tests change nothing that someone is working on."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def record(copy: Path, tests: list[str]) -> list[RecordedTest]:
    """Run tests once, unchanged, and note what each calls. Those that fail while they are watched are left out."""
    path = copy / "calls.json"
    run_tests(copy, tests, 3600, {"MUTATE_RECORD": str(path)})
    print((copy / "output.txt").read_text()[-2000:], file=sys.stderr)
    return read_record(path.read_text())


def read_record(text: str) -> list[RecordedTest]:
    return [
        RecordedTest(name, entry["seconds"], frozenset(entry["functions"])) for name, entry in json.loads(text).items()
    ]


def mirror(path: Path) -> str:
    """The folder of tests for a file: tests/casting for src/halfbyte/casting/rows.py."""
    return f"tests/{path.as_posix().removeprefix('src/halfbyte/').split('/')[0]}"


def rounds(
    mutation: Mutation, tests: list[RecordedTest], seconds: float = float("inf")
) -> Iterator[list[RecordedTest]]:
    """All tests that may notice a mutation, in up to three groups; or as many as took that long when recorded.

    First those that call the function. A test that calls few functions is likely to be about this one, so these come
    first; a few of them are a group of their own. Last comes the rest of the folder that mirrors the file's: what
    another process calls, or a cache holds back, was not recorded. For a line outside functions, which nothing calls,
    it is the other way round: first the folder, then what calls any function of the file.
    """
    file = f"{mutation.path.as_posix()}::"
    folder = [test for test in tests if test.name.startswith((f"{mirror(mutation.path)}/", *STRUCTURE))]
    near = [test for test in tests if file + mutation.function in test.functions]
    if not mutation.function:
        near, folder = folder, [test for test in tests if any(name.startswith(file) for name in test.functions)]
    near.sort(key=lambda test: (len(test.functions), test.seconds))
    known = {test.name for test in near}
    folder = [test for test in folder if test.name not in known]
    for part in (near[:FIRST_ROUND], sorted(near[FIRST_ROUND:], key=_seconds), sorted(folder, key=_seconds)):
        within = [test for test, spent in zip(part, accumulate(map(_seconds, part)), strict=True) if spent <= seconds]
        seconds -= sum(map(_seconds, within))
        if within:
            yield within


def _seconds(test: RecordedTest) -> float:
    return test.seconds


def noticed_by(mutation: Mutation, copy: Path, tests: list[RecordedTest], seconds: float = float("inf")) -> str:
    """The test that fails, or the word for a run that takes far too long, with the mutation in place; "" if none does.

    The file is then put back.
    """
    path = copy / mutation.path
    original = path.read_text()
    try:
        path.write_text(mutation.text)
        for chosen in rounds(mutation, tests, seconds):
            if failure := _failure(copy, chosen):
                return failure
        return ""
    finally:
        path.write_text(original)


def _failure(copy: Path, tests: list[RecordedTest]) -> str:
    names = copy / "tests_to_run.txt"
    names.write_text("\n".join(test.name for test in tests))
    files = list(dict.fromkeys(test.name.split("::")[0] for test in tests))
    limit = 60 + PATIENCE * sum(test.seconds for test in tests)
    status = run_tests(copy, files, limit, {"MUTATE_TESTS": str(names)}, "-x")
    if status in (0, NO_TEST_CHOSEN):
        return ""
    if status == TOO_LONG:
        return "too long"
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", (copy / "output.txt").read_text(), re.MULTILINE)
    return named[1] if named else f"exit status {status}"
