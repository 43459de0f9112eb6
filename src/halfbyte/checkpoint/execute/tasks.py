"""The work of a plan cut into tasks, in the order in which they are handed out.

Small jobs (a module with its partners) are one task: read, amax, quantize, write, by one worker that holds the bytes.
Large ones become one task per piece, in two passes over the file, so that memory stays bounded and all workers help. A
task waits only for tasks that were handed out before it, hence always for ones that are running or done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from halfbyte.checkpoint.execute.unit import Group, Piece, UnitWork, pieces_of
from halfbyte.checkpoint.execute.writer import ShardWriter
from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.io.views import scratch_bytes
from halfbyte.checkpoint.plan.types import Copy, Plan, Shard, Unit

SLACK = 1 << 16
"""Bytes of an arena that alignment may take."""

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Sizes:
    """How work is cut. Never changes an output byte."""

    chunk: int
    """Source bytes of a piece."""
    arena: int
    """Bytes that one worker may hold."""


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


def piece_bytes(unit: Unit, piece: Piece) -> int:
    return unit.sources[piece.source].row_bytes * (piece.stop - piece.start)


def piece_memory(unit: Unit, piece: Piece) -> int:
    """Arena bytes that reading, decoding and quantizing one piece takes beside its own raw bytes."""
    source, rows = unit.sources[piece.source], piece.stop - piece.start
    outputs = 0 if unit.action in ("decode", "gather", "relayout") else rows * source.columns * 5 // 8
    scales = 0 if source.scale is None else rows * source.scale.columns * 4
    return scratch_bytes(source, rows) + outputs + scales + SLACK


def largest_piece(unit: Unit, chunk: int) -> int:
    """Arena bytes of the unit's largest piece, raw bytes included."""
    return max(piece_bytes(unit, piece) + piece_memory(unit, piece) for piece in pieces_of(unit, chunk))


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
        held = sum(unit.source_bytes for unit in job.units)
        extra = max(largest_piece(unit, self.sizes.chunk) for unit in (*job.units, *members))
        if held + extra + SLACK * len(job.units) <= self.sizes.arena and held <= 16 * self.sizes.chunk:
            yield self._whole(job, members, group, writer, held)
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

    def _whole(self, job: Job, members: Sequence[Unit], group: Group | None, writer: ShardWriter, size: int) -> Task:
        """Both passes by one worker; raw bytes are kept from the first to the second."""

        def run(arena: Arena) -> None:
            acts = self.acts
            held = {}
            if group is not None and members:
                mine = {unit.module for unit in job.units}
                for unit in members:
                    for piece in pieces_of(unit, self.sizes.chunk):
                        mark = arena.mark()
                        raw = acts.survey(unit, piece, group, arena)
                        if unit.module in mine:
                            held[unit.module, piece.number] = raw
                        else:
                            arena.release(mark)
                acts.settle(members, group, self.sizes.chunk, arena)
            elif group is not None:
                group.wait(writer.stop)
            for unit in job.units:
                for piece in pieces_of(unit, self.sizes.chunk):
                    acts.write(unit, piece, held.get((unit.module, piece.number)), group, writer, arena)
                acts.forget(unit)

        return Task(run, writer, size)

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
