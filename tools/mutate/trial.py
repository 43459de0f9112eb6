"""Try mutations in a copy of the repository: first the tests that call the changed function, then its folder."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.mutate.changes import Mutation

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 16 << 30
"""Bytes of address space for the tests of one mutation: a wrong size must not take the machine down."""
FOLDER_SECONDS = 600
"""How long a folder's tests may take."""


@dataclass(frozen=True)
class RecordedTest:
    """A test as it was recorded."""

    name: str
    seconds: float
    functions: frozenset[str]
    """`src/….py::Class.method` each."""


def copy_of_the_repository(place: Path) -> Path:
    """What git knows or would add, and the compiled kernels: tests change nothing that someone is working on."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    kernels = [str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*.so")]
    for name in [*listed.stdout.decode().split("\0"), *kernels]:
        if name and (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def record(copy: Path, tests: list[str]) -> list[RecordedTest]:
    """Run tests once, unchanged, and note what each calls. Those that fail while they are watched are left out."""
    path = copy / "calls.json"
    run_tests(copy, tests, seconds=3600, settings={"MUTATE_RECORD": str(path)})
    print((copy / "output.txt").read_text()[-2000:], file=sys.stderr)
    return read_record(path.read_text())


def read_record(text: str) -> list[RecordedTest]:
    return [
        RecordedTest(name, entry["seconds"], frozenset(entry["functions"])) for name, entry in json.loads(text).items()
    ]


def callers(mutation: Mutation, tests: list[RecordedTest]) -> list[RecordedTest]:
    """The tests that call a mutation's function, quick ones first."""
    function = f"{mutation.path.as_posix()}::{mutation.function}"
    return sorted((test for test in tests if function in test.functions), key=lambda test: test.seconds)


def mirror(path: Path) -> str:
    """The folder of tests for a file: tests/casting for src/halfbyte/casting/rows.py."""
    return f"tests/{path.as_posix().removeprefix('src/halfbyte/').split('/')[0]}"


def is_noticed(mutation: Mutation, copy: Path, tests: list[RecordedTest]) -> bool:
    """Whether some test fails, or takes far too long, with the mutation in place. The file is then put back.

    After the tests that call the function comes the whole folder that mirrors its own: what another process calls, or
    a cache holds back, was not recorded.
    """
    path = copy / mutation.path
    original = path.read_text()
    near = callers(mutation, tests)
    try:
        path.write_text(mutation.text)
        if near and _fails(copy, near):
            return True
        folder = mirror(mutation.path)
        return (copy / folder).is_dir() and run_tests(copy, [folder], FOLDER_SECONDS, {}) != 0
    finally:
        path.write_text(original)


def _fails(copy: Path, near: list[RecordedTest]) -> bool:
    names = copy / "tests_to_run.txt"
    names.write_text("\n".join(test.name for test in near))
    files = list(dict.fromkeys(test.name.split("::")[0] for test in near))
    limit = 30 + 4 * sum(test.seconds for test in near)
    return run_tests(copy, files, limit, {"MUTATE_TESTS": str(names)}) != 0


def run_tests(copy: Path, tests: list[str], seconds: float, settings: dict[str, str]) -> int:
    """pytest's exit status, or −1 after so many seconds. What it started ends with it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.mutate.calls", *tests]
    if "MUTATE_RECORD" not in settings:
        command.append("-x")
    settings = {**settings, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    with (copy / "output.txt").open("wb") as output:
        child = subprocess.Popen(
            command, cwd=copy, env=os.environ | settings, stdout=output, stderr=output, start_new_session=True,
            preexec_fn=_limit_memory,
        )  # fmt: skip
        try:
            return child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
