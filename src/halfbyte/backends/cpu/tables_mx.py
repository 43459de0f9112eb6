"""Tables of an MX rule: the scale byte for each amax, and the thresholds of the codes.

They serve every tensor of a dtype. They are computed once, by calling the contract's own functions.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.library import native
from halfbyte.backends.cpu.structs import Tables, as_array
from halfbyte.backends.numbering import DTYPE_NUMBERS
from halfbyte.codec.bits import DTYPES, F32, U8, widen
from halfbyte.contracts import MXRule, exponents
from halfbyte.contracts.arithmetic import statistics_dtype
from halfbyte.contracts.rounding import round_elements
from halfbyte.contracts.spec import Rounding
from halfbyte.formats import E2M1, E8M0
from halfbyte.formats.spec import ElementFormat

IRREGULAR = 0xFF
"""Marks an amax in a table of scale bytes: the reference quantizes blocks with this amax."""
ALL_BYTES = np.arange(256, dtype=np.uint8)

ELEMENTS = {
    "even": MXRule(
        scale=exponents.ocp_floor, element=exponents.over, rounding=Rounding(), decode=exponents.decode_e8m0
    ),
    "down": MXRule(
        scale=exponents.ocp_floor, element=exponents.over, rounding=Rounding(tie="down"), decode=exponents.decode_e8m0
    ),
}
"""How the search kernel can round an E2M1 magnitude, in the order of native/kernels.h. Each divides x by a power of two
and takes the nearest code, saturating. E4M3 comes after them."""


def magnitude_values(bits: npt.NDArray[np.int64], dtype: str) -> F32:
    """The float32 values of magnitude bit patterns of a dtype."""
    integer = np.dtype(f"u{DTYPES[dtype].itemsize}")
    return widen(bits.astype(integer).view(DTYPES[dtype]))


def inf_bits(dtype: str) -> int:
    return {"bf16": 0x7F80, "fp16": 0x7C00, "fp32": 0x7F800000}[dtype]


@functools.lru_cache(maxsize=64)
@np.errstate(all="ignore")
def build_mx_tables(rule: MXRule, element: ElementFormat, dtype: str) -> Tables:
    """Tables of an MX rule, for every tensor of a dtype."""
    tables = Tables()
    scale_of_byte = _fill_scale_bytes(tables, rule, element, dtype)
    if element == E2M1:
        _fill_thresholds(tables, rule, scale_of_byte, dtype)
    return tables


@functools.lru_cache(maxsize=64)
@np.errstate(all="ignore")
def search_tables(rule: MXRule, element: ElementFormat, dtype: str) -> Tables:
    """Thresholds of the codes under every E8M0 scale, also those that the contract's exponent rule never gives."""
    scale = np.where(np.isfinite(E8M0.values), E8M0.values, 1).astype(np.float32)
    tables = Tables()
    as_array(tables.scale, np.float32)[:] = scale
    if element == E2M1:
        _fill_thresholds(tables, rule, scale, dtype)
    return tables


@functools.lru_cache(maxsize=64)
def element_number(rule: MXRule, element: ElementFormat, dtype: str) -> int | None:
    """The kernel's rounding that equals the contract's for every scale and every x; None if no rounding does."""
    if rule.rounding.wraps:
        return None
    if element != E2M1:
        return len(ELEMENTS) if rule.rounding.tie == "even" else None
    # gguf's distances overflow under the largest scales, which the kernel never chooses (native/searches/mx_exact.inc).
    bytes_ = slice(252 if rule.nearest is not None else 255)
    wanted = _magnitude_thresholds(rule, dtype)[bytes_]
    same = [np.array_equal(_magnitude_thresholds(known, dtype)[bytes_], wanted) for known in ELEMENTS.values()]
    return same.index(True) if True in same else None


@functools.lru_cache(maxsize=64)
@np.errstate(all="ignore")
def zero_block_byte(rule: MXRule, element: ElementFormat, dtype: str) -> int:
    """The byte of an all-zero block; −1 if it is NaN, or if its codes are not those that the decoded scale gives."""
    statistics, zeros = statistics_dtype(rule, dtype), np.array([0.0, -0.0], np.float32)
    (byte,), scale = rule.scale(np.zeros(1, np.float32), statistics, element)

    def codes(under: F32) -> U8:
        if rule.nearest is not None:
            return rule.nearest(zeros, np.broadcast_to(under, zeros.shape))
        return round_elements(zeros, rule.quotient(zeros, under, statistics), element, rule.rounding)[0]

    as_read = E8M0.values[byte : byte + 1]
    return int(byte) if byte != 255 and np.array_equal(codes(scale), codes(as_read)) else -1


def _magnitude_thresholds(rule: MXRule, dtype: str) -> npt.NDArray[np.int32]:
    return as_array(search_tables(rule, E2M1, dtype).threshold, np.int32).reshape(256, 8)[:255, :7]


def _fill_scale_bytes(tables: Tables, rule: MXRule, element: ElementFormat, dtype: str) -> F32:
    """Fill the scale byte of each amax. Returns the elements' scale for each byte (NaN if no amax gives the byte)."""
    statistics = statistics_dtype(rule, dtype)

    def scale_of(bits: npt.NDArray[np.int64]) -> tuple[U8, F32]:
        return rule.scale(magnitude_values(bits, dtype), statistics, element)

    shift = 16 if dtype == "fp32" else 0
    first = np.arange(inf_bits(dtype) >> shift, dtype=np.int64) << shift
    last = first + (1 << shift) - 1
    byte, scale = scale_of(first)
    last_byte, last_scale = scale_of(last)
    # The tables have one scale per byte. An amax that gives the same byte with another scale is left to the reference.
    scale_of_byte = np.full(256, np.nan, np.float32)
    for values, scales in ((byte, scale), (last_byte, last_scale)):
        usable = np.isfinite(scales)
        scale_of_byte[values[usable]] = scales[usable]
    regular = (scale == scale_of_byte[byte]) & (byte != 255) & (last_scale == scale_of_byte[last_byte])
    starts = np.full(257, inf_bits(dtype), np.int64)
    rises = np.flatnonzero(byte[1:] < byte[:-1]).max(initial=-1) + 1  # bytes below it wrap
    if not shift:
        starts[:256] = rises + np.searchsorted(byte[rises:], ALL_BYTES)
    else:
        step = last_byte.astype(np.int64) - byte
        regular &= (step == 0) | (step == 1)
        regular[:rises] = False  # each byte may appear only once
        inside = np.flatnonzero(regular & (step == 1))
        starts[last_byte[inside]] = _first_true(
            lambda bits: scale_of(bits)[0] > byte[inside], first[inside], last[inside]
        )
        edge = np.flatnonzero(regular[1:] & regular[:-1] & (byte[1:] == last_byte[:-1] + 1)) + 1
        starts[byte[edge]] = first[edge]
    lut = as_array(tables.lut, np.uint8)
    lut[:] = IRREGULAR
    lut[: first.size] = np.where(regular, byte, IRREGULAR)
    as_array(tables.starts, np.uint32)[:] = starts
    as_array(tables.written, np.uint8)[:] = ALL_BYTES
    as_array(tables.scale, np.float32)[:] = np.where(np.isfinite(scale_of_byte), scale_of_byte, 1)
    return scale_of_byte


def _fill_thresholds(tables: Tables, rule: MXRule, scale_of_byte: F32, dtype: str) -> None:
    """Find the threshold of each E2M1 code by bisection on the contract's own rounding."""
    statistics = statistics_dtype(rule, dtype)
    scale = np.where(np.isfinite(scale_of_byte), scale_of_byte, 1).astype(np.float32)[:, None]

    def codes(bits: npt.NDArray[np.int64], sign: int) -> npt.NDArray[np.int64]:
        x = magnitude_values(bits, dtype) * np.float32(sign)
        if rule.nearest is not None:
            return rule.nearest(x, np.broadcast_to(scale, x.shape)).astype(np.int64)
        y = rule.quotient(x, scale, statistics)
        return round_elements(x, y, E2M1, rule.rounding)[0].astype(np.int64)

    # No amax gives a scale below an eighth of itself, so a block holds nothing above 8·S. Beyond that, gguf's distances
    # all round to one number, and its codes start again at 0.
    with_scale = np.minimum(scale.astype(np.float64) * 8, float(magnitude_values(np.array(inf_bits(dtype) - 1), dtype)))
    most = with_scale.astype(DTYPES[dtype]).view(f"u{DTYPES[dtype].itemsize}").astype(np.int64)
    most = np.where(scale == 0, inf_bits(dtype) - 1, most)  # a scale of 0 gives no bound
    steps = np.arange(1, 8)
    low, high = np.zeros((256, 7), np.int64), np.broadcast_to(most, (256, 7))
    begins = _first_true(lambda bits: (codes(bits, 1) & 7) >= steps, low, high)
    negative = _first_true(lambda bits: codes(bits, -1) >= 8, low[:, :1], high[:, :1])[:, 0]
    positive = _first_true(lambda bits: codes(bits, 1) < 8, low[:, :1], high[:, :1])[:, 0]
    threshold = np.concatenate([begins, negative[:, None]], axis=1) - 1
    if dtype != "fp32":  # both 16-bit halves of a word hold the threshold
        threshold = (threshold & 0xFFFF) | ((threshold & 0xFFFF) << 16)
    as_array(tables.threshold, np.int32)[:] = threshold.reshape(-1).astype(np.uint32).view(np.int32)
    as_array(tables.positive_sign, np.int32)[:] = positive
    tables.has_positive_sign = int(positive.any())
    library, _ = native()
    library.hb_build_segments(DTYPE_NUMBERS[dtype], ctypes.byref(tables))


Magnitudes = npt.NDArray[np.int64]


def _first_true(holds: Callable[[Magnitudes], npt.NDArray[np.bool_]], low: Magnitudes, high: Magnitudes) -> Magnitudes:
    """Smallest bits in [low, high] for which a monotone predicate is true; high + 1 if it is never true."""
    low, high = low.copy(), high + 1
    while (low < high).any():
        middle = (low + high) // 2
        found = holds(np.minimum(middle, high)) & (low < high)
        high = np.where(found, middle, high)
        low = np.where(~found & (low < high), middle + 1, low)
    return low
