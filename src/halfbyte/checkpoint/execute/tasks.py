"""The work of a plan cut into tasks, in the order in which they are handed out.

Small jobs (a module with its partners) are one task: read, amax, quantize, write, by one worker that holds the bytes.
Large ones become one task per piece, in two passes over the file, so that memory stays bounded and all workers help. A
task waits only for tasks that were handed out before it, hence always for ones that are running or done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from halfbyte.checkpoint.execute.group import Group
from halfbyte.checkpoint.execute.pieces import Piece, Sizes, piece_bytes, pieces_of
from halfbyte.checkpoint.execute.unit import UnitWork
from halfbyte.checkpoint.execute.writer import ShardWriter
from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.plan.types import Copy, Plan, Shard, Unit


@dataclass
class Task:
    """Work for one worker. `writer` is None for passes that write nothing."""

    run: Callable[[Arena], None]
    writer: ShardWriter | None
    bytes: int
    """Source bytes that count as progress when it is done."""


@dataclass
class Job:
    """Units of one shard that are worked on together: those that share a tensor scale, or a single one."""

    units: list[Unit] = field(default_factory=list)
    group: int = -1


def jobs_of(shard: Shard) -> list[Job]:
    """The units of a shard, partners together, in the order of their first member."""
    jobs: dict[int, Job] = {}
    result = []
    for unit in shard.units:
        if unit.group >= 0 and unit.action != "relayout":
            if unit.group not in jobs:
                jobs[unit.group] = Job(group=unit.group)
                result.append(jobs[unit.group])
            jobs[unit.group].units.append(unit)
        else:
            result.append(Job([unit]))
    return result


class Tasks:
    """Makes the tasks of a plan, shard after shard."""

    def __init__(self, plan: Plan, acts: UnitWork, sizes: Sizes) -> None:
        self.plan, self.acts, self.sizes = plan, acts, sizes
        self.groups = [Group(group) for group in plan.groups]
        self._members: dict[int, list[Unit]] = {}
        for unit in plan.units:
            if unit.group >= 0:
                self._members.setdefault(unit.group, []).append(unit)

    def of_shard(self, shard: Shard, writer: ShardWriter) -> Iterator[Task]:
        yield from self._copies(shard.copies, writer)
        for job in jobs_of(shard):
            yield from self._job(job, writer)

    def _copies(self, copies: Sequence[Copy], writer: ShardWriter) -> Iterator[Task]:
        """Tensors that are copied: small ones together, large ones in pieces."""
        batch: list[Copy] = []
        held = 0
        for copy in copies:
            if copy.output.bytes > self.sizes.chunk:
                for start in range(0, copy.output.bytes, self.sizes.chunk):
                    yield self._copy_range(copy, start, writer)
                continue
            batch.append(copy)
            held += copy.output.bytes
            if held >= self.sizes.chunk or len(batch) >= 256:
                yield self._copy_batch(batch, held, writer)
                batch, held = [], 0
        if batch:
            yield self._copy_batch(batch, held, writer)

    def _copy_range(self, copy: Copy, start: int, writer: ShardWriter) -> Task:
        size = min(self.sizes.chunk, copy.output.bytes - start)

        def run(arena: Arena) -> None:
            raw = arena.take(size)
            self.acts.files.read(copy.file, copy.offset + start, raw)
            writer.put(copy.output, raw, start)

        return Task(run, writer, size)

    def _copy_batch(self, copies: Sequence[Copy], size: int, writer: ShardWriter) -> Task:
        def run(arena: Arena) -> None:
            for copy in copies:
                arena.release()
                raw = arena.take(copy.output.bytes)
                self.acts.files.read(copy.file, copy.offset, raw)
                writer.put(copy.output, raw)

        return Task(run, writer, size)

    def _job(self, job: Job, writer: ShardWriter) -> Iterator[Task]:
        group = self.groups[job.group] if job.group >= 0 else None
        surveys = group is not None and not group.claimed
        if group is not None:
            group.claimed = True
        members = self._members.get(job.group, []) if surveys else []
        if self.acts.holds(job.units, members, self.sizes):
            yield self._whole(job, members, group, writer)
            return
        if group is not None and surveys:
            surveyed = [(unit, piece) for unit in members for piece in pieces_of(unit, self.sizes.chunk)]
            group.pending = len(surveyed)
            for unit, piece in surveyed:
                yield self._survey(unit, piece, group)
        for unit in job.units:
            cut = list(pieces_of(unit, self.sizes.chunk))
            for piece in cut:
                yield self._write(unit, piece, group, writer, last=piece is cut[-1])

    def _whole(self, job: Job, members: Sequence[Unit], group: Group | None, writer: ShardWriter) -> Task:
        """Both passes by one worker."""

        def run(arena: Arena) -> None:
            self.acts.whole(job.units, members, group, writer, self.sizes.chunk, arena)

        return Task(run, writer, sum(unit.source_bytes for unit in job.units))

    def _survey(self, unit: Unit, piece: Piece, group: Group) -> Task:
        def run(arena: Arena) -> None:
            self.acts.survey(unit, piece, group, arena)
            with group.lock:
                group.pending -= 1
                last = group.pending == 0
            if last:
                self.acts.settle(self._members[unit.group], group, self.sizes.chunk, arena)

        return Task(run, None, 0)

    def _write(self, unit: Unit, piece: Piece, group: Group | None, writer: ShardWriter, last: bool) -> Task:
        def run(arena: Arena) -> None:
            if group is not None:
                group.wait(writer.stop)
            self.acts.write(unit, piece, None, group, writer, arena)
            if last:
                self.acts.forget(unit)

        return Task(run, writer, piece_bytes(unit, piece))
