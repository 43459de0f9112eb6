"""How the units of a plan are cut into pieces, and the memory that a piece takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from halfbyte.checkpoint.io.views import scratch_bytes
from halfbyte.checkpoint.plan.types import Unit

SLACK = 1 << 16
"""Bytes of an arena that alignment may take."""


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
    turned = any(output.part.transposed for output in unit.outputs)
    for index, source in enumerate(unit.sources):
        step = source.rows if turned else max(1, chunk_bytes // max(1, source.row_bytes))
        for start in range(0, source.rows, step):
            yield Piece(number, index, start, min(source.rows, start + step))
            number += 1


def piece_bytes(unit: Unit, piece: Piece) -> int:
    return unit.sources[piece.source].row_bytes * (piece.stop - piece.start)


def piece_memory(unit: Unit, piece: Piece) -> int:
    """Bytes that reading, decoding and quantizing one piece takes beside its own raw bytes: from an arena, or by numpy."""
    source, rows = unit.sources[piece.source], piece.stop - piece.start
    elements = rows * source.columns
    # Quantized: codes, scales and a list of blocks that no table describes. Decoded: BF16.
    outputs = {"gather": 0, "relayout": 0, "decode": elements * 2}.get(unit.action, elements * 5 // 4)
    scales = 0 if source.scale is None else rows * source.scale.columns * 4
    return scratch_bytes(source, rows) + outputs + scales + SLACK


def largest_piece(unit: Unit, chunk: int) -> int:
    """Arena bytes of the unit's largest piece, raw bytes included."""
    return max(piece_bytes(unit, piece) + piece_memory(unit, piece) for piece in pieces_of(unit, chunk))
