"""Executes a Plan: workers over tasks, shard by shard, bounded memory, every file whole before it gets its name."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from halfbyte.backends.cpu.library import thread_count
from halfbyte.checkpoint.execute.destination import check_destination, close, only_one, open_destination
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.journal import Disk, Journal, work_folder
from halfbyte.checkpoint.execute.tasks import SLACK, Sizes, Task, Tasks, largest_piece
from halfbyte.checkpoint.execute.unit import Acts
from halfbyte.checkpoint.execute.writer import ShardWriter, Stopped, disk_error
from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.plan.types import Plan, Shard
from halfbyte.errors import CheckpointError, InputError

CHUNK = 32 << 20
"""Source bytes of a piece: long enough that the fixed cost of a call does not show."""

DEFAULT_MEMORY = 2 << 30


@dataclass(frozen=True)
class Resources:
    """What a run may use. Nothing here changes an output byte."""

    workers: int | None = None
    """None: HALFBYTE_THREADS, or the processors there are."""
    max_memory: int = DEFAULT_MEMORY
    device: str = "cpu"
    sync: bool = True
    """Whether each shard is on disk before it counts as done. Without it a power cut may cost what a crash does not."""
    chunk: int = CHUNK


@dataclass(frozen=True)
class Event:
    """Something to tell: that work begins, progress in bytes, a shard that is done, files that get their names (close),
    the end."""

    kind: str
    done: int
    """Source bytes that are dealt with, those of earlier runs included; files for "close"."""
    total: int
    shard: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a run did."""

    shards_written: int
    shards_found: int
    """Whole already when the run began."""
    finished_before: bool = False
    """The very same conversion was there already."""


def sizes_for(plan: Plan, resources: Resources) -> tuple[Sizes, int]:
    """How to cut the work so that it fits the memory, and how many workers to use."""
    workers = thread_count(resources.workers)
    units = plan.units
    while True:
        arena = resources.max_memory * 9 // 10 // workers
        chunk = max(1, min(resources.chunk, arena // 16))
        needed = max((largest_piece(unit, chunk) for unit in units), default=0) + SLACK
        if needed <= arena:
            return Sizes(chunk, arena), workers
        if workers == 1:
            raise InputError(
                f"--max-memory {resources.max_memory:,} is too little: a piece of the largest tensor needs {needed:,}"
            )
        workers -= 1


def run(
    plan: Plan,
    destination: Path,
    resources: Resources | None = None,
    overwrite: bool = False,
    report: Callable[[Event], None] = lambda event: None,
) -> Outcome:
    """Write the checkpoint that a plan describes, or go on with one that was begun.

    On any error, and when interrupted, finished shards stay in the work folder and nothing stands under a final name.
    """
    resources = resources or Resources()
    sizes, workers = sizes_for(plan, resources)
    engine = Engine(plan.format, plan.contract, plan.method, plan.repairs, resources.device)
    check_destination(plan.source, destination)
    try:
        with only_one(destination):
            return _run(plan, destination, resources, (sizes, workers), engine, overwrite, report)
    except OSError as error:
        raise disk_error(error, destination) from error


def _run(
    plan: Plan,
    destination: Path,
    resources: Resources,
    cut: tuple[Sizes, int],
    engine: Engine,
    overwrite: bool,
    report: Callable[[Event], None],
) -> Outcome:
    journal = open_destination(plan, destination, overwrite, Disk(resources.sync))
    if journal is None:
        return Outcome(0, len(plan.shards), finished_before=True)
    sizes, workers = cut
    found = len(journal.finished)
    files = Files({file.name: str(plan.source / file.name) for file in plan.files})
    try:
        pool = Pool(plan, Tasks(plan, Acts(files, engine), sizes), journal, work_folder(destination), report)
        report(Event("begin", pool.done, pool.total))
        pool.work(workers)
    finally:
        files.close()
    check_unchanged(plan)
    close(plan, destination, journal, lambda done, total: report(Event("close", done, total)))
    report(Event("end", pool.total, pool.total))
    return Outcome(len(plan.shards) - found, found)


def check_unchanged(plan: Plan, name: str | None = None) -> None:
    """Raise if a source file is not the one that was planned with."""
    for file in plan.files:
        if name not in (None, file.name):
            continue
        stat = os.stat(plan.source / file.name)
        if (stat.st_size, stat.st_mtime_ns) != (file.size, file.modified):
            raise CheckpointError(
                f"{plan.source / file.name} changed while it was converted; begin anew with --overwrite"
            )


class Pool:
    """Workers that take tasks in order, and a thread that makes whole shards last."""

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
            writer = ShardWriter(shard, self.work_folder, self.stop)
            with self._lock:
                self._open.append(writer)
                writer.pending = 1  # held until every task of the shard is handed out
            for task in self.tasks.of_shard(shard, writer):
                with self._lock:
                    writer.pending += task.writer is not None
                yield task
            self._count_down(writer)

    def _worker(self) -> None:
        arena = Arena(self.tasks.sizes.arena)
        try:
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
        except Stopped:
            return
        except BaseException as error:
            self._fail(error)

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
                done = writer.finish(self.journal.disk.sync)
                check_unchanged(self.plan, writer.shard.name)
                self.journal.disk.folder(self.work_folder)
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
    """Source bytes that a shard's tensors are made from."""
    return sum(copy.output.bytes for copy in shard.copies) + sum(unit.source_bytes for unit in shard.units)
