"""The way of source rows to a device: read through pinned memory, uploaded, and decoded there if they are encoded."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.checkpoint.execute.device.lanes import Lane
from halfbyte.checkpoint.execute.device.protocol import Encoded, Event, Matrix, Memory
from halfbyte.checkpoint.execute.device.sizes import SLOTS
from halfbyte.checkpoint.execute.pieces import SLACK, Piece, pieces_of
from halfbyte.checkpoint.execute.reading import Reading
from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.io.decode import Scales, read_row_scales
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.io.views import NUMPY, SourceMatrix
from halfbyte.checkpoint.plan.types import Unit


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


def slots_in(arena: Arena, size: int, pinned: int) -> deque[Slot]:
    """Slots of that many bytes, as many as are useful and fit into what is pinned; at least one."""
    count = max(1, min(SLOTS, (pinned - arena.mark()) // (size + SLACK)))
    return deque(Slot(arena.part(size)) for _ in range(count))


def load_piece(reading: Reading, lane: Lane, unit: Unit, piece: Piece, raw: npt.NDArray[Any], arena: Arena) -> Matrix:
    """Rows that were read, as values on the device."""
    source = unit.sources[piece.source]
    matrix = _room(lane, source, piece.stop - piece.start)
    memory = matrix.memory if source.kind == "float" else lane.take(raw.nbytes)
    lane.stream.upload(raw, memory)
    if source.kind != "float":
        _decode(reading, lane, unit, piece, memory, matrix.memory, arena)
    return matrix


def load_source(
    reading: Reading, lane: Lane, unit: Unit, index: int, chunk: int, slots: deque[Slot]
) -> tuple[Matrix, np.float32 | None]:
    """Read a source, and queue its way to the device: its values, and their amax if it was found on the way."""
    source = unit.sources[index]
    matrix = _room(lane, source, source.rows)
    if source.kind == "float" and source.weight.contiguous:
        return matrix, _fill(reading.files, lane, source, 0, matrix.memory)
    row = source.columns * matrix.dtype.itemsize
    for piece in pieces_of(unit, chunk):
        if piece.source != index:
            continue
        slots.rotate(-1)
        arena = slots[0].clear()
        values = matrix.memory[piece.start * row : piece.stop * row]
        memory = values if source.kind == "float" else lane.take((piece.stop - piece.start) * source.row_bytes)
        if source.weight.contiguous:
            _fill(reading.files, lane, source, piece.start, memory)
        else:
            lane.stream.upload(reading.read(unit, piece, arena), memory)
        if source.kind != "float":
            _decode(reading, lane, unit, piece, memory, values, arena)
        slots[0].copied = lane.stream.record()
    return matrix, None


def _room(lane: Lane, source: SourceMatrix, rows: int) -> Matrix:
    """Room for the values of rows."""
    dtype = NUMPY[source.weight.dtype] if source.kind == "float" else np.dtype(np.float32)
    return Matrix(lane.take(rows * source.columns * dtype.itemsize), dtype, rows, source.columns)


def _fill(files: Files, lane: Lane, source: SourceMatrix, row: int, memory: Memory) -> np.float32 | None:
    """Read rows that lie together in the file straight to the device; their amax if it was found on the way."""
    view = source.weight
    dtype = NUMPY[view.dtype] if source.kind == "float" else None
    found: list[np.float32 | None] = []

    def read(file: int) -> int:
        done, amax = lane.stream.fill(file, view.place(row), memory, dtype)
        found.append(amax)
        return done

    files.read_by(view.file, view.place(row), len(memory), read)
    return found[0]


def _decode(reading: Reading, lane: Lane, unit: Unit, piece: Piece, raw: Memory, values: Memory, arena: Arena) -> None:
    """Queue the decoding of a piece that is on its way to the device; its scales are read into the arena."""
    source = unit.sources[piece.source]
    known = reading.scales_for(unit, piece.source) if source.kind in ("fp8", "nvfp4") else Scales()
    scales = read_row_scales(reading.files, source, piece.start, piece.stop, known, arena)
    encoded = Encoded(source, raw, lane.take(scales.array.nbytes), scales)
    lane.stream.upload(scales.array, encoded.scales)
    lane.stream.decode(encoded, values)
