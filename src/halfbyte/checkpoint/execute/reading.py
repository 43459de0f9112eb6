"""Rows of units from the source: as they are stored, as blocks of MXFP4, or decoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from halfbyte.casting.rows import Rows
from halfbyte.checkpoint.execute.cast import MXFP4_BLOCK
from halfbyte.checkpoint.execute.pieces import Piece, pieces_of
from halfbyte.checkpoint.execute.smoothed import smoothed
from halfbyte.checkpoint.io.bfloat16 import bf16
from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.io.decode import Scales, decode_fp4, decode_rows, read_block_scales, read_scales
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.io.views import read_rows
from halfbyte.checkpoint.plan.types import Unit

Key = tuple[str, int]
"""A module and the number of a piece of it."""


class Reading:
    """Reads pieces for one run. Nothing is kept between pieces but the small scales of sources that are being read."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._scales: dict[tuple[str, int], Scales] = {}

    def scales_for(self, unit: Unit, index: int) -> Scales:
        """The small tensors of a source, read once; forgotten with `forget`."""
        key = (unit.module, index)
        found = self._scales.get(key)
        if found is None:
            found = self._scales.setdefault(key, read_scales(self.files, unit.sources[index]))
        return found

    def forget(self, unit: Unit) -> None:
        for index in range(len(unit.sources)):
            self._scales.pop((unit.module, index), None)

    def read(self, unit: Unit, piece: Piece, arena: Arena) -> npt.NDArray[Any]:
        return read_rows(self.files, unit.sources[piece.source].weight, piece.start, piece.stop, arena)

    def _all_pieces(
        self, units: Sequence[Unit], chunk: int, arena: Arena, held: Mapping[Key, npt.NDArray[Any]]
    ) -> Iterator[tuple[Unit, Piece, npt.NDArray[Any]]]:
        """Every piece with its raw bytes, read again if they are not held; each is gone when the next one comes."""
        for unit in units:
            for piece in pieces_of(unit, chunk):
                mark = arena.mark()
                raw = held.get((unit.module, piece.number))
                yield unit, piece, self.read(unit, piece, arena) if raw is None else raw
                arena.release(mark)

    def _rows(self, unit: Unit, piece: Piece, raw: npt.NDArray[Any], arena: Arena) -> Rows:
        """A piece of an MXFP4 source."""
        source = unit.sources[piece.source]
        scales = read_block_scales(self.files, source, piece.start, piece.stop, arena)
        return Rows(raw, scales, source.columns, MXFP4_BLOCK)

    def _all_rows(self, units: Sequence[Unit], chunk: int, arena: Arena) -> Iterator[Rows]:
        """Every piece of MXFP4 units, read anew; each is gone when the next one comes."""
        for unit in units:
            for piece in pieces_of(unit, chunk):
                mark = arena.mark()
                yield self._rows(unit, piece, self.read(unit, piece, arena), arena)
                arena.release(mark)

    def _values(self, unit: Unit, piece: Piece, raw: npt.NDArray[Any], arena: Arena) -> npt.NDArray[Any]:
        source = unit.sources[piece.source]
        scales = Scales() if source.kind == "float" else self.scales_for(unit, piece.source)
        values = decode_rows(source, raw, piece.start, scales, arena, self.files)
        return values if unit.factors is None else smoothed(unit, unit.factors, piece, values)

    def _plain(self, unit: Unit, piece: Piece, raw: npt.NDArray[Any], arena: Arena) -> npt.NDArray[Any]:
        """Values of a quantized source in BF16, rounded once from float32."""
        source = unit.sources[piece.source]
        if source.kind in ("mxfp4", "nvfp4"):
            scales = read_block_scales(self.files, source, piece.start, piece.stop, arena)
            return decode_fp4(source, raw, scales, self.scales_for(unit, piece.source), "bfloat16")
        return bf16(self._values(unit, piece, raw, arena))
