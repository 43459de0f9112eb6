"""The MXFP4 operand of a cast: matrices of bytes, and what is asked of them again and again, computed once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.arrays import to_numpy
from halfbyte.casting.window import LOWEST, WINDOW, used_range, zero_blocks
from halfbyte.codec.bits import U8
from halfbyte.codec.blocks import ceil_div
from halfbyte.errors import InputError, UnsupportedError
from halfbyte.formats import E2M1
from halfbyte.types import QuantizedTensor

F64 = npt.NDArray[np.float64]
I16 = npt.NDArray[np.int16]
Bools = npt.NDArray[np.bool_]

HALF = 16
"""An NVFP4 block: half of an MXFP4 block."""

MAGNITUDES = E2M1.magnitudes.astype(np.float64)


def _counting_table() -> npt.NDArray[np.uint64]:
    """For each byte of two codes: how often each of the eight magnitudes occurs, eight bits a magnitude."""
    codes = np.arange(256, dtype=np.uint64)
    one = np.uint64(1)
    low, high = (codes & np.uint64(7)) * np.uint64(8), ((codes >> np.uint64(4)) & np.uint64(7)) * np.uint64(8)
    return np.asarray((one << low) + (one << high), np.uint64)


COUNTING = _counting_table()


@dataclass(frozen=True)
class Piece:
    """Rows of one MXFP4 tensor. A group of pieces shares a global scale."""

    codes: U8
    """(rows, bytes), packed."""
    scales: U8
    """(rows, blocks), E8M0."""
    width: int
    """Elements of a row; the last block may be cut short."""
    block: int

    @property
    def halves(self) -> int:
        """NVFP4 blocks of a row."""
        return ceil_div(self.width, HALF)

    @functools.cached_property
    def whole(self) -> U8:
        """The codes padded with zeros to whole blocks, (rows, blocks, bytes of a block)."""
        rows, blocks = self.scales.shape
        missing = blocks * self.block // 2 - self.codes.shape[1]
        codes = np.pad(self.codes, [(0, 0), (0, missing)]) if missing else self.codes
        if self.width % 2:
            codes = codes.copy()
            codes[:, self.width // 2] &= 0x0F  # the half byte behind the last element is not an element
        return np.ascontiguousarray(codes).reshape(rows, blocks, self.block // 2)

    @property
    def regular(self) -> bool:
        """Whether rows are whole blocks of 32."""
        return self.block == 2 * HALF and self.width == self.scales.shape[1] * self.block

    @functools.cached_property
    def used_range(self) -> tuple[int, int] | None:
        """Smallest and largest scale byte of the blocks that are not zero; None if all are."""
        return used_range(self.whole.reshape(self.scales.size, -1), self.scales.reshape(-1))

    @functools.cached_property
    def zeros(self) -> int:
        """How many blocks are zero."""
        return int(zero_blocks(self.whole.reshape(self.scales.size, -1)).sum())

    @functools.cached_property
    def half_exponents(self) -> I16:
        """(rows, halves): k of each NVFP4 block, the scale being 2**k."""
        exponents = self.scales.astype(np.int16) - np.int16(127)
        return np.repeat(exponents, self.block // HALF, axis=1)[:, : self.halves]

    @functools.cached_property
    def counts(self) -> U8:
        """(rows, halves, 8): how often each magnitude occurs in each NVFP4 block; padding counts as zero."""
        rows = self.scales.shape[0]
        packed = COUNTING[self.whole.reshape(rows, -1, HALF // 2)].sum(axis=-1)
        little = packed.astype("<u8")
        by_half: U8 = little.view(np.uint8).reshape(rows, -1, 8)
        return by_half[:, : self.halves]

    @functools.cached_property
    def nonzero_half(self) -> Bools:
        """(rows, halves): whether an NVFP4 block holds any code but 0 and 8."""
        return np.asarray(self.counts[..., 0] != HALF)


class Group:
    """Pieces that share one global scale."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)

    @functools.cached_property
    def scale_range(self) -> tuple[int, int]:
        """Smallest and largest exponent of all blocks, from the scale bytes alone."""
        low = min(int(piece.scales.min()) for piece in self.pieces)
        high = max(int(piece.scales.max()) for piece in self.pieces)
        return low - 127, high - 127

    @functools.cached_property
    def settled(self) -> bool:
        """Whether the scales alone prove that every block fits one window; no nibble is read."""
        low, high = self.scale_range
        return high - low <= WINDOW

    @functools.cached_property
    def exponent_range(self) -> tuple[int, int] | None:
        """k_min and k_max over blocks that are not all zero; None if all are."""
        found = [piece.used_range for piece in self.pieces if piece.used_range is not None]
        return (min(low for low, _ in found) - 127, max(high for _, high in found) - 127) if found else None

    @property
    def fits(self) -> bool:
        """Whether every block that is not zero lies in one window: all of them can be kept as they are."""
        found = self.exponent_range
        return found is None or found[1] - found[0] <= WINDOW

    @property
    def closed_form(self) -> int:
        """m = k_max - 8: the largest block meets the largest power of two that E4M3 holds."""
        found = self.exponent_range
        return 0 if found is None else found[1] - (LOWEST + WINDOW)

    @functools.cached_property
    def by_exponent(self) -> dict[int, U8]:
        """Counts of the NVFP4 blocks that are not zero, by their exponent: {k: (blocks, 8)}."""
        k = np.concatenate([piece.half_exponents[piece.nonzero_half] for piece in self.pieces])
        counts = np.concatenate([piece.counts[piece.nonzero_half] for piece in self.pieces])
        order = np.argsort(k, kind="stable")
        values, starts = np.unique(k[order], return_index=True)
        return {int(value): part for value, part in zip(values, np.split(counts[order], starts[1:]), strict=True)}


def read(q: QuantizedTensor, name: str) -> Piece:
    """The bytes of an MXFP4 tensor as matrices, after the checks."""
    if q.format.name != "mxfp4":
        raise UnsupportedError(f"{name} is {q.format.name}; this cast takes mxfp4")
    if not q.shape or 0 in q.shape:
        raise InputError(f"{name} of shape {q.shape} has no elements; there is nothing to cast")
    width = q.shape[-1]
    codes, scales = to_numpy(q.codes), to_numpy(q.scales)
    codes, scales = codes.reshape(-1, codes.shape[-1]), scales.reshape(-1, scales.shape[-1])
    if scales.max() == 255:
        nan = scales == 255
        row, column = (int(i) for i in np.argwhere(nan)[0])
        raise InputError(
            f"{name} of shape {q.shape}: {int(nan.sum())} of {nan.size} E8M0 scale bytes are 255 (NaN), the first at "
            f"row {row}, block {column}; NVFP4 has no such block: repair or drop the tensor first"
        )
    return Piece(codes, scales, width, q.format.block)
