"""Faults that happen inside the tasks of a cluster, once each: a process dies, a task raises, a disk is full.

A fault is a file in a folder that all processes see. The task that takes the file away has the fault.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.execute.conversion import Resources
from halfbyte.checkpoint.execute.disk import Disk, Made, Place
from halfbyte.scale.parts import Part
from halfbyte.scale.tasks import Written, write_part

KINDS = ("kill worker", "raise", "disk full", "kill driver", "remove node")
HELD = 20.0
"""Seconds that a task waits at most for something that happens outside of it."""

Task = Callable[[Part, Path, Resources, bool], Written]


class Folder:
    """The faults that are still to come, and notes of tasks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def plant(self, kind: str, writes: int = 2, times: int = 1) -> None:
        """Let it happen in that many tasks, at that write of each, or at its end."""
        for number in range(times):
            (self.path / f"{kind}-{writes}-{number}.fault").touch()

    def take(self) -> tuple[str, int] | None:
        """The fault that this task has, if any."""
        for path in sorted(self.path.glob("*.fault")):
            try:
                path.rename(path.with_suffix(".taken"))
            except FileNotFoundError:
                continue
            kind, writes, _ = re.sub(r"^\d+ ", "", path.stem).rsplit("-", 2)
            return kind, int(writes)
        return None

    def note(self, name: str, text: str = "") -> None:
        (self.path / f"{name}.note").write_text(text)

    def noted(self, name: str, seconds: float = HELD) -> str:
        """What a task noted under that name; waits for it."""
        path = self.path / f"{name}.note"
        until = time.monotonic() + seconds
        while not path.exists():
            assert time.monotonic() < until, f"no task noted {name}"
            time.sleep(0.02)
        return path.read_text()

    def asked(self) -> list[tuple[str, str]]:
        """(node, note) of tasks that wait until their node is removed. `answer` lets the others go on."""
        found = [path.stem for path in self.path.glob("at *.note")]
        return [(name.split()[1], name) for name in found]

    def answer(self, name: str) -> None:
        self.note(name.replace("at ", "gone ", 1))
        (self.path / f"{name}.note").unlink()

    def notes(self) -> dict[str, str]:
        return {path.stem: path.read_text() for path in self.path.glob("*.note")}


def faulty(folder: Path) -> Task:
    """The task that writes a part, with the faults of a folder. A closure: it is sent to the nodes as it is."""

    def task(part: Part, work: Path, resources: Resources, sync: bool) -> Written:
        import ray

        faults = Folder(folder)
        faults.note(f"wrote {part.names[0]}", ray.get_runtime_context().get_node_id())
        fault = faults.take()
        if fault is None:
            return write_part(part, work, resources, sync)
        kind, writes = fault
        real, count = Disk.write_places, [0]

        def write_places(self: Disk, file: int, places: Sequence[Place], write: Callable[[int], Made]) -> Made:
            count[0] += 1
            if count[0] == writes:
                _happen(kind, faults)
            return real(self, file, places, write)

        Disk.write_places = write_places  # type: ignore[method-assign]
        try:
            written = write_part(part, work, resources, sync)
            if count[0] < writes:
                _happen(kind, faults)
            return written
        finally:
            Disk.write_places = real  # type: ignore[method-assign]

    return task


def _happen(kind: str, faults: Folder) -> None:
    faults.note(f"{kind} {os.urandom(4).hex()}")
    if kind == "kill worker":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "raise":
        raise RuntimeError("a task that raises")
    elif kind == "disk full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif kind == "kill driver":
        os.kill(int(faults.noted("driver")), signal.SIGKILL)
        time.sleep(HELD)  # Ray ends the tasks of a driver that is gone
    elif kind == "remove node":
        import ray

        asked = f"{ray.get_runtime_context().get_node_id()} {os.urandom(4).hex()}"
        faults.note(f"at {asked}")
        faults.noted(f"gone {asked}")  # if the node goes, this process goes with it


def seen_by(holdings: dict[str, frozenset[str]]) -> Callable[..., Any]:
    """What nodes see, if each has only the files of its own disk: node → source files."""

    def see(source: Path, files: Sequence[Any], work: Path, token: str) -> Any:
        import ray

        from halfbyte.scale.tasks import Seen

        node = ray.get_runtime_context().get_node_id()
        return Seen((work / token).exists(), holdings.get(node, frozenset()))

    return see
