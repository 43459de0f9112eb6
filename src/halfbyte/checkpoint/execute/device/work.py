"""Units of a plan on GPUs: read through pinned memory, uploaded once, amax and quantize there, downloaded and written.

What computes runs on a device: every "quantize", whatever the source holds. What only moves or repacks bytes (cast,
relayout, decode, gather, copies) runs on the CPU, and so does a piece that a device has no memory for. The amax of
floats is found by the CPU while it reads them, where they lie in a file as they are. The bytes are the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.encoding import Encoder
from halfbyte.backends.headroom import Total, Trial, best, merged
from halfbyte.checkpoint.execute.device.lanes import Lane
from halfbyte.checkpoint.execute.device.loading import Slot, load_piece, load_source, slots_in
from halfbyte.checkpoint.execute.device.protocol import DeviceMemoryError, Matrix, Memory
from halfbyte.checkpoint.execute.device.queueing import (
    queue_amax,
    queue_quantize,
    queue_survey,
    read_totals,
    room_for_words,
)
from halfbyte.checkpoint.execute.device.sizes import (
    DevicePlan,
    output_bytes,
    piece_need,
    staged_bytes,
    whole_need,
)
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.group import Group
from halfbyte.checkpoint.execute.pieces import Piece, Sizes, piece_bytes, pieces_of
from halfbyte.checkpoint.execute.reading import Key
from halfbyte.checkpoint.execute.unit import FirstLook, UnitWork
from halfbyte.checkpoint.execute.writer import ShardWriter
from halfbyte.checkpoint.io.buffers import Arena, page_memory
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.plan.types import Unit
from halfbyte.codec.bits import U8


@dataclass(frozen=True)
class Job:
    """Units that one worker computes from one upload."""

    units: Sequence[Unit]
    members: Sequence[Unit]
    """Those whose amax makes the scale of the group; empty if another worker finds it."""
    group: Group | None
    writer: ShardWriter
    arena: Arena

    @property
    def wants_amax(self) -> bool:
        """With a group, to make its scale; without one, to find values that no scale fits."""
        return self.group is None or bool(self.members)


class DeviceWork(UnitWork):
    """Reads and writes as UnitWork does, and computes on devices."""

    def __init__(self, files: Files, engine: Engine, devices: DevicePlan) -> None:
        super().__init__(files, engine)
        self.lanes, self.chunk, self.pinned = devices.lanes, devices.sizes.chunk, devices.pinned
        self._needs: dict[str, int] = {}
        self._at_hand = threading.local()
        """The job of a thread whose sources are on a lane while its scale is settled."""
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def arena(self, size: int) -> Iterator[Arena]:
        """Buffers of which the front is pinned, so that devices copy by themselves and at full speed."""
        memory = page_memory(size)
        front = memory[: self.pinned]
        self.lanes.devices[0].pin(front)
        try:
            yield Arena(size, memory[:size])
        finally:
            self.lanes.devices[0].unpin(front)

    def computes(self, unit: Unit) -> bool:
        """Whether the unit's pieces run on a device: if it is quantized, and a lane can hold its largest piece."""
        if unit.action != "quantize":
            return False
        need = self._needs.get(unit.module)
        if need is None:
            need = self._needs.setdefault(unit.module, piece_need(self.engine, unit, self.chunk))
        return need <= self.lanes.size

    def holds(self, units: Sequence[Unit], members: Sequence[Unit], sizes: Sizes) -> bool:
        """Whether a lane can hold these units from the first pass to the second."""
        if not all(self.computes(unit) for unit in (*units, *members)):
            return super().holds(units, members, sizes)
        return whole_need(self.engine, units, members, self.chunk) <= self.lanes.size

    def encoder(self, unit: Unit) -> Encoder | None:
        return None if self.computes(unit) else super().encoder(unit)

    # --- one piece ---

    def _amax(self, unit: Unit, piece: Piece, raw: npt.NDArray[Any], arena: Arena) -> np.float32:
        if not self.computes(unit):
            return super()._amax(unit, piece, raw, arena)
        mark = arena.mark()
        try:
            found = arena.take(4).view(np.float32)
            with self.lanes.borrow(piece_bytes(unit, piece)) as lane:
                queue_amax(lane, load_piece(self, lane, unit, piece, raw, arena), found)
                lane.stream.record().wait()
            return np.float32(found[0])
        except DeviceMemoryError:
            arena.release(mark)
            self._note_cpu()
            return super()._amax(unit, piece, raw, arena)

    def _blocks(
        self,
        unit: Unit,
        piece: Piece,
        raw: npt.NDArray[Any],
        group: Group | None,
        writer: ShardWriter,
        arena: Arena,
    ) -> tuple[U8, U8] | None:
        if not self.computes(unit):
            return super()._blocks(unit, piece, raw, group, writer, arena)
        mark = arena.mark()
        try:
            amax = arena.take(4).view(np.float32)
            amax[0] = 0
            codes, scales = self._outputs(piece.stop - piece.start, unit.sources[piece.source].columns, arena)
            with self.lanes.borrow(piece_bytes(unit, piece)) as lane:
                matrix = load_piece(self, lane, unit, piece, raw, arena)
                if group is None:
                    queue_amax(lane, matrix, amax)
                made = queue_quantize(self.engine, lane, matrix, group)
                lane.stream.download(made[0], codes)
                lane.stream.download(made[1], scales)
                lane.stream.record().wait()
        except DeviceMemoryError:
            arena.release(mark)
            self._note_cpu()
            return super()._blocks(unit, piece, raw, group, writer, arena)
        if np.isfinite(amax[0]):
            return codes, scales
        self.bad.add_values(unit, piece.source, piece.start, self._values(unit, piece, raw, arena))
        writer.spoil()
        return None

    def _note_cpu(self) -> None:
        with self._lock:
            self.on_cpu += 1

    # --- headroom ---

    def _look(
        self,
        units: Sequence[Unit],
        first: FirstLook,
        chunk: int,
        arena: Arena,
        held: Mapping[Key, npt.NDArray[Any]],
    ) -> float | tuple[float, ...]:
        """The best headroom: the sample and the usual candidates in one round, and no more if the sample says so.

        A device searches every block faster than one could wait for what the sample says.
        """
        usual = Trial(first.candidates)
        trials = [usual] if first.probe is None else [usual, first.probe]
        found = [merged(parts) for parts in self._totals(units, first.amax, trials, chunk, arena, held)]
        if first.probe is not None and first.probe.finds(found[1]):
            return first.probe.candidates
        return best(first.candidates, found[0])

    def _totals(
        self,
        units: Sequence[Unit],
        amax: np.float32,
        trials: Sequence[Trial],
        chunk: int,
        arena: Arena,
        held: Mapping[Key, npt.NDArray[Any]],
    ) -> list[list[tuple[Total, ...]]]:
        """On the lane that holds the units of a whole job, or piece by piece on any."""
        job = getattr(self._at_hand, "job", None)
        if job is not None:
            lane, loaded = job
            return self._totals_of_job(lane, loaded, arena, units, amax, trials)
        return super()._totals(units, amax, trials, chunk, arena, held)

    def _piece_totals(
        self,
        unit: Unit,
        piece: Piece,
        raw: npt.NDArray[Any],
        amax: np.float32,
        trials: Sequence[Trial],
        arena: Arena,
    ) -> list[tuple[Total, ...]]:
        if not self.computes(unit):
            return super()._piece_totals(unit, piece, raw, amax, trials, arena)
        mark = arena.mark()
        try:
            words = room_for_words(arena, 1, trials)
            with self.lanes.borrow(piece_bytes(unit, piece)) as lane:
                matrix = load_piece(self, lane, unit, piece, raw, arena)
                for trial, into in zip(trials, words, strict=True):
                    queue_survey(self.engine, lane, matrix, amax, (trial, piece.start), into[0])
                lane.stream.record().wait()
            return [found[0] for found in read_totals(self.engine, words, amax, trials, [matrix.dtype])]
        except DeviceMemoryError:
            arena.release(mark)
            self._note_cpu()
            return super()._piece_totals(unit, piece, raw, amax, trials, arena)

    def _totals_of_job(
        self,
        lane: Lane,
        loaded: dict[tuple[str, int], Matrix],
        arena: Arena,
        units: Sequence[Unit],
        amax: np.float32,
        trials: Sequence[Trial],
    ) -> list[list[tuple[Total, ...]]]:
        """Sources that are on the lane, and after each other those that were there for their amax only."""
        sources = [(unit, index) for unit in units for index in range(len(unit.sources))]
        mark = arena.mark()
        words = room_for_words(arena, len(sources), trials)
        slots = slots_in(arena, max(staged_bytes(self.engine, unit, self.chunk) for unit in units), self.pinned)
        dtypes = []
        for number, (unit, index) in enumerate(sources):
            before = lane.mark()
            matrix = loaded.get((unit.module, index)) or load_source(self, lane, unit, index, self.chunk, slots)[0]
            for trial, into in zip(trials, words, strict=True):
                queue_survey(self.engine, lane, matrix, amax, (trial, 0), into[number])
            dtypes.append(matrix.dtype)
            lane.release(before)
        lane.stream.record().wait()
        for slot in slots:
            slot.clear()
        found = read_totals(self.engine, words, amax, trials, dtypes)
        arena.release(mark)
        return found

    # --- whole jobs ---

    def whole(
        self,
        units: Sequence[Unit],
        members: Sequence[Unit],
        group: Group | None,
        writer: ShardWriter,
        chunk: int,
        arena: Arena,
    ) -> None:
        """Both passes from one upload. If the memory of a device ends, piece by piece instead."""
        if not all(self.computes(unit) for unit in (*units, *members)):
            super().whole(units, members, group, writer, chunk, arena)
            return
        if group is not None and not members:
            group.wait(writer.stop)  # before a lane is borrowed, which the one that is waited for may need
        job = Job(units, members, group, writer, arena)
        try:
            with self.lanes.borrow(sum(unit.source_bytes for unit in units)) as lane:
                loaded = self._load_all(lane, job)
                if (group is not None and group.bad) or writer.spoiled:
                    writer.spoil()
                    return
                made = {key: queue_quantize(self.engine, lane, matrix, group) for key, matrix in loaded.items()}
                self._write_all(lane, job, made)
        except DeviceMemoryError:  # comes before anything is written
            arena.release()
            settled = group is not None and group.ready.is_set()  # a scale that is known is not found again
            super().whole(units, () if settled else members, group, writer, chunk, arena)
            return
        for unit in units:
            self.forget(unit)

    def _load_all(self, lane: Lane, job: Job) -> dict[tuple[str, int], Matrix]:
        """First pass: the sources of a job on the device by (module, number), and the scale of its group settled."""
        mine = {unit.module for unit in job.units}
        read = list(job.members) or list(job.units)
        sources = [(unit, index) for unit in read for index in range(len(unit.sources))]
        amaxes = job.arena.take(4 * len(sources)).view(np.float32)
        mark, waits = job.arena.mark(), False
        slots = slots_in(job.arena, max(staged_bytes(self.engine, unit, self.chunk) for unit in read), self.pinned)
        loaded: dict[tuple[str, int], Matrix] = {}
        for number, (unit, index) in enumerate(sources):
            before = lane.mark()
            matrix, amax = load_source(self, lane, unit, index, self.chunk, slots)
            if amax is not None:
                amaxes[number] = amax
            elif job.wants_amax:
                queue_amax(lane, matrix, amaxes[number : number + 1])
                waits = True
            if unit.module in mine:
                loaded[unit.module, index] = matrix
            else:
                lane.release(before)
        if waits:
            lane.stream.record().wait()
        for slot in slots:
            slot.clear()
        job.arena.release(mark)
        if job.wants_amax:
            self._at_hand.job = lane, loaded
            try:
                self._settle_found(job, sources, amaxes)
            finally:
                self._at_hand.job = None
        return loaded

    def _settle_found(self, job: Job, sources: Sequence[tuple[Unit, int]], amaxes: npt.NDArray[np.float32]) -> None:
        """Take in the amaxes of whole sources, and settle the scale of their group."""
        for (unit, index), amax in zip(sources, amaxes, strict=True):
            if np.isfinite(amax):
                if job.group is not None:
                    job.group.add(np.float32(amax))
                continue
            self._find_bad(unit, index, job.arena)
            if job.group is not None:
                job.group.bad = True
            else:
                job.writer.spoil()
        if job.group is not None:
            self.settle(job.members, job.group, self.chunk, job.arena)

    def _find_bad(self, unit: Unit, index: int, arena: Arena) -> None:
        """Note the values of a source that have no scale: its pieces are read anew."""
        for piece in pieces_of(unit, self.chunk):
            if piece.source != index:
                continue
            mark = arena.mark()
            values = self._values(unit, piece, self.read(unit, piece, arena), arena)
            if not np.isfinite(self.engine.amax(values)):
                self.bad.add_values(unit, piece.source, piece.start, values)
            arena.release(mark)

    def _write_all(self, lane: Lane, job: Job, made: dict[tuple[str, int], tuple[Memory, Memory]]) -> None:
        """Second pass: download the outputs piece by piece; while one is written, the next ones are on their way."""
        pieces = [(unit, piece) for unit in job.units for piece in pieces_of(unit, self.chunk)]
        slots = slots_in(job.arena, max(output_bytes(self.engine, *each) for each in pieces), self.pinned)
        waiting: deque[tuple[Unit, Piece, Slot, tuple[U8, U8]]] = deque()

        def write_oldest() -> None:
            unit, piece, slot, blocks = waiting.popleft()
            slot.clear()
            self._put_blocks(job.writer, unit, piece, blocks, job.group)

        for unit, piece in pieces:
            if len(waiting) == len(slots):
                write_oldest()
            slots.rotate(-1)
            slot, columns = slots[0], unit.sources[piece.source].columns
            blocks = self._outputs(piece.stop - piece.start, columns, slot.clear())
            widths = self.engine.widths(columns)
            for memory, host, width in zip(made[unit.module, piece.source], blocks, widths, strict=True):
                lane.stream.download(memory[piece.start * width : piece.stop * width], host)
            slot.copied = lane.stream.record()
            waiting.append((unit, piece, slot, blocks))
        while waiting:
            write_oldest()
