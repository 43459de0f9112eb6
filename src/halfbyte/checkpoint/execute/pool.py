"""Threads of a run: workers that take tasks, and some that finish complete shards."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.ending import Ending
from halfbyte.checkpoint.execute.hand_out import HandOut, Line
from halfbyte.checkpoint.execute.journal import Finished, Journal
from halfbyte.checkpoint.execute.replacing import ReplaceError
from halfbyte.checkpoint.execute.tasks import Tasks
from halfbyte.checkpoint.execute.writer import ShardWriter, Stopped
from halfbyte.checkpoint.io.files import stat_of
from halfbyte.checkpoint.plan.types import Plan, Shard

CLOSERS = 4
"""Threads at most that flush complete shards."""


@dataclass(frozen=True)
class Event:
    """A report to the caller. Kinds: begin, progress (in bytes), shard (one is done), close (files get their final
    names), end."""

    kind: str
    done: int
    """Source bytes done so far, earlier runs included; for "close", files."""
    total: int
    shard: str = ""


@dataclass
class Collected:
    """Takes the place of a journal where another process keeps it: finished shards are collected in memory."""

    disk: Disk
    finished: dict[str, Finished] = field(default_factory=dict)

    def add(self, done: Finished) -> None:
        self.finished[done.name] = done


@dataclass(frozen=True)
class Into:
    """Where shards are written, which ones, and who keeps the record of those that are complete."""

    work: Path
    journal: Journal | Collected
    shards: tuple[Shard, ...]
    tag: str = ""
    """What names in the work folder end with."""


class Pool:
    """Workers that take tasks, and threads that sync and rename finished shards."""

    def __init__(
        self,
        plan: Plan,
        tasks: Tasks,
        into: Into,
        report: Callable[[Event], None],
    ) -> None:
        self.plan, self.tasks, self.into, self.journal = plan, tasks, into, into.journal
        self.report = report
        self.stop = threading.Event()
        self.total = sum(shard_bytes(shard) for shard in into.shards)
        self.done = sum(shard_bytes(shard) for shard in into.shards if shard.name in into.journal.finished)
        self._lock = threading.Lock()
        self._open: list[ShardWriter] = []
        self._whole: queue.Queue[ShardWriter | None] = queue.Queue()
        self._error: BaseException | None = None
        self._tell: queue.Queue[Event] = queue.Queue()

    def work(self, workers: int) -> None:
        """Run every task; raises the first error of any thread."""
        hand_out = HandOut(self._lines(), workers, self._whole.put)
        threads = [threading.Thread(target=self._worker, args=(hand_out,), daemon=True) for _ in range(workers)]
        closers = [threading.Thread(target=self._closer, daemon=True) for _ in range(min(workers, CLOSERS))]
        for thread in (*threads, *closers):
            thread.start()
        try:
            self._wait_for(threads)
            for _ in closers:
                self._whole.put(None)
            self._wait_for(closers)
        except BaseException:
            self.stop.set()
            raise
        finally:
            for _ in closers:
                self._whole.put(None)
            for thread in (*threads, *closers):
                thread.join()
            for writer in self._open:
                writer.abandon()
        if self._error is not None:
            raise self._error
        self._report()

    def _wait_for(self, threads: Sequence[threading.Thread]) -> None:
        """Report until all of them have ended."""
        while running := [thread for thread in threads if thread.is_alive()]:
            running[0].join(0.1)
            self._report()

    def _report(self) -> None:
        while not self._tell.empty():
            self.report(self._tell.get())
        self.report(Event("progress", self.done, self.total))

    def _lines(self) -> Iterator[Line]:
        """The shards that are to be written, each opened when it is asked for."""
        for shard in self.into.shards:
            if shard.name in self.journal.finished:
                continue
            writer = ShardWriter(shard, self.into.work, self.stop, self.journal.disk, self.into.tag)
            with self._lock:
                self._open.append(writer)
            yield Line(writer, self.tasks.of_shard(shard, writer))

    def _worker(self, hand_out: HandOut) -> None:
        try:
            with self.tasks.acts.arena(self.tasks.sizes.arena) as arena:
                while not self.stop.is_set() and (task := hand_out.take()) is not None:
                    arena.release()
                    task.run(arena)
                    with self._lock:
                        self.done += task.bytes
                    hand_out.finish(task)
        except Stopped:
            return
        except BaseException as error:
            self._fail(error)

    def _closer(self) -> None:
        try:
            while (writer := self._whole.get()) is not None and not self.stop.is_set():
                with self._lock:
                    self._open.remove(writer)
                if writer.spoiled:
                    writer.discard()
                    continue
                done = writer.finish(self.plan.shard_fingerprint(writer.shard))
                check_unchanged(self.plan, writer.shard.name)
                self.journal.disk.flush_folder(self.into.work)
                self.journal.add(done)
                self._tell.put(Event("shard", self.done, self.total, writer.shard.name))
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
        self.stop.set()


def shard_bytes(shard: Shard) -> int:
    """Source bytes from which the tensors of a shard are made."""
    return sum(copy.output.bytes for copy in shard.copies) + sum(unit.source_bytes for unit in shard.units)


def check_unchanged(plan: Plan | Ending, name: str | None = None) -> None:
    """Raise if a source file changed since the plan was made."""
    for file in plan.files:
        if name not in (None, file.name):
            continue
        stat = stat_of(plan.source / file.name)
        if (stat.st_size, stat.st_mtime_ns) != (file.size, file.modified):
            raise ReplaceError(
                f"{plan.source / file.name} changed while it was converted", "; begin anew with --overwrite"
            )
