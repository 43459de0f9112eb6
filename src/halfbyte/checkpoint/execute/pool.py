"""Threads of a run: workers that take tasks in order, and one that finishes complete shards."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from halfbyte.checkpoint.execute.journal import Journal
from halfbyte.checkpoint.execute.tasks import Task, Tasks
from halfbyte.checkpoint.execute.writer import ShardWriter, Stopped
from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.plan.types import Plan, Shard
from halfbyte.errors import CheckpointError


@dataclass(frozen=True)
class Event:
    """A report to the caller. Kinds: begin, progress (in bytes), shard (one is done), close (files get their final
    names), end."""

    kind: str
    done: int
    """Source bytes done so far, earlier runs included; for "close", files."""
    total: int
    shard: str = ""


class Pool:
    """Workers that take tasks in order, and a thread that syncs and renames finished shards."""

    def __init__(
        self,
        plan: Plan,
        tasks: Tasks,
        journal: Journal,
        work: Path,
        report: Callable[[Event], None],
    ) -> None:
        self.plan, self.tasks, self.journal, self.work_folder = plan, tasks, journal, work
        self.report = report
        self.stop = threading.Event()
        self.total = sum(shard_bytes(shard) for shard in plan.shards)
        self.done = sum(shard_bytes(shard) for shard in plan.shards if shard.name in journal.finished)
        self._lock = threading.Lock()
        self._hand_out = threading.Lock()
        self._open: list[ShardWriter] = []
        self._whole: queue.Queue[ShardWriter | None] = queue.Queue()
        self._error: BaseException | None = None
        self._tell: queue.Queue[Event] = queue.Queue()
        self._stream = self._all_tasks()

    def work(self, workers: int) -> None:
        """Run every task; raises the first error of any thread."""
        threads = [threading.Thread(target=self._worker, name=f"convert-{i}", daemon=True) for i in range(workers)]
        closer = threading.Thread(target=self._closer, name="convert-close", daemon=True)
        for thread in (*threads, closer):
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                next(thread for thread in threads if thread.is_alive()).join(0.1)
                self._report()
            self._whole.put(None)
            while closer.is_alive():
                closer.join(0.1)
                self._report()
        except BaseException:
            self.stop.set()
            raise
        finally:
            self._whole.put(None)
            for thread in (*threads, closer):
                thread.join()
            for writer in self._open:
                writer.abandon()
        if self._error is not None:
            raise self._error
        self._report()

    def _report(self) -> None:
        while not self._tell.empty():
            self.report(self._tell.get())
        self.report(Event("progress", self.done, self.total))

    def _all_tasks(self) -> Iterator[Task]:
        for shard in self.plan.shards:
            if shard.name in self.journal.finished:
                continue
            writer = ShardWriter(shard, self.work_folder, self.stop, self.journal.disk)
            with self._lock:
                self._open.append(writer)
                writer.pending = 1  # held until every task of the shard is handed out
            for task in self.tasks.of_shard(shard, writer):
                with self._lock:
                    writer.pending += task.writer is not None
                yield task
            self._count_down(writer)

    def _worker(self) -> None:
        try:
            with self.tasks.acts.arena(self.tasks.sizes.arena) as arena:
                self._take_tasks(arena)
        except Stopped:
            return
        except BaseException as error:
            self._fail(error)

    def _take_tasks(self, arena: Arena) -> None:
        while not self.stop.is_set():
            with self._hand_out:
                task = next(self._stream, None)
            if task is None:
                return
            arena.release()
            task.run(arena)
            with self._lock:
                self.done += task.bytes
            if task.writer is not None:
                self._count_down(task.writer)

    def _count_down(self, writer: ShardWriter) -> None:
        with self._lock:
            writer.pending -= 1
            whole = writer.pending == 0
        if whole:
            self._whole.put(writer)

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
                self.journal.disk.flush_folder(self.work_folder)
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


def check_unchanged(plan: Plan, name: str | None = None) -> None:
    """Raise if a source file changed since the plan was made."""
    for file in plan.files:
        if name not in (None, file.name):
            continue
        stat = os.stat(plan.source / file.name)
        if (stat.st_size, stat.st_mtime_ns) != (file.size, file.modified):
            raise CheckpointError(
                f"{plan.source / file.name} changed while it was converted; begin anew with --overwrite"
            )
