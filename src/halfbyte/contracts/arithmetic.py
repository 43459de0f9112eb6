"""What a contract computes around its formulas, in numpy: tensor-level numbers, scale bytes, the error of 4over6.

Every module that needs the numbers of a contract (backends, casts, conversions, conformance) takes them from here, so
that each fact has one place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from halfbyte.codec.bits import F32, U8
from halfbyte.codec.blocks import over_tiles, repeat_rows
from halfbyte.codec.element import encode
from halfbyte.contracts.spec import FourSixRule, MXRule, NVFP4Rule, ScaleByte, Scaling, TensorScale
from halfbyte.formats.elements import E4M3
from halfbyte.methods import FourSix, Method


def statistics_dtype(rule: NVFP4Rule | MXRule, dtype: str) -> str:
    """Short name of the dtype in which the contract holds minima and maxima, for an operand of dtype `dtype`."""
    return dtype if rule.statistics == "input" else "fp32"


def block_amax(blocks: F32, tile_rows: int = 1) -> F32:
    """Largest magnitude of each block, or of each tile, repeated on its rows: (rows, blocks, 1).

    If a block holds a NaN, the result is NaN.
    """
    if tile_rows == 1:
        return np.asarray(np.abs(blocks).max(axis=-1, keepdims=True))
    return repeat_rows(np.abs(over_tiles(blocks, tile_rows)).max(axis=(-2, -1)), tile_rows)


def tensor_scale(amax: F32, rule: NVFP4Rule, method: Method, dtype: str) -> TensorScale:
    """Slot 1: the tensor-level numbers for an amax or an array of amaxes; the results have the same shape.

    `rule`: the rule that serves the method (`NVFP4Rule.for_method`). `dtype`: short name of the operand's dtype.
    """
    amax = np.where(np.isnan(amax), np.float32(np.nan), amax).astype(np.float32)  # every NaN gets the same bits
    statistics, top = statistics_dtype(rule, dtype), rule.anchor(method)
    factor = (
        rule.factor(amax, top, statistics) if rule.constant_factor is None else np.full_like(amax, rule.constant_factor)
    )
    return TensorScale(amax, factor, np.float32(rule.element_max), top, statistics)


def stored_scale(rule: NVFP4Rule, t: TensorScale) -> tuple[F32 | None, F32]:
    """The number that the contract stores with the blocks, flat (None: nothing), and the multiplier of code × scale."""
    if rule.stored is None:
        return None, np.ones(1, np.float32)
    stored = rule.stored(t).reshape(-1)
    return stored, rule.multiplier(stored, t.top)


def scale_byte(pre_scale: F32, policy: ScaleByte) -> U8:
    """Slot 3: a block scale as an E4M3 byte; NaN is 0x7F."""
    if policy.for_zero is not None:
        pre_scale = np.where(pre_scale == 0, np.float32(policy.for_zero), pre_scale).astype(np.float32)
    byte = encode(np.maximum(pre_scale, np.float32(policy.smallest)), E4M3) & 0x7F
    if policy.for_zero_byte is not None:
        byte = np.where(byte == 0, policy.for_zero_byte, byte)
    return byte.astype(np.uint8)


def zero_scale_byte(rule: NVFP4Rule, t: TensorScale) -> int:
    """The scale byte of an all-zero block under a tensor-level scale: the first one, of several."""
    first = replace(t, amax=t.amax.reshape(-1)[:1], factor=t.factor.reshape(-1)[:1])
    return int(scale_byte(rule.pre_scale(np.zeros(1, np.float32), first), rule.scale_byte)[0])


def first_scale_byte(rule: NVFP4Rule) -> int:
    """The first byte that an exact search tries: the smallest positive scale that the contract can decode.

    The contract's own encoder may stop earlier (torchao never writes a scale below 2**-6); every decoder multiplies by
    whatever E4M3 value the byte has.
    """
    return int(np.searchsorted(E4M3.magnitudes, E4M3.smallest))


def four_six_error(
    four_six: FourSixRule, method: FourSix, scaling: Scaling
) -> Callable[[F32, F32, F32, TensorScale], F32]:
    """The error formula that a 4over6 method asks for."""
    if method.fast_error and four_six.fast_error is not None:
        return four_six.fast_error
    if scaling == "row" and four_six.exact_row_error is not None:
        return four_six.exact_row_error
    return four_six.exact_error
