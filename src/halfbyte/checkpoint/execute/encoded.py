"""Pieces that one compiled call takes from the source, or from memory, to the shard: quantized, hashed and written.

It serves floats that lie in their file as they are, under a request that the CPU's kernels compute as a whole. What it
does not serve, or cannot describe (NaN, Inf), goes the long way through unit.py. The bytes are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from halfbyte.backends.encoding import Encoder, EncodingResult, EncodingSource, EncodingTarget, Ended
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.pieces import Piece, piece_bytes
from halfbyte.checkpoint.execute.writer import ShardWriter
from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.io.views import NUMPY
from halfbyte.checkpoint.plan.types import Unit


@dataclass(frozen=True)
class EncodingInput:
    """A piece to encode."""

    raw: npt.NDArray[Any] | None
    """Its bytes; None: they are read from the source."""
    amax: float | None
    """Of all that share the tensor scale; None: the format has none."""


def encoder_for(engine: Engine, unit: Unit) -> Encoder | None:
    """What encodes the pieces of a unit, if anything does."""
    if unit.action != "quantize" or unit.factors is not None:
        return None
    if any(source.kind != "float" or not source.weight.contiguous for source in unit.sources):
        return None
    if any(output.part.transposed for output in unit.outputs):
        return None
    return engine.encoder(NUMPY[unit.sources[0].weight.dtype])


def encode_piece(
    encoder: Encoder, files: Files, unit: Unit, piece: Piece, given: EncodingInput, writer: ShardWriter, arena: Arena
) -> bool:
    """Write the codes and scale bytes of a piece. False: the long way has to write them."""
    source, rows = unit.sources[piece.source], piece.stop - piece.start
    first = sum(earlier.rows for earlier in unit.sources[: piece.source]) + piece.start
    parts = {}
    for output in unit.outputs:
        if output.part.role in ("codes", "scales"):
            width = encoder.width(output.part.role, source.columns)
            parts[output.part.role] = output, first * width, rows * width
    if not writer.takes_encoded(tuple(parts.values())):
        return False
    view, size = source.weight, piece_bytes(unit, piece)
    place = view.place(piece.start)
    if given.raw is None:
        found = EncodingSource(size, file=files.descriptor(view.file), offset=place)
    else:
        found = EncodingSource(size, given.raw)
    mark = arena.mark()
    scratch = arena.take(encoder.room)

    def encode(file: int, codes: EncodingTarget, scales: EncodingTarget) -> EncodingResult:
        return encoder.encode(found, given.amax, file, codes, scales, scratch)

    result = writer.put_encoded(parts["codes"], parts["scales"], encode)
    arena.release(mark)
    if result.ended == Ended.NOT_READ:
        files.refuse(view.file, place + result.done, result.error)
    return result.ended == Ended.ENCODED
