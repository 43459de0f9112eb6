"""A question to code that halfbyte does not import: a module of halfbyte runs in a Python process of its own.

The process may import torch, transformers or vLLM, run a model's own code, and crash. Nothing of that touches the
caller, who gets JSON or one clear error. Nothing is fetched from a network.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from halfbyte.errors import ModelCodeError

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""For every process: no network, and no talk but errors."""

SECONDS = 1800.0
"""How long a process may take. A model of 600 GB has about 200 000 tensors, whose names take minutes to match."""

LONGEST = 600
"""Characters of an error that are passed on."""


def ask(module: str, *arguments: str, settings: Mapping[str, str] | None = None, seconds: float = SECONDS) -> Any:
    """What the `main` of a module, given the arguments, returns in a process of its own.

    ModelCodeError: it failed, with the last line that it wrote; or it took longer than that many seconds.
    """
    with tempfile.TemporaryDirectory(prefix="halfbyte-") as folder:
        output, talk = Path(folder, "answer.json"), Path(folder, "talk")
        # code that comes with a model is copied before it is imported: into this folder, not the user's cache
        environment = {**os.environ, **SETTINGS, "HF_MODULES_CACHE": str(Path(folder, "modules")), **(settings or {})}
        # -P: a folder named transformers where the user happens to be is not imported
        command = [sys.executable, "-P", "-m", module, *arguments, str(output)]
        with talk.open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            status = _wait(process, seconds)
        if status is None:
            raise ModelCodeError(f"no answer after {seconds:.0f} s; the process was stopped")
        if status or not output.exists():
            raise ModelCodeError(_last_line(talk) or f"the process ended with status {status} and said nothing")
        return json.loads(output.read_text(encoding="utf-8"))


def answer(main: Callable[..., Any]) -> None:
    """The other side of `ask`: call `main` with the arguments of the command line, and write what it returns."""
    *arguments, output = sys.argv[1:]
    Path(output).write_text(json.dumps(main(*arguments)), encoding="utf-8")


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit status; None after that time. The process and what it started are gone in any case."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(talk: Path) -> str:
    """The error of the last traceback, or else the last line. halfbyte's own errors come without their class."""
    text = talk.read_text(encoding="utf-8", errors="replace")
    lines = after_traceback(text)
    if lines:
        return one_line("\n".join(lines)).removeprefix(f"{ModelCodeError.__module__}.ModelCodeError: ")
    return one_line(next((line for line in reversed(text.splitlines()) if line.strip()), ""))


def after_traceback(text: str) -> list[str]:
    """The lines after the last traceback in a text: first the error, then what else was said. [] if there is none.

    >>> after_traceback("Traceback (most recent call last):\\n  File 1\\nKeyError: 'x'\\nand more")
    ["KeyError: 'x'", 'and more']
    """
    _, found, tail = text.rpartition("Traceback (most recent call last):\n")
    lines = tail.splitlines() if found else []
    first = next((number for number, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    return lines[first:]


def one_line(text: str) -> str:
    """A text on one line, cut where it is long.

    >>> one_line("ValueError: no\\n   such class")
    'ValueError: no such class'
    """
    joined = " ".join(text.split())
    return joined if len(joined) <= LONGEST else f"{joined[:LONGEST]}…"
