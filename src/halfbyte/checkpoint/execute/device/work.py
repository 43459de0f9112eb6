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
from halfbyte.backends.gpu import WORDS, total_of
from halfbyte.backends.headroom import Total, Trial, best, merged
from halfbyte.checkpoint.execute.device.lanes import Lane
from halfbyte.checkpoint.execute.device.protocol import DeviceMemoryError, Encoded, Event, Matrix, Memory
from halfbyte.checkpoint.execute.device.sizes import (
    SLOTS,
    DevicePlan,
    output_bytes,
    piece_need,
    staged_bytes,
    whole_need,
)
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.group import Group
from halfbyte.checkpoint.execute.pieces import SLACK, Piece, Sizes, piece_bytes, pieces_of
from halfbyte.checkpoint.execute.unit import FirstLook, Key, UnitWork
from halfbyte.checkpoint.execute.writer import ShardWriter
from halfbyte.checkpoint.io.buffers import Arena, page_memory
from halfbyte.checkpoint.io.decode import Scales, read_row_scales
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.io.views import NUMPY, SourceMatrix
from halfbyte.checkpoint.plan.types import Unit
from halfbyte.codec.bits import U8


@dataclass
class Slot:
    """Pinned memory for one piece; free when the device has copied what it held."""

    arena: Arena
    copied: Event | None = None

    def clear(self) -> Arena:
        if self.copied is not None:
            self.copied.wait()
            self.copied = None
        self.arena.release()
        return self.arena


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
                self._queue_amax(lane, self._load_piece(lane, unit, piece, raw, arena), found)
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
                matrix = self._load_piece(lane, unit, piece, raw, arena)
                if group is None:
                    self._queue_amax(lane, matrix, amax)
                made = self._queue_quantize(lane, matrix, group)
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

    def _load_piece(self, lane: Lane, unit: Unit, piece: Piece, raw: npt.NDArray[Any], arena: Arena) -> Matrix:
        """Rows that were read, as values on the device."""
        source = unit.sources[piece.source]
        matrix = _matrix(lane, source, piece.stop - piece.start)
        memory = matrix.memory if source.kind == "float" else lane.take(raw.nbytes)
        lane.stream.upload(raw, memory)
        if source.kind != "float":
            self._decode(lane, unit, piece, memory, matrix.memory, arena)
        return matrix

    def _decode(self, lane: Lane, unit: Unit, piece: Piece, raw: Memory, values: Memory, arena: Arena) -> None:
        """Queue the decoding of a piece that is on its way to the device; its scales are read into the arena."""
        source = unit.sources[piece.source]
        known = self.scales_for(unit, piece.source) if source.kind in ("fp8", "nvfp4") else Scales()
        scales = read_row_scales(self.files, source, piece.start, piece.stop, known, arena)
        encoded = Encoded(source, raw, lane.take(scales.array.nbytes), scales)
        lane.stream.upload(scales.array, encoded.scales)
        lane.stream.decode(encoded, values)

    def _queue_amax(self, lane: Lane, matrix: Matrix, into: npt.NDArray[np.float32]) -> None:
        found = lane.take(4)
        lane.stream.amax(matrix, found)
        lane.stream.download(found, into)

    def _queue_quantize(self, lane: Lane, matrix: Matrix, group: Group | None) -> tuple[Memory, Memory]:
        codes, scales = self.engine.widths(matrix.columns)
        made = lane.take(matrix.rows * codes), lane.take(matrix.rows * scales)
        lane.stream.quantize(matrix, None if group is None else group.amax, *made)
        return made

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
            words = _words(arena, 1, trials)
            with self.lanes.borrow(piece_bytes(unit, piece)) as lane:
                matrix = self._load_piece(lane, unit, piece, raw, arena)
                for trial, into in zip(trials, words, strict=True):
                    self._queue_survey(lane, matrix, amax, (trial, piece.start), into[0])
                lane.stream.record().wait()
            return [found[0] for found in self._read_totals(words, amax, trials, [matrix.dtype])]
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
        words = _words(arena, len(sources), trials)
        slots = self._slots(arena, max(staged_bytes(self.engine, unit, self.chunk) for unit in units))
        dtypes = []
        for number, (unit, index) in enumerate(sources):
            before = lane.mark()
            matrix = loaded.get((unit.module, index)) or self._load(lane, unit, index, slots)[0]
            for trial, into in zip(trials, words, strict=True):
                self._queue_survey(lane, matrix, amax, (trial, 0), into[number])
            dtypes.append(matrix.dtype)
            lane.release(before)
        lane.stream.record().wait()
        for slot in slots:
            slot.clear()
        found = self._read_totals(words, amax, trials, dtypes)
        arena.release(mark)
        return found

    def _queue_survey(
        self,
        lane: Lane,
        matrix: Matrix,
        amax: np.float32,
        tried: tuple[Trial, int],
        into: npt.NDArray[np.int64],
    ) -> None:
        """tried: the trial, and how many rows of the tensor come before these."""
        mark = lane.mark()
        scratch = lane.take(matrix.rows * self.engine.widths(matrix.columns)[0])
        found = lane.take(into.nbytes)
        lane.stream.survey(matrix, amax, tried, scratch, found)
        lane.stream.download(found, into)
        lane.release(mark)

    def _read_totals(
        self,
        words: Sequence[npt.NDArray[np.int64]],
        amax: np.float32,
        trials: Sequence[Trial],
        dtypes: Sequence[np.dtype[Any]],
    ) -> list[list[tuple[Total, ...]]]:
        """For each trial the sums of every part; None for a candidate that is left out."""
        return [
            [self._read_part(part, amax, trial.candidates, dtype) for part, dtype in zip(found, dtypes, strict=True)]
            for trial, found in zip(trials, words, strict=True)
        ]

    def _read_part(
        self, words: npt.NDArray[np.int64], amax: np.float32, candidates: tuple[float, ...], dtype: np.dtype[Any]
    ) -> tuple[Total, ...]:
        usable = self.engine.usable_headrooms(amax, candidates, dtype)
        totals = (total_of(each) for each in words.reshape(len(candidates), WORDS).tolist())
        return tuple(total if kept else None for total, kept in zip(totals, usable, strict=True))

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
                made = {key: self._queue_quantize(lane, matrix, group) for key, matrix in loaded.items()}
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
        slots = self._slots(job.arena, max(staged_bytes(self.engine, unit, self.chunk) for unit in read))
        loaded: dict[tuple[str, int], Matrix] = {}
        for number, (unit, index) in enumerate(sources):
            before = lane.mark()
            matrix, amax = self._load(lane, unit, index, slots)
            if amax is not None:
                amaxes[number] = amax
            elif job.wants_amax:
                self._queue_amax(lane, matrix, amaxes[number : number + 1])
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

    def _load(self, lane: Lane, unit: Unit, index: int, slots: deque[Slot]) -> tuple[Matrix, np.float32 | None]:
        """Read a source, and queue its way to the device: its values, and their amax if it was found on the way."""
        source = unit.sources[index]
        matrix = _matrix(lane, source, source.rows)
        if source.kind == "float" and source.weight.contiguous:
            return matrix, self._fill(lane, source, 0, matrix.memory)
        row = source.columns * matrix.dtype.itemsize
        for piece in pieces_of(unit, self.chunk):
            if piece.source != index:
                continue
            slots.rotate(-1)
            arena = slots[0].clear()
            values = matrix.memory[piece.start * row : piece.stop * row]
            memory = values if source.kind == "float" else lane.take((piece.stop - piece.start) * source.row_bytes)
            if source.weight.contiguous:
                self._fill(lane, source, piece.start, memory)
            else:
                lane.stream.upload(self.read(unit, piece, arena), memory)
            if source.kind != "float":
                self._decode(lane, unit, piece, memory, values, arena)
            slots[0].copied = lane.stream.record()
        return matrix, None

    def _fill(self, lane: Lane, source: SourceMatrix, row: int, memory: Memory) -> np.float32 | None:
        """Read rows that lie together in the file straight to the device; their amax if it was found on the way."""
        view = source.weight
        dtype = NUMPY[view.dtype] if source.kind == "float" else None
        found: list[np.float32 | None] = []

        def read(file: int) -> int:
            done, amax = lane.stream.fill(file, view.place(row), memory, dtype)
            found.append(amax)
            return done

        self.files.read_by(view.file, view.place(row), len(memory), read)
        return found[0]

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
        slots = self._slots(job.arena, max(output_bytes(self.engine, *each) for each in pieces))
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

    def _slots(self, arena: Arena, size: int) -> deque[Slot]:
        """Slots of that many bytes, as many as are useful and fit into what is pinned; at least one."""
        count = max(1, min(SLOTS, (self.pinned - arena.mark()) // (size + SLACK)))
        return deque(Slot(arena.part(size)) for _ in range(count))


def _words(arena: Arena, parts: int, trials: Sequence[Trial]) -> list[npt.NDArray[np.int64]]:
    """Room for what a survey of so many parts says: for each trial (parts, words)."""
    sizes = [WORDS * len(trial.candidates) for trial in trials]
    return [arena.take(8 * size * parts).view(np.int64).reshape(parts, size) for size in sizes]


def _matrix(lane: Lane, source: SourceMatrix, rows: int) -> Matrix:
    """Room for the values of rows."""
    dtype = NUMPY[source.weight.dtype] if source.kind == "float" else np.dtype(np.float32)
    return Matrix(lane.take(rows * source.columns * dtype.itemsize), dtype, rows, source.columns)
