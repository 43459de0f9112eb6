"""The MXFP4 operand of a cast: matrices of bytes, and what is asked of them again and again, computed once.

NVFP4 blocks are half as long as MXFP4 blocks. A "half" is what becomes one NVFP4 block: 16 elements.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.arrays import to_numpy
from halfbyte.casting.window import BIAS, HIGHEST, LOWEST, Exponents, used_exponents, zero_blocks
from halfbyte.codec.bits import F32, U8
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import Contract, DecodeRule, MXRule, exponents
from halfbyte.errors import InputError, UnsupportedError
from halfbyte.formats import E2M1, get_format
from halfbyte.types import QuantizedTensor

F64 = npt.NDArray[np.float64]
I16 = npt.NDArray[np.int16]
Bools = npt.NDArray[np.bool_]

HALF = 16
"""An NVFP4 block: half of an MXFP4 block."""

SLICE = 1 << 20
"""Elements that are looked at half by half at a time: it bounds memory, and changes no bit."""

MAGNITUDES = E2M1.magnitudes.astype(np.float64)

POWER_DECODES = (exponents.decode_e8m0, exponents.decode_power)
"""Decodings of MXFP4 that are q·2^(byte−127). They differ for byte 255 alone, which no cast takes or writes."""


def _counting_table() -> npt.NDArray[np.uint64]:
    """For each byte of two codes: how often each of the eight magnitudes occurs, eight bits per magnitude."""
    codes = np.arange(256, dtype=np.uint64)
    one = np.uint64(1)
    low, high = (codes & np.uint64(7)) * np.uint64(8), ((codes >> np.uint64(4)) & np.uint64(7)) * np.uint64(8)
    return np.asarray((one << low) + (one << high), np.uint64)


COUNTING = _counting_table()


@dataclass(frozen=True)
class Rows:
    """Some rows of one MXFP4 tensor."""

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

    def slices(self) -> Iterator[tuple[int, int, Rows]]:
        """The rows a few at a time: (first row, row behind the last, those rows)."""
        step = max(SLICE // self.width, 1)
        for start in range(0, len(self.scales), step):
            stop = min(start + step, len(self.scales))
            yield start, stop, Rows(self.codes[start:stop], self.scales[start:stop], self.width, self.block)

    @functools.cached_property
    def exponents(self) -> Exponents | None:
        """The exponents of the blocks that are not zero; None if all are."""
        return used_exponents(self.whole.reshape(self.scales.size, -1), self.scales.reshape(-1))

    @functools.cached_property
    def zeros(self) -> int:
        """How many blocks are zero."""
        return int(zero_blocks(self.whole.reshape(self.scales.size, -1)).sum())

    @property
    def largest(self) -> U8:
        """(rows, blocks): the index of the largest magnitude of each block."""
        return np.asarray(np.maximum(self.whole & 7, (self.whole >> 4) & 7).max(axis=-1))

    @functools.cached_property
    def half_exponents(self) -> I16:
        """(rows, halves): k of each NVFP4 block, the scale being 2**k."""
        exponents = self.scales.astype(np.int16) - np.int16(BIAS)
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

    def outside(self, m: int) -> Bools:
        """(rows, halves): NVFP4 blocks that are not zero and whose 2**(k - m) E4M3 does not hold."""
        n = self.half_exponents - m
        return ((n < LOWEST) | (n > HIGHEST)) & self.nonzero_half

    def recode(self, codes: U8, where: Bools, new: U8) -> None:
        """Write the halves in `where` into `codes` with other magnitudes: `new` (halves, 8) says which. Signs stay."""
        count = len(self.scales)
        chosen = self.whole.reshape(count, -1, HALF // 2)[:, : self.halves][where]
        low, high = _mapped(chosen & np.uint8(0xF), new), _mapped(chosen >> np.uint8(4), new)
        changed = np.zeros((count, self.halves * HALF // 2), np.uint8)
        changed.reshape(count, self.halves, HALF // 2)[where] = low | (high << 4)
        touched: Bools = np.repeat(where, HALF // 2, axis=1)[:, : codes.shape[1]]
        changed = changed[:, : codes.shape[1]]
        if self.width % 2:  # keep what stood behind the last element
            changed[:, -1] |= codes[:, -1] & 0xF0
        codes[touched] = changed[touched]

    def count_blocks(self, halves: Bools) -> int:
        """How many MXFP4 blocks have one of these halves: (rows, halves)."""
        each = self.block // HALF
        padded = np.pad(halves, [(0, 0), (0, self.scales.shape[1] * each - self.halves)])
        return int(padded.reshape(*self.scales.shape, each).any(axis=-1).sum())


def _mapped(nibbles: U8, new: U8) -> U8:
    magnitude = np.take_along_axis(new, (nibbles & 7).astype(np.intp), axis=1)
    return np.asarray((nibbles & 8) | magnitude, np.uint8)


def values_of(exponent: int) -> F32:
    """The eight magnitudes times 2**exponent, as float32 decodes them (Inf beyond its range)."""
    with np.errstate(over="ignore"):
        return np.ldexp(MAGNITUDES, exponent).astype(np.float32)


def by_exponent(exponents: I16) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """(k, where it stands) for each exponent of some halves, the smallest first."""
    if not exponents.size:
        return
    order = np.argsort(exponents, kind="stable")
    values, starts = np.unique(exponents[order], return_index=True)
    for k, start, stop in zip(values.tolist(), starts, [*starts[1:], len(order)], strict=True):
        yield k, order[start:stop]


def decodes_powers(contract: Contract) -> bool:
    """Whether a contract decodes MXFP4 as q·2^(byte−127)."""
    rule = contract.rule(get_format("mxfp4"))
    return isinstance(rule, MXRule | DecodeRule) and rule.decode in POWER_DECODES


def check_not_empty(q: QuantizedTensor, name: str) -> None:
    """Refuse a tensor without elements."""
    if not q.shape or 0 in q.shape:
        raise InputError(f"{name} of shape {q.shape} has no elements; there is nothing to cast")


def read(q: QuantizedTensor, name: str) -> Rows:
    """The bytes of an MXFP4 tensor as matrices, after the checks."""
    if q.format.name != "mxfp4":
        raise UnsupportedError(f"{name} is {q.format.name}; this cast takes mxfp4")
    check_not_empty(q, name)
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
    return Rows(codes, scales, width, q.format.block)
