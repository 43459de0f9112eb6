"""How the units of a plan are cut into pieces, and the memory that a piece takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from halfbyte.checkpoint.execute.hashes import LEAF
from halfbyte.checkpoint.io.decode import decoding_memory
from halfbyte.checkpoint.io.views import SourceMatrix, scratch_bytes
from halfbyte.checkpoint.plan.types import Action, Unit

SLACK = 1 << 16
"""Bytes of an arena that alignment may take."""
EVEN = 32 * LEAF
"""Elements whose codes and scale bytes, of whatever format, are whole leaves of the hash."""
OUTPUT: dict[Action, float] = {"quantize": 1.25, "cast": 1.25, "decode": 2, "relayout": 0, "gather": 0, "rescale": 8}
"""Bytes per element of what is made from a piece, with what is needed to make it."""


@dataclass(frozen=True)
class Sizes:
    """How work is cut. Never changes an output byte."""

    chunk: int
    """Source bytes of a piece."""
    arena: int
    """Bytes that one worker may hold."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one source of a unit."""

    number: int
    """Of this piece within its unit, in the order of the output."""
    source: int
    start: int
    stop: int


def pieces_of(unit: Unit, chunk_bytes: int) -> Iterator[Piece]:
    """A unit cut into pieces of about that many source bytes. Matrices that are stored transposed stay whole."""
    number = 0
    for index, source in enumerate(unit.sources):
        step = _rows_of_piece(unit, source, chunk_bytes)
        for start in range(0, source.rows, step):
            yield Piece(number, index, start, min(source.rows, start + step))
            number += 1


def _rows_of_piece(unit: Unit, source: SourceMatrix, chunk_bytes: int) -> int:
    """Rows of a source that make a piece. If many do, their outputs end where leaves of the hash end."""
    if any(output.part.transposed for output in unit.outputs):
        return source.rows
    rows = max(1, chunk_bytes // max(1, source.row_bytes))
    together = EVEN // math.gcd(EVEN, source.columns)
    return rows - rows % together if rows > together else rows


def piece_bytes(unit: Unit, piece: Piece) -> int:
    return unit.sources[piece.source].row_bytes * (piece.stop - piece.start)


def piece_memory(unit: Unit, piece: Piece) -> int:
    """Bytes that reading, decoding and quantizing one piece takes beside its own raw bytes.

    An arena has room for all of them. Those that are allocated elsewhere leave as much of it untouched.
    """
    source, rows = unit.sources[piece.source], piece.stop - piece.start
    outputs = int(rows * source.columns * OUTPUT[unit.action])
    scales = 0 if source.scale is None else rows * source.scale.columns * 4
    direct = unit.action == "decode" and source.kind in ("mxfp4", "nvfp4")  # codes become BF16 without float32 between
    values = decoding_memory(source, rows) if unit.action in ("quantize", "decode") and not direct else 0
    scaled = 0 if unit.factors is None else rows * source.columns * 8
    return scratch_bytes(source, rows) + values + outputs + scales + scaled + SLACK


def widened_bytes(unit: Unit, chunk: int) -> int:
    """Bytes of the unit's largest piece in float32, as statistics take it."""
    if unit.action != "quantize":
        return 0
    return max((piece.stop - piece.start) * unit.sources[piece.source].columns * 4 for piece in pieces_of(unit, chunk))


def largest_piece(unit: Unit, chunk: int) -> int:
    """Bytes of the unit's largest piece, raw bytes included. The first piece of each source has the most rows."""
    firsts = (
        Piece(0, index, 0, min(source.rows, _rows_of_piece(unit, source, chunk)))
        for index, source in enumerate(unit.sources)
        if source.rows
    )
    return max(piece_bytes(unit, piece) + piece_memory(unit, piece) for piece in firsts)
