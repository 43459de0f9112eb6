"""Run pytest in a copy of the repository, in a fork of this process, which has the slow imports behind it."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import resource
import signal
import sys
import time
from pathlib import Path

PRELOADED = ("pytest", "numpy", "ml_dtypes", "torch", "triton", "sympy", "safetensors.numpy", "rich.table", "typer")
"""What most tests import and no mutation can reach."""
MEMORY = 16 << 30
"""Bytes of address space for one run: a wrong size must not take the machine down."""

NO_TEST_CHOSEN, TOO_LONG = 5, -1
"""Exit statuses: pytest's own for a run without tests, and ours for one that was ended."""
WRONG_USAGE = (3, 4)
"""pytest's exit statuses for a fault of its own and for files that are not there."""


def preload() -> None:
    """Import once what every run needs, so that a fork has it."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def run_tests(copy: Path, tests: list[str], seconds: float, settings: dict[str, str], *options: str) -> int:
    """pytest's exit status, or TOO_LONG after so many seconds. What it started ends with it.

    The output is in output.txt. Raises if pytest could not do what was asked, for example with a stale record.
    """
    status = await_end(start_pytest(copy, tests, settings, *options), seconds)
    if status in WRONG_USAGE:
        raise RuntimeError((copy / "output.txt").read_text()[-3000:])
    return status


def start_pytest(
    copy: Path,
    tests: list[str],
    settings: dict[str, str],
    *options: str,
    close: tuple[int, ...] = (),
    output: str = "output.txt",
) -> int:
    """The process of pytest, the first of a group of its own. It has all that is open here, but `close`."""
    first = f"{copy}/tools/mutate/first"
    settings |= {"PYTHONPATH": f"{first}:{copy}/src:{copy}", "PYTHONDONTWRITEBYTECODE": "1", "MUTATE_COPY": str(copy)}
    pid = os.fork()
    if pid == 0:
        for descriptor in close:
            os.close(descriptor)
        arguments = ["-q", "-p", "no:cacheprovider", "-p", "tools.mutate.calls", *options, *tests]
        _become_pytest(copy, arguments, settings, copy / output)
    return pid


def await_end(pid: int, seconds: float) -> int:
    """The exit status of a process, whose group is ended with it; TOO_LONG if that had to be done."""
    until, pause = time.monotonic() + seconds, 0.002
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
        ended, status = os.waitpid(pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if ended:
        return os.waitstatus_to_exitcode(status)
    os.waitpid(pid, 0)
    return TOO_LONG


def _become_pytest(copy: Path, arguments: list[str], settings: dict[str, str], path: Path) -> None:
    """Never returns."""
    status = 3
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(number, "w")) for number in (1, 2))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(copy)
        os.environ.update(settings)
        sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
        sys.path[:0] = settings["PYTHONPATH"].split(":")
        sys.dont_write_bytecode = True
        for name in [name for name in sys.modules if name.split(".")[0] in ("tools", "tests", "halfbyte")]:
            del sys.modules[name]
        import pytest

        status = int(pytest.main(arguments))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
