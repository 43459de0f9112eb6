"""Units of a plan on GPUs: read into pinned memory, uploaded once, amax and quantize there, downloaded and written.

What computes runs on a device: every "quantize", whatever the source holds. What only moves or repacks bytes (cast,
relayout, decode, gather, copies) runs on the CPU, and so does a piece that a device has no memory for. The bytes are
the same.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.checkpoint.execute.device.lanes import Lane, Lanes
from halfbyte.checkpoint.execute.device.protocol import DeviceMemoryError, Encoded, Event, Matrix, Memory
from halfbyte.checkpoint.execute.device.sizes import SLOTS, piece_need, whole_need
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.pieces import SLACK, Piece, Sizes, largest_piece, piece_bytes, pieces_of
from halfbyte.checkpoint.execute.unit import Group, UnitWork
from halfbyte.checkpoint.execute.writer import ShardWriter
from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.io.decode import Scales, read_row_scales
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.io.views import NUMPY, SourceMatrix
from halfbyte.checkpoint.plan.types import Unit
from halfbyte.codec.bits import U8

HUGE_PAGE = 2 << 20


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


class DeviceWork(UnitWork):
    """Reads and writes as UnitWork does, and computes on devices."""

    def __init__(self, files: Files, engine: Engine, lanes: Lanes, sizes: Sizes) -> None:
        super().__init__(files, engine)
        self.lanes, self.sizes = lanes, sizes
        self._needs: dict[str, int] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def arena(self, size: int) -> Iterator[Arena]:
        """Pinned buffers, so that devices copy by themselves and at full speed."""
        memory = page_memory(size)
        self.lanes.devices[0].pin(memory)
        try:
            yield Arena(size, memory[:size])
        finally:
            self.lanes.devices[0].unpin(memory)

    # --- what runs where ---

    def computes(self, unit: Unit) -> bool:
        """Whether the unit's pieces run on a device: if it is quantized, and a lane can hold its largest piece."""
        if unit.action != "quantize":
            return False
        need = self._needs.get(unit.module)
        if need is None:
            need = self._needs.setdefault(unit.module, piece_need(self.engine, unit, self.sizes.chunk))
        return need <= self.lanes.size

    def holds(self, units: Sequence[Unit], members: Sequence[Unit], sizes: Sizes) -> bool:
        """Whether a lane can hold these units from the first pass to the second."""
        if not all(self.computes(unit) for unit in (*units, *members)):
            return super().holds(units, members, sizes)
        return whole_need(self.engine, units, members, sizes.chunk) <= self.lanes.size

    # --- one piece ---

    def _amax(self, unit: Unit, piece: Piece, raw: npt.NDArray[Any], arena: Arena) -> np.float32:
        if not self.computes(unit):
            return super()._amax(unit, piece, raw, arena)
        mark = arena.mark()
        try:
            found = arena.take(4).view(np.float32)
            with self.lanes.borrow(piece_bytes(unit, piece)) as lane:
                matrix = self._load_piece(lane, unit, piece, raw, arena)
                self._queue_amax(lane, matrix, found)
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
            # The lane is given back before anything is written: who writes may wait for another task's piece.
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
        matrix = _matrix(lane, unit.sources[piece.source], piece.stop - piece.start)
        self._upload(lane, unit, piece, raw, matrix.memory, arena)
        return matrix

    def _upload(
        self, lane: Lane, unit: Unit, piece: Piece, raw: npt.NDArray[Any], values: Memory, arena: Arena
    ) -> None:
        """Queue the copy of a piece, and its decoding if it is encoded."""
        source, stream = unit.sources[piece.source], lane.stream
        if source.kind == "float":
            stream.upload(raw, values)
            return
        known = self.scales_for(unit, piece.source) if source.kind in ("fp8", "nvfp4") else Scales()
        scales = read_row_scales(self.files, source, piece.start, piece.stop, known, arena)
        encoded = Encoded(source, lane.take(raw.nbytes), lane.take(scales.array.nbytes), scales)
        stream.upload(raw, encoded.raw)
        stream.upload(scales.array, encoded.scales)
        stream.decode(encoded, values)

    def _queue_amax(self, lane: Lane, matrix: Matrix, into: npt.NDArray[np.float32]) -> None:
        found = lane.take(4)
        lane.stream.amax(matrix, found)
        lane.stream.download(found, into)

    def _queue_quantize(self, lane: Lane, matrix: Matrix, group: Group | None) -> tuple[Memory, Memory]:
        codes, scales = self.engine.widths(matrix.columns)
        made = lane.take(matrix.rows * codes), lane.take(matrix.rows * scales)
        lane.stream.quantize(matrix, None if group is None else group.amax, *made)
        return made

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
        """Both passes from one upload."""
        if not all(self.computes(unit) for unit in (*units, *members)):
            super().whole(units, members, group, writer, chunk, arena)
            return
        if group is not None and not members:
            group.wait(writer.stop)
        try:
            with self.lanes.borrow(sum(unit.source_bytes for unit in units)) as lane:
                self._whole_on(lane, units, members, group, writer, arena)
        except DeviceMemoryError:  # raised before anything is written: piece by piece, each with a lane of its own
            arena.release()
            super().whole(units, members, group, writer, chunk, arena)
            return
        for unit in units:
            self.forget(unit)

    def _whole_on(
        self,
        lane: Lane,
        units: Sequence[Unit],
        members: Sequence[Unit],
        group: Group | None,
        writer: ShardWriter,
        arena: Arena,
    ) -> None:
        mine = {unit.module for unit in units}
        loaded: dict[tuple[str, int], Matrix] = {}
        read = list(members) or list(units)
        sources = [(unit, index) for unit in read for index in range(len(unit.sources))]
        amaxes = arena.take(4 * len(sources)).view(np.float32)
        asks = group is None or bool(members)
        mark = arena.mark()
        slots = _slots(arena, max(largest_piece(unit, self.sizes.chunk) for unit in read))
        for number, (unit, index) in enumerate(sources):
            before = lane.mark()
            matrix = self._load(lane, unit, index, slots)
            if asks:
                self._queue_amax(lane, matrix, amaxes[number : number + 1])
            if unit.module in mine:
                loaded[unit.module, index] = matrix
            else:
                lane.release(before)
        lane.stream.record().wait()
        arena.release(mark)
        if asks:
            self._settle_found(units, members, group, sources, amaxes, writer, arena)
        if (group is not None and group.bad) or writer.spoiled:
            writer.spoil()
            return
        made = {key: self._queue_quantize(lane, matrix, group) for key, matrix in loaded.items()}
        self._write_all(lane, units, made, group, writer, arena)

    def _settle_found(
        self,
        units: Sequence[Unit],
        members: Sequence[Unit],
        group: Group | None,
        sources: Sequence[tuple[Unit, int]],
        amaxes: npt.NDArray[np.float32],
        writer: ShardWriter,
        arena: Arena,
    ) -> None:
        """Take in the amaxes of whole sources, and settle the scale of their group."""
        for (unit, index), amax in zip(sources, amaxes, strict=True):
            if np.isfinite(amax):
                if group is not None:
                    group.add(np.float32(amax))
                continue
            self._find_bad(unit, index, arena)
            if group is not None:
                group.bad = True
            else:
                writer.spoil()
        if group is not None:
            self.settle(members, group, self.sizes.chunk, arena)

    def _find_bad(self, unit: Unit, index: int, arena: Arena) -> None:
        """Note the values of a source that have no scale: its pieces are read anew."""
        for piece in pieces_of(unit, self.sizes.chunk):
            if piece.source != index:
                continue
            mark = arena.mark()
            values = self._values(unit, piece, self.read(unit, piece, arena), arena)
            if not np.isfinite(self.engine.amax(values)):
                self.bad.add_values(unit, piece.source, piece.start, values)
            arena.release(mark)

    def _load(self, lane: Lane, unit: Unit, index: int, slots: deque[Slot]) -> Matrix:
        """Read a source piece by piece into pinned memory, and queue its way to the device."""
        source = unit.sources[index]
        matrix = _matrix(lane, source, source.rows)
        row = source.columns * matrix.dtype.itemsize
        for piece in pieces_of(unit, self.sizes.chunk):
            if piece.source != index:
                continue
            slots.rotate(-1)
            arena = slots[0].clear()
            raw = self.read(unit, piece, arena)
            self._upload(lane, unit, piece, raw, matrix.memory[piece.start * row : piece.stop * row], arena)
            slots[0].copied = lane.stream.record()
        return matrix

    def _write_all(
        self,
        lane: Lane,
        units: Sequence[Unit],
        made: dict[tuple[str, int], tuple[Memory, Memory]],
        group: Group | None,
        writer: ShardWriter,
        arena: Arena,
    ) -> None:
        """Download the outputs piece by piece; while one is written, the next ones are on their way."""
        pieces = [(unit, piece) for unit in units for piece in pieces_of(unit, self.sizes.chunk)]
        room = max(self._output_room(unit, piece) for unit, piece in pieces)
        slots = _slots(arena, room)
        waiting: deque[tuple[Unit, Piece, Slot, tuple[U8, U8]]] = deque()

        def write_oldest() -> None:
            unit, piece, slot, blocks = waiting.popleft()
            slot.clear()
            self._put_blocks(writer, unit, piece, blocks, group)

        for unit, piece in pieces:
            if len(waiting) == len(slots):
                write_oldest()
            slots.rotate(-1)
            slot = slots[0]
            columns = unit.sources[piece.source].columns
            blocks = self._outputs(piece.stop - piece.start, columns, slot.clear())
            for memory, host, width in zip(
                made[unit.module, piece.source], blocks, self.engine.widths(columns), strict=True
            ):
                lane.stream.download(memory[piece.start * width : piece.stop * width], host)
            slot.copied = lane.stream.record()
            waiting.append((unit, piece, slot, blocks))
        while waiting:
            write_oldest()

    def _output_room(self, unit: Unit, piece: Piece) -> int:
        codes, scales = self.engine.widths(unit.sources[piece.source].columns)
        return (piece.stop - piece.start) * (codes + scales) + 4096


def _slots(arena: Arena, size: int) -> deque[Slot]:
    """Slots of that many bytes, as many as are useful and fit; at least one."""
    count = max(1, min(SLOTS, arena.left // (size + SLACK)))
    return deque(Slot(arena.part(min(size, arena.left))) for _ in range(count))


def _matrix(lane: Lane, source: SourceMatrix, rows: int) -> Matrix:
    """Room for the values of rows."""
    dtype = NUMPY[source.weight.dtype] if source.kind == "float" else np.dtype(np.float32)
    return Matrix(lane.take(rows * source.columns * dtype.itemsize), dtype, rows, source.columns)


def page_memory(size: int) -> U8:
    """Fresh pages, large ones if the system has them: these are pinned several times as fast."""
    pages = mmap.mmap(-1, size + -size % HUGE_PAGE)
    with contextlib.suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)
