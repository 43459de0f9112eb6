"""How much memory of a lane, and of pinned buffers, a conversion takes."""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte.checkpoint.execute.device.lanes import ALIGNMENT
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.pieces import SLACK, Sizes, largest_piece, pieces_of
from halfbyte.checkpoint.io.views import SourceMatrix
from halfbyte.checkpoint.plan.types import Unit

SLOTS = 3
"""Pieces in flight between a worker and its device: one is filled while others are copied."""

SMALLEST_CHUNK = 1 << 16
"""Bytes of a piece below which calls cost more than the work: a unit that needs smaller ones runs on the CPU."""


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


def device_sizes(engine: Engine, units: Sequence[Unit], sizes: Sizes, lane: int) -> Sizes:
    """Pieces that a lane can hold, and no more pinned memory than the slots need: pinning takes time."""
    computed = [unit for unit in units if unit.action == "quantize"]
    chunk = sizes.chunk
    while chunk // 2 >= SMALLEST_CHUNK and any(piece_need(engine, unit, chunk) > lane for unit in computed):
        chunk //= 2
    largest = max((largest_piece(unit, chunk) for unit in units), default=0)
    return Sizes(chunk, min(sizes.arena, max(SLOTS * (largest + SLACK), sizes.chunk) + SLACK))
