"""`python -m tests.zoo.run [CLASS…]`: examine every class, each in a process of its own; a line per class, a summary.

Exit code 1 if a class fails in transformers and neither convert nor verify said so.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from tests.zoo.build import class_names
from tests.zoo.case import LAYOUTS, Result, examine

LIMIT = 120.0
"""Seconds for one class."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.run", description=__doc__)
    parser.add_argument("classes", nargs="*", metavar="CLASS", help="default: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result there")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="time for one class")
    options = parser.parse_args(arguments)
    prepare()
    torch.set_num_threads(1)
    results: list[Result] = []
    began = time.monotonic()
    for result in examine_all(options.classes or class_names(), options.jobs, options.limit):
        results.append(result)
        print(line(result), flush=True)
        if options.json:
            ordered = sorted(results, key=lambda result: result.name)
            options.json.write_text(json.dumps([result.as_json() for result in ordered], indent=1) + "\n")
    print(summary(results))
    print(f"{len(results)} classes in {time.monotonic() - began:.0f} s")
    return int(any(result.silent for result in results))


def prepare() -> None:
    """Import what every class needs, once, before the processes are forked."""
    warnings.simplefilter("ignore")
    import compressed_tensors.compressors  # noqa: F401
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def examine_all(names: Sequence[str], jobs: int, limit: float) -> Iterator[Result]:
    """Results as they come, each from a forked process that has a time limit."""
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(names))
    running: dict[Connection, tuple[str, BaseProcess, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(target=_work, args=(name, Path(scratch) / name, sender))
                process.start()
                sender.close()
                running[receiver] = (name, process, time.monotonic())
            ready = wait(list(running), timeout=1.0)
            for receiver, (name, process, began) in list(running.items()):
                late = time.monotonic() - began > limit
                if receiver not in ready and not late:
                    continue
                yield _received(receiver, name, process, began, late and receiver not in ready)
                del running[receiver]
                shutil.rmtree(Path(scratch) / name, ignore_errors=True)


def _received(receiver: Connection, name: str, process: BaseProcess, began: float, late: bool) -> Result:
    if late:
        process.kill()
        result = _lost(name, "it ran past the time limit")
    else:
        try:
            result = receiver.recv()
        except EOFError:
            process.join()
            result = _lost(name, f"its process ended with code {process.exitcode}")
    process.join()
    receiver.close()
    result.seconds = round(time.monotonic() - began, 1)
    return result


def _lost(name: str, why: str) -> Result:
    return Result(name, outcomes=dict.fromkeys(LAYOUTS, f"silent: {why}"))


def _work(name: str, folder: Path, sender: Connection) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    folder.mkdir()
    sender.send(examine(name, folder))
    sender.close()


def line(result: Result) -> str:
    """One class in one line; outcomes that are the same are told once."""
    outcomes = list(result.outcomes.values())
    if len(set(outcomes)) == 1:
        told = outcomes[0]
    else:
        told = " | ".join(f"{layout}: {outcome}" for layout, outcome in result.outcomes.items())
    return f"{result.name} ({result.seconds} s): {told}"


def summary(results: Sequence[Result]) -> str:
    lines = []
    for layout in LAYOUTS:
        counts = Counter(result.outcomes[layout].partition(":")[0] for result in results)
        lines.append(f"{layout}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
