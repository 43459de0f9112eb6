"""Whether each code is the nearest one to its source value under the scale of its block, a few rows at a time.

Every encoder that rounds to nearest stays within half a step of the value, whatever method chose the scale. Encoders
compute the quotient in different arithmetic, down to bfloat16, so a value may lie beyond the middle between two codes
by SLACK, relative to that middle. -0 counts as 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.codec.bits import F32, U8
from halfbyte.formats import E2M1
from halfbyte.formats.spec import ElementFormat

Bools = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]
Raw = npt.NDArray[np.generic]

SLACK = 2.0**-7
"""How far beyond the middle between two codes a value may lie: the source and the quotient rounded to bfloat16."""


@dataclass(frozen=True)
class Encoded:
    """Rows of a block format as they are stored."""

    codes: U8
    """[rows, columns / 2], the even element in the low nibble."""
    scale_bytes: U8
    """[rows, blocks]"""
    scales: F32
    """What the codes of each block are multiplied by, without the tensor scale."""
    tensor_scale: float
    """1 in formats without one."""
    scale_format: ElementFormat

    @property
    def block(self) -> int:
        return int(2 * self.codes.shape[1] // self.scales.shape[1])

    def factors(self) -> F32:
        """What each code of a block stands for a multiple of, as [rows, blocks]."""
        return np.asarray(self.scales * np.float32(self.tensor_scale), np.float32)

    def multiplier(self) -> F32:
        """What each code of a block is multiplied by, as [rows, blocks, 1]; NaN where that is 0 or no number."""
        product = np.abs(self.scales) * np.float32(self.tensor_scale)
        return np.where(product > 0, product, np.float32(np.nan))[:, :, None]


@dataclass(frozen=True)
class BlockSums:
    """What a block's codes and the source values under them add up to, each [rows, blocks]."""

    amax: F32
    """Largest magnitude of the source."""
    product: F32
    """Sum of code times source."""
    power: F32
    """Sum of squared codes."""
    squares: F64
    """Sum of the squared source."""
    off: F64
    """Sum of the squared differences between decoded values and the source."""
    wrong: Bools
    """Whether some code is not the nearest."""
    largest: float = 0.0
    """The largest difference of all, without NaN."""


def _bounds() -> tuple[F32, F32]:
    """For each code, the smallest and the largest number that it is nearest to, slack included."""
    values = np.unique(E2M1.values)
    middles = (values[1:] + values[:-1]) / 2
    low, high = np.concatenate([[-np.inf], middles]), np.concatenate([middles, [np.inf]])
    places = np.searchsorted(values, E2M1.values)
    with np.errstate(invalid="ignore"):
        low, high = low - SLACK * np.abs(low), high + SLACK * np.abs(high)
    return low[places].astype(np.float32), high[places].astype(np.float32)


def _of_words(of_codes: F32) -> npt.NDArray[np.complex128]:
    """A table by code as a table by two bytes: four numbers an entry, in the order of the elements."""
    words = np.arange(1 << 16)
    numbers = np.stack([of_codes[(words >> shift) & 15] for shift in (0, 4, 8, 12)], axis=1)
    return np.ascontiguousarray(numbers, np.float32).view(np.complex128)[:, 0]


BY_CODE: F32 = np.stack([E2M1.values, *_bounds()]).astype(np.float32)
VALUES, LOW, HIGH = (_of_words(table) for table in BY_CODE)


def look_up(table: npt.NDArray[np.complex128], codes: U8) -> F32:
    """The number for each code, [rows, elements]."""
    words = codes.view(np.uint16).astype(np.intp)
    return table.take(words, mode="clip").view(np.float32)


@np.errstate(invalid="ignore", over="ignore")
def block_sums(stored: Encoded, source: Raw) -> BlockSums:
    """Every block of these rows. Blocks with a scale of 0 or NaN are not judged: other checks speak of those.

    source: float32, or bfloat16 as it lies.
    """
    factors = stored.factors()
    wanted: F32 = np.asarray(source, np.float32)
    rows, blocks = stored.scales.shape
    by_block = wanted.reshape(rows, blocks, stored.block)
    values = look_up(VALUES, stored.codes).reshape(by_block.shape)
    product, power = (np.einsum("rbk,rbk->rb", *pair) for pair in ((values, by_block), (values, values)))
    difference = values * factors[:, :, None] - by_block
    squares, off = (np.einsum("rbk,rbk->rb", part, part, dtype=np.float64) for part in (by_block, difference))
    wrong = np.asarray(not_nearest(stored, wanted).reshape(rows, blocks, -1).view(np.uint64).any(axis=2))
    largest = float(np.fmax.reduce(np.abs(difference), axis=None, initial=0.0))
    return BlockSums(_largest(by_block), product, power, squares, off, wrong, largest)


@np.errstate(invalid="ignore", over="ignore")
def not_nearest(stored: Encoded, source: F32) -> Bools:
    """Which elements have a code that is not the nearest one, in the shape of the source."""
    rows, blocks = stored.scales.shape
    quotient = (source.reshape(rows, blocks, stored.block) / stored.multiplier()).reshape(source.shape)
    wrong = quotient < look_up(LOW, stored.codes)
    wrong |= quotient > look_up(HIGH, stored.codes)
    return wrong


def _largest(by_block: F32) -> F32:
    """Largest magnitude of each block, by halving: much faster than a maximum along a short axis."""
    part = np.abs(by_block)
    while part.shape[2] > 1:
        half = part.shape[2] // 2
        part = np.maximum(part[:, :, :half], part[:, :, half:])
    return part[:, :, 0]
