"""Tables of the formats with power-of-two scales, made by asking the contract's own functions once. Kernels look up."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from halfbyte.codec.bits import DTYPES, F32, U8, widen
from halfbyte.contracts import Contract, MXRule, NVFP4Rule, exponents
from halfbyte.contracts.arithmetic import statistics_dtype
from halfbyte.formats import BlockFormat
from halfbyte.formats.spec import ElementFormat

if TYPE_CHECKING:
    import torch

DeviceTable = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]


@dataclass(frozen=True)
class MXTable:
    """Scale byte and element constant by the top fifteen bits of a block's amax; two per bucket for float32."""

    bytes: U8
    constants: F32
    split: npt.NDArray[np.int32]
    """float32: the amax's bits from which on the bucket's second entry holds."""


@functools.lru_cache(maxsize=64)
@np.errstate(all="ignore")
def mx_table(rule: MXRule, element: ElementFormat, dtype: str) -> MXTable:
    """The table of a rule that choose.py lists.

    16-bit dtypes: the contract's function is asked for every amax. float32: it is asked at both ends of every bucket,
    and the place between them where its answer changes is found by bisection. The listed functions change at most once
    within a bucket, because a bucket is no longer than a binade.
    """
    statistics = statistics_dtype(rule, dtype)

    def ask(bits: npt.NDArray[np.int64]) -> tuple[U8, F32]:
        storage = DTYPES[dtype]
        v = widen(bits.astype(f"u{storage.itemsize}").view(storage))
        byte, scale = rule.scale(v, statistics, element)
        return byte, scale if rule.nearest is not None else _constant(rule, scale)

    buckets = np.arange(32768, dtype=np.int64)
    if dtype != "fp32":
        byte, constant = ask(buckets)
        return MXTable(np.ascontiguousarray(byte), np.ascontiguousarray(constant), np.zeros(1, np.int32))
    low, high = buckets << 16, (buckets << 16) + 0xFFFF
    first, first_constant = ask(low)
    last, last_constant = ask(high)

    def changed(bits: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        byte, constant = ask(bits)
        same = (byte == first) & (constant.view(np.int32) == first_constant.view(np.int32))
        return np.asarray(~(same | (np.isnan(constant) & np.isnan(first_constant) & (byte == first))), np.bool_)

    below, above = low.copy(), high + 1
    while (below < above).any():
        middle = (below + above) // 2
        found = changed(np.minimum(middle, high)) & (below < above)
        above = np.where(found, middle, above)
        below = np.where(~found & (below < above), middle + 1, below)
    split = np.minimum(above, 0x7FFFFFFF).astype(np.int32)
    # The first bucket holds many binades of subnormals: each of its numbers has an entry behind the others.
    small, small_constant = ask(np.arange(65536, dtype=np.int64))
    bytes_ = np.concatenate([np.stack([first, last], axis=1).reshape(-1), small])
    constants = np.concatenate([np.stack([first_constant, last_constant], axis=1).reshape(-1), small_constant])
    return MXTable(bytes_, constants, split)


def _constant(rule: MXRule, scale: F32) -> F32:
    """What x is multiplied by: dividing by a power of two, 0, Inf or NaN is multiplying by its reciprocal."""
    if rule.element in (exponents.times_reciprocal_zeroed, exponents.over_or_zero):
        return np.where(scale == 0, np.float32(0), np.float32(1) / scale).astype(np.float32)
    return np.asarray(np.float32(1) / scale, np.float32)


@np.errstate(all="ignore")
def mx_decode_table(contract: Contract, format: BlockFormat) -> F32:
    """What a scale byte multiplies twice an element's value by: halves, so that no entry overflows."""
    rule = contract.rule(format)
    if isinstance(rule, NVFP4Rule):
        raise TypeError("NVFP4 decodes by formula")
    byte = np.arange(256, dtype=np.uint8)
    return np.ascontiguousarray(rule.decode(np.full(256, 0.5, np.float32), byte))


def half_powers() -> F32:
    """The decoding table of E8M0: 2**(byte − 128), the last byte NaN."""
    exponents = np.arange(256) - 128
    return np.where(exponents == 127, np.float32(np.nan), np.ldexp(np.float32(1), exponents)).astype(np.float32)


@functools.lru_cache(maxsize=64)
def decodes_powers(contract: Contract, format: BlockFormat) -> bool:
    """Whether that is the table of a contract. One NaN is as good as another."""
    return np.array_equal(mx_decode_table(contract, format), half_powers(), equal_nan=True)


# --- on a device ---


@functools.lru_cache(maxsize=64)
def mx_table_on(rule: MXRule, element: ElementFormat, dtype: str, device: str) -> DeviceTable:
    """The table's parts on a device."""
    import torch

    table = mx_table(rule, element, dtype)
    parts = (table.bytes, table.constants, table.split)
    bytes_, constants, split = (torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in parts)
    return bytes_, constants, split


@functools.lru_cache(maxsize=64)
def decode_table_on(contract: Contract, format: BlockFormat, device: str) -> torch.Tensor:
    """The decoding table on a device."""
    import torch

    return torch.from_numpy(mx_decode_table(contract, format)).to(device)
