"""Which task a worker takes next. Several shards are written at the same time, so that workers do not meet at one file.

Writes to one file wait for each other in the kernel. A worker takes its task from the shard that the fewest others are
working on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from halfbyte.checkpoint.execute.tasks import Task
from halfbyte.checkpoint.execute.writer import ShardWriter


@dataclass
class Line:
    """The tasks of one shard that is being written."""

    writer: ShardWriter
    tasks: Iterator[Task]
    running: int = 0
    """Tasks that were handed out and are not done."""
    exhausted: bool = False
    """Whether every task was handed out."""


class HandOut:
    """The tasks of all shards.

    A task may wait for the amax of its group, which others find. So a task is handed out only after those that it waits
    for: all tasks that survey a group come one after the other, before any task of another shard.
    """

    def __init__(self, lines: Iterator[Line], at_once: int, whole: Callable[[ShardWriter], None]) -> None:
        """lines: opened as they are needed. at_once: shards in work. whole: called with each shard that is complete."""
        self._unopened, self._at_once, self._whole = lines, at_once, whole
        self._lines: list[Line] = []
        self._surveying: Line | None = None
        self._running: dict[int, Line] = {}
        self._lock = threading.Lock()

    def take(self) -> Task | None:
        """The next task; None if there are no more."""
        with self._lock:
            while (line := self._surveying or self._choose()) is not None:
                task = next(line.tasks, None)
                if task is None:
                    line.exhausted = True
                    self._lines.remove(line)
                    self._close(line)
                    continue
                self._surveying = line if task.writer is None else None
                line.running += 1
                self._running[id(task)] = line
                return task
            return None

    def finish(self, task: Task) -> None:
        """Say that a task is done."""
        with self._lock:
            line = self._running.pop(id(task))
            line.running -= 1
            self._close(line)

    def _choose(self) -> Line | None:
        """A new shard as long as there may be more in work, or the one with the fewest tasks running."""
        if len(self._lines) < self._at_once:
            opened = next(self._unopened, None)
            if opened is not None:
                self._lines.append(opened)
                return opened
        return min(self._lines, key=lambda line: line.running, default=None)

    def _close(self, line: Line) -> None:
        if line.exhausted and line.running == 0:
            self._whole(line.writer)
