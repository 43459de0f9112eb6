"""Comparing two tensors that should hold the same values: errors, and what became of each block of the source."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from halfbyte.arrays import Array, to_numpy
from halfbyte.casting.report import Tally, add
from halfbyte.casting.rows import values_of
from halfbyte.casting.scales import GlobalScale
from halfbyte.casting.window import BIAS, Exponents, power_table
from halfbyte.codec.bits import F32
from halfbyte.codec.blocks import split
from halfbyte.contracts import Contract
from halfbyte.formats import get_format
from halfbyte.quantize import dequantize
from halfbyte.types import QuantizedTensor

CHUNK = 1 << 20
"""Elements that are compared at a time."""


def exact_tally(blocks: int, zeros: int, elements: int, same_bits: bool) -> Tally:
    """The tally of rows whose blocks were all kept: no value has to be decoded to know that nothing changed.

    zeros: how many of the blocks are zero. same_bits: whether zeros keep their sign.
    """
    return Tally(blocks, zeros, blocks - zeros, 0, 0, 0.0, 0.0, 0.0, elements, same_bits)


def decodes_kept(scale: GlobalScale, m: int, exponents: Exponents | None) -> bool:
    """Whether kept codes decode to the source's float32 under the global scale 2^m, whichever codes they are.

    True nearly always. Contracts that multiply by the amax before they divide overflow to Inf for large exponents.
    """
    decoded = scale.decoded()
    with_zero = decoded[power_table(m) - 1, 0]  # blocks of zeros may have any scale byte
    if with_zero.any() or exponents is None:
        return not with_zero.any()
    k = np.arange(exponents.low, exponents.high + 1)
    wanted = np.stack([values_of(exponent) for exponent in k.tolist()])
    return np.array_equal(decoded[power_table(m)[k + BIAS] - 1], wanted)


def reads_zeros_alike(source: QuantizedTensor, contract: Contract) -> bool:
    """Whether code 8 decodes to the same zero, -0.0 or +0.0, in the source and in a result under that contract."""
    before, after = source.contract.rule(source.format), contract.rule(get_format("nvfp4"))
    return before.negative_zero == after.negative_zero


def has_negative_zero(codes: Array) -> bool:
    """Whether code 8 is among packed codes."""
    return bool((((codes & 15) == 8) | ((codes >> 4) == 8)).any())


def rows_of(q: QuantizedTensor, start: int, stop: int) -> QuantizedTensor:
    """Some rows of a tensor, taken as a matrix of all its rows; no copy, and torch tensors stay on their device."""

    def part(array: Array) -> Array:
        return array.reshape(-1, array.shape[-1])[start:stop]

    def scale(value: Array | None) -> Array | None:
        return value if value is None or not value.shape else value.reshape(-1)[start:stop]

    codes = part(q.codes)
    return dataclasses.replace(
        q,
        shape=(len(codes), q.shape[-1]),
        codes=codes,
        scales=part(q.scales),
        stored_scale=scale(q.stored_scale),
    )


def compare(
    source: QuantizedTensor, result: QuantizedTensor, backend: str = "auto", threads: int | None = None
) -> Tally:
    """What a cast from MXFP4 to NVFP4 changed."""
    rows, width = int(np.prod(source.shape[:-1])), source.shape[-1]
    step = max(CHUNK // width, 1)
    tallies = []
    for start in range(0, rows, step):
        before, after = rows_of(source, start, start + step), rows_of(result, start, start + step)
        old = to_numpy(dequantize(before, "float32", backend, threads))
        new = to_numpy(dequantize(after, "float32", backend, threads))
        kept = _kept_blocks(before, after)
        tallies.append(tally_values(old, new, source.format.block, kept, bool(kept.all())))
    return add(tallies)


def tally_values(old: F32, new: F32, block: int, kept: npt.NDArray[np.bool_] | None, same_codes: bool) -> Tally:
    """Errors and block counts of two (rows, K) matrices; `kept`: blocks whose codes and scales were left as they are.

    Inf is equal to Inf; a NaN where there was none is an infinite error.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(new.astype(np.float64) - old)
        error[old == new] = 0
        error[np.isnan(error)] = np.inf
        error[np.isnan(old) & np.isnan(new)] = 0
        signal = float(np.square(old, dtype=np.float64).sum())
        squared = float(np.square(error).sum())
    wrong = (split(error, block) != 0).any(axis=-1)
    empty = (split(old, block) == 0).all(axis=-1)
    kept = np.zeros_like(wrong) if kept is None else kept & ~wrong
    same_bits = np.array_equal(old.view(np.uint32), new.view(np.uint32))
    return Tally(
        blocks=wrong.size,
        zero=int((empty & ~wrong).sum()),
        verbatim=int((kept & ~empty).sum()),
        recoded=int((~kept & ~empty & ~wrong).sum()),
        requantized=int(wrong.sum()),
        squared_error=squared,
        max_error=float(error.max()),
        signal=signal,
        elements=old.size,
        same_codes=same_codes and same_bits,
    )


def same_codes(source: QuantizedTensor, result: QuantizedTensor) -> npt.NDArray[np.bool_]:
    """(rows, bytes): which packed codes of two matrices are the same. The half byte behind the last element is none."""
    changed = to_numpy(source.codes) ^ to_numpy(result.codes)
    if source.shape[-1] % 2:
        changed[:, -1] &= 0x0F
    return np.asarray(changed == 0)


def _kept_blocks(source: QuantizedTensor, result: QuantizedTensor) -> npt.NDArray[np.bool_]:
    """(rows, blocks): the same codes; the same scale follows where the values turn out to be equal.

    A block whose values are equal with equal codes, not all zero, has the same scale: q·s = q·s' for a q that is not 0.
    """
    bytes_of_block = source.format.block // 2
    same = same_codes(source, result)
    rows, width = same.shape
    padded = np.pad(same, [(0, 0), (0, -width % bytes_of_block)], constant_values=True)
    return np.asarray(padded.reshape(rows, -1, bytes_of_block).all(axis=-1))
