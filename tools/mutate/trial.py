"""Try mutations in a copy of the repository: the most specific tests first, the rest of what calls the function, then
the folder that mirrors its own.

A change of a function that nobody calls before the tests is tried in a fork that has all tests collected
(`tools.mutate.forks`); any other in a process that imports the package anew.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.mutate.changes import Mutation
from tools.mutate.forks import NOT_REPLACEABLE, Server, start_server
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


@dataclass(frozen=True)
class Record:
    """What is known of tests."""

    tests: list[RecordedTest]
    imported: frozenset[str] = frozenset()
    """Functions that are called when the package and the tests are imported."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Test file → SHA-256 of its text when it was recorded."""

    def as_json(self) -> str:
        tests = {test.name: {"seconds": test.seconds, "functions": sorted(test.functions)} for test in self.tests}
        return json.dumps({"imported": sorted(self.imported), "files": dict(self.files), "tests": tests})


def read_record(text: str) -> Record:
    known = json.loads(text)
    tests = [
        RecordedTest(name, entry["seconds"], frozenset(entry["functions"])) for name, entry in known["tests"].items()
    ]
    return Record(tests, frozenset(known["imported"]), known.get("files", {}))


def record(copy: Path, tests: list[str], known: Record | None = None) -> Record:
    """Run the files of tests that are new or changed, and note what each test calls; the rest as it is known.

    Those that fail while they are watched are left out.
    """
    known = known or Record([])
    files = {
        path.relative_to(copy).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for name in tests
        for path in ([copy / name] if name.endswith(".py") else sorted((copy / name).rglob("test_*.py")))
    }
    fresh = [name for name, digest in files.items() if known.files.get(name) != digest]
    kept = [test for test in known.tests if _file(test) not in fresh and (copy / _file(test)).exists()]
    new = Record([])
    if fresh:
        path = copy / "calls.json"
        run_tests(copy, fresh, 3600, {"MUTATE_RECORD": str(path)})
        print((copy / "output.txt").read_text()[-2000:], file=sys.stderr)
        new = read_record(path.read_text())
    return Record(kept + new.tests, known.imported | new.imported, {**known.files, **files})


def _file(test: RecordedTest) -> str:
    return test.name.split("::")[0]


def mirror(path: Path) -> str:
    """The folder of tests for a file: tests/casting for src/halfbyte/casting/rows.py."""
    return f"tests/{path.as_posix().removeprefix('src/halfbyte/').split('/')[0]}"


def rounds(
    mutation: Mutation, tests: list[RecordedTest], seconds: float = float("inf")
) -> Iterator[list[RecordedTest]]:
    """All tests that may notice a mutation, in up to three groups; or those of them that fit into so many seconds.

    First those that call the function. A test that calls few functions is likely to be about this one, so these come
    first; a few of them are a group of their own. Last comes the rest of the folder that mirrors the file's: what
    another process calls, or a cache holds back, was not recorded. For a line outside functions, which nothing calls,
    it is the other way round: first the folder, and of that what calls any function of the file before all else; then
    the others that call one.
    """
    file = f"{mutation.path.as_posix()}::"

    def of_file(function: str) -> bool:
        return function.startswith(file)

    folder = [test for test in tests if test.name.startswith((f"{mirror(mutation.path)}/", *STRUCTURE))]
    near = [test for test in tests if file + mutation.function in test.functions]
    if not mutation.function:
        near, folder = folder, [test for test in tests if any(map(of_file, test.functions))]
    near.sort(key=lambda test: (not any(map(of_file, test.functions)), len(test.functions), test.seconds))
    known = {test.name for test in near}
    folder = [test for test in folder if test.name not in known]
    for part in (near[:FIRST_ROUND], sorted(near[FIRST_ROUND:], key=_seconds), sorted(folder, key=_seconds)):
        within = []
        for test in part:
            if test.seconds <= seconds:  # one that takes longer must not keep the others from running
                within.append(test)
                seconds -= test.seconds
        if within:
            yield within


def _seconds(test: RecordedTest) -> float:
    return test.seconds


@dataclass
class Trials:
    """A copy of the repository in which mutations are tried, and what is known of its tests."""

    copy: Path
    record: Record
    seconds: float = float("inf")
    """Of tests to run for one mutation."""
    server: Server | None = None

    def noticed_by(self, mutation: Mutation) -> str:
        """The test that fails, or words for a run that takes far too long or breaks off, with the mutation in place; ""
        if none does.

        The file is then put back.
        """
        path = self.copy / mutation.path
        original = path.read_text()
        groups = list(rounds(mutation, self.record.tests, self.seconds))
        forks = mutation.function and f"{mutation.path.as_posix()}::{mutation.function}" not in self.record.imported
        if forks and self.server is None:
            self.server = start_server(self.copy, list(dict.fromkeys(map(_file, self.record.tests))))
        try:
            path.write_text(mutation.text)
            if forks and self.server is not None:
                tests = [test for group in groups for test in group]
                status, failed = self.server.ask(mutation, [test.name for test in tests], _limit(tests))
                if status != NOT_REPLACEABLE:
                    return _words(status, failed)
            for chosen in groups:
                if failure := self._afresh(chosen):
                    return failure
            return ""
        finally:
            path.write_text(original)

    def _afresh(self, tests: list[RecordedTest]) -> str:
        names, failed = self.copy / "tests_to_run.txt", self.copy / "failed.txt"
        names.write_text("\n".join(test.name for test in tests))
        failed.write_text("")
        files = list(dict.fromkeys(map(_file, tests)))
        settings = {"MUTATE_TESTS": str(names), "MUTATE_FAILED": str(failed)}
        return _words(run_tests(self.copy, files, _limit(tests), settings, "-x"), failed.read_text())

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None


def _limit(tests: list[RecordedTest]) -> float:
    return 60 + PATIENCE * sum(test.seconds for test in tests)


def _words(status: int, failed: str) -> str:
    if status in (0, NO_TEST_CHOSEN):
        return ""
    return "too long" if status == TOO_LONG else failed or f"exit status {status}"
