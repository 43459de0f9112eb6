"""NVFP4 to MXFP4: two blocks of 16 get one power of two. Exact where they happen to fit it, else the best there is."""

from __future__ import annotations

import numpy as np

from halfbyte.arrays import like, to_numpy
from halfbyte.casting.measure import CHUNK, rows_of, same_codes, tally_values
from halfbyte.casting.report import CastReport, Tally, add, describe
from halfbyte.casting.rows import decodes_powers
from halfbyte.codec.bits import F32
from halfbyte.codec.blocks import join, split
from halfbyte.codec.element import encode
from halfbyte.codec.pack import pack
from halfbyte.contracts import Contract, get_contract
from halfbyte.errors import InputError, UnsupportedError, unknown_name
from halfbyte.formats import E2M1, get_format
from halfbyte.quantize import dequantize, quantize
from halfbyte.types import QuantizedTensor

ALGORITHMS = ("optimal", "requantize")
MXFP4 = get_format("mxfp4")
TRIED = 2
"""Exponents tried per block: the largest not beaten by its half, and that half; no other can be best (docs/cast.md)."""


def cast_to_mxfp4(
    q: QuantizedTensor, algorithm: str, contract: str | Contract | None, name: str, backend: str, threads: int | None
) -> tuple[QuantizedTensor, CastReport]:
    """Cast an NVFP4 tensor. "requantize" leaves the scale to the contract; "optimal" minimises the squared error."""
    if algorithm not in ALGORITHMS:
        raise unknown_name("algorithm of nvfp4 to mxfp4", algorithm, ALGORITHMS)
    chosen = get_contract(contract, MXFP4)
    if not decodes_powers(chosen) and algorithm == "optimal":
        raise UnsupportedError(
            f"{name}: contract {chosen} does not decode mxfp4 as q·2^(byte−127), by which 'optimal' chooses; "
            "take algorithm='requantize'"
        )
    rows, width = int(np.prod(q.shape[:-1])), q.shape[-1]
    step = max(CHUNK // width, 1)
    codes, scales, tallies = [], [], []
    for start in range(0, rows, step):
        part = rows_of(q, start, start + step)
        values = to_numpy(dequantize(part, "float32", backend, threads))
        if not np.isfinite(values).all():
            raise InputError(
                f"{name} of shape {q.shape} decodes to NaN or Inf near row {start}; MXFP4 has neither: repair it first"
            )
        if algorithm == "requantize":
            result = quantize(values, MXFP4, chosen, backend=backend, threads=threads)
        else:
            result = _best(values, chosen)
        codes.append(to_numpy(result.codes))
        scales.append(to_numpy(result.scales))
        tallies.append(_tally(part, values, to_numpy(dequantize(result, "float32", backend, threads)), result))
    leading = q.shape[:-1]
    whole = QuantizedTensor(
        format=MXFP4,
        shape=q.shape,
        codes=like(np.concatenate(codes).reshape(*leading, -1), q.codes),
        scales=like(np.concatenate(scales).reshape(*leading, -1), q.codes),
        global_scale=None,
        stored_scale=None,
        contract=chosen,
    )
    report = describe(add(tallies), "nvfp4", "mxfp4", algorithm, q.shape)
    return whole, report


def _best(values: F32, contract: Contract) -> QuantizedTensor:
    """The power of two and codes with the least squared error of each block of 32; the larger scale of equals."""
    blocks = split(values, MXFP4.block).astype(np.float64)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    # The largest power of two below 2/7 of the amax: from there on a scale is never better than its half.
    mantissa, exponent = np.frexp(amax * 2 / 7)
    top = exponent - 1 - (mantissa == 0.5)
    byte = np.zeros(amax.shape, np.int64)
    best, codes = np.full(amax.shape, np.inf), np.zeros(blocks.shape, np.uint8)
    for down in range(TRIED):
        tried = np.maximum(top - down + 127, 0)  # 253 at most, as 2^128 is no finite float32
        scale = np.ldexp(1.0, tried - 127)
        finite = np.where(tried == 253, 3.0, E2M1.max)  # more would decode to Inf
        found = encode(np.clip(blocks / scale, -finite, finite).astype(np.float32), E2M1)
        error = ((E2M1.values[found].astype(np.float64) * scale - blocks) ** 2).sum(axis=-1, keepdims=True)
        better = error < best
        best, byte = np.where(better, error, best), np.where(better, tried, byte)
        codes = np.where(better, found, codes)
    byte = np.where(amax > 0, byte, 0)
    return QuantizedTensor(
        format=MXFP4,
        shape=values.shape,
        codes=pack(join(codes, values.shape), MXFP4),
        scales=byte[..., 0].astype(np.uint8),
        global_scale=None,
        stored_scale=None,
        contract=contract,
    )


def _tally(source: QuantizedTensor, values: F32, decoded: F32, result: QuantizedTensor) -> Tally:
    same = same_codes(source, result)
    padded = np.pad(same, [(0, 0), (0, -same.shape[1] % (source.format.block // 2))], constant_values=True)
    kept = np.asarray(padded.reshape(len(same), -1, source.format.block // 2).all(axis=-1))
    return tally_values(values, decoded, source.format.block, kept, bool(same.all()))
