"""Pieces cover every row once, and their memory is the sum that the module names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from halfbyte.checkpoint.execute.pieces import (
    EVEN,
    SLACK,
    Piece,
    largest_piece,
    piece_bytes,
    piece_memory,
    pieces_of,
    widened_bytes,
)
from halfbyte.checkpoint.io.decode import decoding_memory


def stand_in(action: str = "quantize", kind: str = "float", rows: int = 10, scale_columns: int = 0) -> Any:
    """A unit of two sources of 64 columns, of which only what pieces look at is there."""

    def source(rows: int) -> Any:
        view = SimpleNamespace(dtype="BF16", columns=64, row_stride=64, column_stride=1)
        scale = SimpleNamespace(columns=scale_columns) if scale_columns else None
        return SimpleNamespace(kind=kind, rows=rows, columns=64, row_bytes=128, scale=scale, weight=view)

    output = SimpleNamespace(part=SimpleNamespace(transposed=False))
    return SimpleNamespace(action=action, sources=(source(rows), source(3)), outputs=(output,), factors=None)


@pytest.mark.parametrize(("chunk", "steps"), [(128 * 4, 4), (128 * 5 - 1, 4), (1, 1), (127, 1), (128 * 100, 100)])
def test_pieces_cover_every_row_once(chunk: int, steps: int) -> None:
    unit = stand_in()
    found = list(pieces_of(unit, chunk))
    assert [piece.number for piece in found] == list(range(len(found)))
    for index, source in enumerate(unit.sources):
        mine = [piece for piece in found if piece.source == index]
        assert [row for piece in mine for row in range(piece.start, piece.stop)] == list(range(source.rows))
        assert all(piece.stop - piece.start == steps for piece in mine[:-1])
    assert sum(piece_bytes(unit, piece) for piece in found) == 13 * 128
    assert piece_bytes(unit, Piece(1, 0, 4, 8)) == 4 * 128


def test_transposed_matrices_stay_whole() -> None:
    unit = stand_in()
    unit.outputs[0].part.transposed = True
    assert [(piece.start, piece.stop) for piece in pieces_of(unit, 1)] == [(0, 10), (0, 3)]


@pytest.mark.parametrize(
    ("action", "kind", "output", "decodes"),
    [
        ("quantize", "float", 1.25, True),
        ("quantize", "nvfp4", 1.25, True),
        ("cast", "mxfp4", 1.25, False),
        ("decode", "mxfp4", 2, False),
        ("decode", "nvfp4", 2, False),
        ("decode", "fp8", 2, True),
        ("relayout", "nvfp4", 0, False),
        ("gather", "float", 0, False),
        ("rescale", "float", 8, False),
    ],
)
def test_the_memory_of_a_piece(action: str, kind: str, output: float, decodes: bool) -> None:
    unit = stand_in(action, kind, scale_columns=4)
    source, piece = unit.sources[0], Piece(1, 0, 4, 10)
    values = decoding_memory(source, 6) if decodes else 0
    wanted = 6 * 64 * output + 6 * 4 * 4 + values + 4096 + SLACK
    assert piece_memory(unit, piece) == wanted
    assert largest_piece(unit, 6 * 128) == 6 * 128 + wanted
    assert piece_memory(stand_in(action, kind), piece) == wanted - 6 * 4 * 4
    unit.factors = "some"
    assert piece_memory(unit, piece) == wanted + 6 * 64 * 8


def test_values_that_statistics_take() -> None:
    """In float32, of the piece with the most rows; only what is quantized takes any."""
    assert [widened_bytes(stand_in(), chunk) for chunk in (1, 7 * 128, 1 << 20)] == [256, 7 * 256, 10 * 256]
    assert widened_bytes(stand_in(rows=2), 1 << 20) == 3 * 256, "of the second source"
    for action in ("cast", "decode", "relayout", "gather", "rescale"):
        assert widened_bytes(stand_in(action), 1 << 20) == 0


def test_outputs_end_where_leaves_of_the_hash_end() -> None:
    """Codes and scale bytes of half a million numbers fill them; fewer rows than that are not cut for it."""
    assert EVEN == 1 << 19
    unit = stand_in(rows=1 << 15)
    for rows, step in ((8191, 8191), (8192, 8192), (8193, 8192), (16383, 8192), (16384, 16384), (20000, 16384)):
        first, *_ = pieces_of(unit, rows * 128)
        assert first.stop == step
        assert largest_piece(unit, rows * 128) == step * 128 + piece_memory(unit, Piece(0, 0, 0, step))
