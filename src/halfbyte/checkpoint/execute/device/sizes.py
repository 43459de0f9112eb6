"""How much memory of a lane, and of pinned buffers, a conversion takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.checkpoint.execute.device.lanes import ALIGNMENT, Lanes, lane_sizes
from halfbyte.checkpoint.execute.device.protocol import STAGED, Device
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.pieces import SLACK, Piece, Sizes, largest_piece, pieces_of
from halfbyte.checkpoint.io.views import SourceMatrix, read_scratch
from halfbyte.checkpoint.plan.types import Unit

SLOTS = 3
"""Pieces in flight between a worker and its device: one is filled while others are copied."""

LARGEST_CHUNK = 16 << 20
"""Bytes of a piece beyond which calls cost next to nothing; larger ones would only take longer to pin."""

SMALLEST_CHUNK = 1 << 16
"""Bytes of a piece below which calls cost more than the work: a unit that needs smaller ones runs on the CPU."""


@dataclass(frozen=True)
class Limits:
    """What a run may use."""

    memory: int
    """Bytes on the host, for the buffers of all workers and of all lanes."""
    gpu_memory: int | None
    """Bytes per device; None: a quarter of what is free, at most 8 GiB."""
    chunk: int
    """The most source bytes of a piece."""


def worker_memory(memory: int, workers: int, lanes: int) -> int:
    """Bytes for the buffers of one worker: a tenth is left for objects, and each lane has pinned buffers of its own."""
    return (memory - lanes * STAGED) * 9 // 10 // workers


def most_lanes(workers: int, devices: int) -> int:
    """Lanes that so many workers may ask for, all devices together."""
    return -(-workers // devices) * devices if devices else 0


def rows_need(engine: Engine, source: SourceMatrix, rows: int) -> int:
    """Bytes of a lane that rows of a source take, with their values, outputs and amax."""
    held = rows * source.row_bytes
    if source.kind != "float":
        held += rows * source.columns * 4
        held += 0 if source.scale is None else (rows + 1) * source.scale.columns * 4
    return held + rows * sum(engine.widths(source.columns)) + 6 * ALIGNMENT


def piece_need(engine: Engine, unit: Unit, chunk: int) -> int:
    """Bytes of a lane that the unit's largest piece takes."""
    return max(
        rows_need(engine, unit.sources[piece.source], piece.stop - piece.start) for piece in pieces_of(unit, chunk)
    )


def whole_need(engine: Engine, units: Sequence[Unit], members: Sequence[Unit], chunk: int) -> int:
    """Bytes of a lane that hold all of these units, and one source at a time of the other members."""
    mine = {unit.module for unit in units}
    held = sum(_source_need(engine, unit, chunk) for unit in units)
    others = [_source_need(engine, unit, chunk) for unit in members if unit.module not in mine]
    return held + max(others, default=0)


def _source_need(engine: Engine, unit: Unit, chunk: int) -> int:
    """Bytes for all sources of a unit. Pieces of encoded ones lie apart, hence a sum over pieces."""
    cut = pieces_of(unit, chunk)
    return sum(rows_need(engine, unit.sources[piece.source], piece.stop - piece.start) for piece in cut)


def output_bytes(engine: Engine, unit: Unit, piece: Piece) -> int:
    """Pinned bytes for the outputs of a piece."""
    widths = engine.widths(unit.sources[piece.source].columns)
    return (piece.stop - piece.start) * sum(widths) + 4096


def staged_bytes(engine: Engine, unit: Unit, chunk: int) -> int:
    """Pinned bytes for the unit's largest piece: as it is read, with its scales and outputs."""

    def need(piece: Piece) -> int:
        source, rows = unit.sources[piece.source], piece.stop - piece.start
        scales = 0 if source.scale is None else (rows + 1) * source.scale.columns * 8
        raw = rows * source.row_bytes + read_scratch(source.weight, rows)
        return raw + scales + output_bytes(engine, unit, piece)

    return max(need(piece) for piece in pieces_of(unit, chunk)) + SLACK


@dataclass(frozen=True)
class DevicePlan:
    """The memory with which a run computes on devices."""

    lanes: Lanes
    sizes: Sizes
    pinned: int
    """Bytes at the front of each worker's buffers that are pinned; no more than are needed, because it takes time."""


def plan_devices(
    devices: Sequence[Device], engine: Engine, units: Sequence[Unit], workers: int, limits: Limits
) -> DevicePlan:
    """Lanes, and pieces that a lane and the memory of a worker can hold."""
    lanes = Lanes(devices, *lane_sizes(devices, workers, limits.gpu_memory))
    computed = [unit for unit in units if unit.action == "quantize"]
    memory = worker_memory(limits.memory, workers, lanes.count * len(devices))
    chunk = min(limits.chunk, LARGEST_CHUNK)

    def fits(chunk: int) -> bool:
        held = all(largest_piece(unit, chunk) + 2 * SLACK <= memory for unit in units)
        return held and all(piece_need(engine, unit, chunk) <= lanes.size for unit in computed)

    while chunk // 2 >= min(SMALLEST_CHUNK, limits.chunk) and not fits(chunk):
        chunk //= 2
    largest = max((largest_piece(unit, chunk) for unit in units), default=0)
    pinned = max((staged_bytes(engine, unit, chunk) for unit in computed), default=0) + SLACK
    arena = min(memory, max(largest + SLACK, pinned, chunk) + SLACK)
    return DevicePlan(lanes, Sizes(chunk, arena), min(arena, pinned))
