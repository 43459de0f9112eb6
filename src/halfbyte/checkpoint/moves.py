"""Block data that moves without being quantized: MXFP4 blocks under an NVFP4 scale, stored words.

`halfbyte.cast` sees all tensors that share a scale at once. Here they come in pieces: a first pass finds the exponents
of the blocks, a second one writes under 2**(k_max − 8). Wherever all blocks fit that window the bytes are those of
`cast`; beyond it each half block takes its best scale and codes under the same tensor scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halfbyte.casting.hybrid import outside
from halfbyte.casting.optimal import write
from halfbyte.casting.rows import Group as CastGroup
from halfbyte.casting.rows import Piece as CastPiece
from halfbyte.casting.scales import power
from halfbyte.casting.verbatim import keep
from halfbyte.casting.window import HIGHEST, WINDOW
from halfbyte.checkpoint.buffers import Arena
from halfbyte.checkpoint.matrix import Files, View, read_rows
from halfbyte.codec.bits import U8
from halfbyte.contracts import get_contract
from halfbyte.errors import CheckpointError
from halfbyte.formats import get_format

BLOCK = get_format("mxfp4").block
STORES_MULTIPLIER = get_contract("modelopt", get_format("nvfp4"))


@dataclass(frozen=True)
class Exponents:
    """Smallest and largest exponent of the blocks that are not all zero."""

    low: int
    high: int

    @property
    def m(self) -> int:
        """The tensor scale is 2**m."""
        return self.high - HIGHEST

    @property
    def fit(self) -> bool:
        return self.high - self.low <= WINDOW


NO_BLOCKS = Exponents(HIGHEST, HIGHEST)
"""All blocks are zero: the tensor scale is 1."""


def join(a: Exponents | None, b: Exponents | None) -> Exponents | None:
    if a is None or b is None:
        return a or b
    return Exponents(min(a.low, b.low), max(a.high, b.high))


def find_exponents(codes: U8, scales: U8, width: int, module: str) -> Exponents | None:
    """The exponents of some rows; None if every block is zero. A scale of 255 is NaN and refused."""
    if scales.size and int(scales.max()) == 255:
        raise CheckpointError(f"{module}: an E8M0 scale is 255, which is NaN; repair the source, or --keep the module")
    found = CastGroup([CastPiece(codes, scales, width, BLOCK)]).exponent_range
    return None if found is None else Exponents(*found)


def cast_rows(codes: U8, scales: U8, width: int, exponents: Exponents) -> tuple[U8, U8, int]:
    """MXFP4 rows as NVFP4 rows under the shared scale, and how many blocks lay outside its window."""
    piece = CastPiece(codes, scales, width, BLOCK)
    if exponents.fit:
        return *keep(piece, exponents.m, threads=1), 0
    beyond = outside(piece, exponents.m).reshape(*scales.shape, -1).any(axis=-1)
    return *write(piece, power(exponents.m, STORES_MULTIPLIER)), int(beyond.sum())


def stored_word(files: Files, view: View | None, module: str) -> np.float32:
    """A scalar as the source stores it."""
    if view is None:
        raise CheckpointError(f"{module} has no stored scale where one is needed")
    return np.float32(read_rows(files, view, 0, 1, Arena(256)).astype(np.float32)[0, 0])
