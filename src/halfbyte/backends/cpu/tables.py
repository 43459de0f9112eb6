"""Tables that turn a contract into integers: scale byte by amax, code by threshold. Kernels only look them up.

NVFP4 tables depend on the tensor's amax and are built in C++ (native/tables.cpp); those of the MX formats do not, and
are found once by asking the contract's own functions. Decoding tables are the contract's formula on every byte and
code.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.library import DTYPE_CODES, Rule, SearchTables, Tables, as_array, load_library, native
from halfbyte.backends.cpu.multipliers import fit_multipliers
from halfbyte.backends.reference.quantize import scale_byte
from halfbyte.codec.bits import DTYPES, F32, I32, U8, widen
from halfbyte.codec.element import decode
from halfbyte.contracts import Contract, MXRule, NVFP4Rule, expressions
from halfbyte.contracts.rounding import round_elements
from halfbyte.contracts.spec import DecodeRule, TensorScale
from halfbyte.formats import E2M1, E4M3, BlockFormat
from halfbyte.formats.spec import ElementFormat

PRE_SCALES: list[Callable[[F32, TensorScale], F32]] = [
    expressions.folded_sixth,
    expressions.sixth_then_factor,
    expressions.divided_then_factor_or_zero,
    expressions.over_product,
    expressions.factor_times_divided,
    expressions.divided_twice,
    expressions.divided,
    expressions.divided_floored,
    expressions.static_scale,
]
"""Slot 2 by the number that native/tables.cpp knows it by."""

DIVISORS: dict[Callable[[F32, F32, TensorScale], F32], Callable[[F32, TensorScale], F32]] = {
    expressions.over_scale_product: lambda scale, t: scale * t.factor,
    expressions.over_scale_quotient: lambda scale, t: scale / t.factor,
    expressions.over_scale: lambda scale, t: scale,
}
"""Element formulas that divide x, with their divisor. All others multiply x by a number that depends on S alone."""

SIGNS = ["y < 0", "sign bit", "y <= 0"]
SIGN_OF_X = 3
"""The sign of x itself, unless it is zero (qwantize): it survives where y underflows."""
IRREGULAR = 0xFF
ALL_BYTES = np.arange(256, dtype=np.uint8)


def one_scale(t: TensorScale) -> TensorScale:
    """The same numbers as scalars."""
    return TensorScale(t.amax.reshape(()), t.factor.reshape(()), t.largest, t.top, t.statistics)


@np.errstate(all="ignore")
def element_constants(rule: NVFP4Rule, t: TensorScale) -> tuple[bool, F32]:
    """Whether elements are divided, and what they are divided or multiplied by, for each of 127 scale bytes."""
    scale = decode(ALL_BYTES[:127], E4M3)
    if rule.element in DIVISORS:
        return True, np.asarray(DIVISORS[rule.element](scale, t), np.float32)
    return False, np.asarray(rule.element(np.ones(127, np.float32), scale, t), np.float32)


@np.errstate(all="ignore")
def build_nvfp4_tables(rule: NVFP4Rule, t: TensorScale, dtype: str) -> Tables | None:
    """Tables of one tensor; None where its numbers are not finite and the reference must serve."""
    library = load_library()
    if library is None:
        return None
    divides, constants = element_constants(rule, t)
    policy, rounding = rule.scale_byte, rule.rounding
    for_zero = policy.for_zero
    if rule.pre_scale is expressions.static_scale:
        for_zero = float(rule.pre_scale(np.zeros((), np.float32), t))  # it replaces a zero share itself
    native = Rule(
        pre_scale=PRE_SCALES.index(rule.pre_scale),
        divides=divides,
        tie=["even", "down"].index(rounding.tie),
        sign=SIGN_OF_X if rounding.zero_input else SIGNS.index(rounding.sign),
        wraps=rounding.wraps,
        for_zero_byte=-1 if policy.for_zero_byte is None else policy.for_zero_byte,
        statistics=DTYPE_CODES[t.statistics],
        smallest=policy.smallest,
        for_zero=-1.0 if for_zero is None else for_zero,
        factor=float(t.factor),
        largest=float(t.largest),
        top=float(t.top),
        amax=float(t.amax),
    )
    as_array(native.constant, np.float32)[:127] = constants
    tables = Tables()
    refused = library.hb_build_tables(ctypes.byref(native), DTYPE_CODES[dtype], ctypes.byref(tables))
    return None if refused else tables


def magnitude_values(bits: npt.NDArray[np.int64], dtype: str) -> F32:
    """Numbers of magnitude bit patterns in a dtype."""
    integer = np.dtype(f"u{DTYPES[dtype].itemsize}")
    return widen(bits.astype(integer).view(DTYPES[dtype]))


def inf_bits(dtype: str) -> int:
    return {"bf16": 0x7F80, "fp16": 0x7C00, "fp32": 0x7F800000}[dtype]


@functools.lru_cache(maxsize=64)
@np.errstate(all="ignore")
def build_mx_tables(rule: MXRule, element: ElementFormat, dtype: str) -> Tables:
    """Tables of an MX rule, for every tensor of a dtype."""
    statistics = dtype if rule.statistics == "input" else "fp32"
    tables = Tables()
    scale_of_byte = _fill_scale_bytes(tables, rule, element, statistics, dtype)
    if element == E2M1:
        mx_thresholds(tables, rule, element, scale_of_byte, statistics, dtype)
    return tables


def _scale(
    rule: MXRule, bits: npt.NDArray[np.int64], statistics: str, dtype: str, element: ElementFormat
) -> tuple[U8, F32]:
    return rule.scale(magnitude_values(bits, dtype), statistics, element)


def _fill_scale_bytes(tables: Tables, rule: MXRule, element: ElementFormat, statistics: str, dtype: str) -> F32:
    """Scale byte by amax; returns the scale that elements meet for each byte (NaN where no amax leads to it)."""
    shift = 16 if dtype == "fp32" else 0
    first = np.arange(inf_bits(dtype) >> shift, dtype=np.int64) << shift
    last = first + (1 << shift) - 1
    byte, scale = _scale(rule, first, statistics, dtype, element)
    last_byte, last_scale = _scale(rule, last, statistics, dtype, element)
    # A byte stands for one scale; an amax that leads to another scale under the same byte is left to the reference.
    scale_of_byte = np.full(256, np.nan, np.float32)
    for values, scales in ((byte, scale), (last_byte, last_scale)):
        usable = np.isfinite(scales)
        scale_of_byte[values[usable]] = scales[usable]
    regular = (scale == scale_of_byte[byte]) & (byte != 255) & (last_scale == scale_of_byte[last_byte])
    starts = np.full(257, inf_bits(dtype), np.int64)
    rises = np.flatnonzero(byte[1:] < byte[:-1]).max(initial=-1) + 1  # below it are bytes that wrap
    if not shift:
        starts[:256] = rises + np.searchsorted(byte[rises:], ALL_BYTES)
    else:
        step = last_byte.astype(np.int64) - byte
        regular &= (step == 0) | (step == 1)
        regular[:rises] = False  # they would stand twice
        inside = np.flatnonzero(regular & (step == 1))
        starts[last_byte[inside]] = _first_true(
            lambda bits: _scale(rule, bits, statistics, dtype, element)[0] > byte[inside], first[inside], last[inside]
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


def mx_thresholds(
    tables: Tables, rule: MXRule, element: ElementFormat, scale_of_byte: F32, statistics: str, dtype: str
) -> None:
    """Where each code begins, by bisection on the contract's own rounding."""
    scale = np.where(np.isfinite(scale_of_byte), scale_of_byte, 1).astype(np.float32)[:, None]

    def codes(bits: npt.NDArray[np.int64], sign: int) -> npt.NDArray[np.int64]:
        x = magnitude_values(bits, dtype) * np.float32(sign)
        if rule.nearest is not None:
            return rule.nearest(x, np.broadcast_to(scale, x.shape)).astype(np.int64)
        y = rule.quotient(x, scale, statistics)
        return round_elements(x, y, element, rule.rounding)[0].astype(np.int64)

    # No amax leads to a scale below an eighth of it, so a block holds nothing above 8·S; further up gguf's distances
    # round to one number and its codes begin again at 0.
    with_scale = np.minimum(scale.astype(np.float64) * 8, float(magnitude_values(np.array(inf_bits(dtype) - 1), dtype)))
    most = with_scale.astype(DTYPES[dtype]).view(f"u{DTYPES[dtype].itemsize}").astype(np.int64)
    most = np.where(scale == 0, inf_bits(dtype) - 1, most)  # a scale of 0 bounds nothing
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
    library.hb_build_segments(DTYPE_CODES[dtype], ctypes.byref(tables))


Magnitudes = npt.NDArray[np.int64]


def _first_true(holds: Callable[[Magnitudes], npt.NDArray[np.bool_]], low: Magnitudes, high: Magnitudes) -> Magnitudes:
    """Smallest bits in [low, high] where a predicate that turns true once is true; high + 1 where it never is."""
    low, high = low.copy(), high + 1
    while (low < high).any():
        middle = (low + high) // 2
        found = holds(np.minimum(middle, high)) & (low < high)
        high = np.where(found, middle, high)
        low = np.where(~found & (low < high), middle + 1, low)
    return low


@np.errstate(all="ignore")
def decode_table(
    contract: Contract, format: BlockFormat, stored: F32 | None, top: np.float32, dtype: np.dtype[np.generic]
) -> npt.NDArray[np.generic]:
    """Values of every (scale byte, code), 256 rows, rounded to the output dtype: the contract's own formula."""
    rule = contract.rule(format)
    q = decode(np.arange(1 << format.element.bits, dtype=np.uint8), format.element)[None, :]
    if not rule.negative_zero:
        q = np.where(q == 0, np.float32(0), q).astype(np.float32)
    byte = ALL_BYTES[:, None]
    if isinstance(rule, MXRule | DecodeRule):
        values = rule.decode(np.broadcast_to(q, (256, q.size)), np.broadcast_to(byte, (256, q.size)))
    else:
        scale = np.ones((), np.float32) if stored is None else stored
        values = rule.decode(q, decode(byte, E4M3), scale, top)
    return np.ascontiguousarray(values).astype(dtype)


@np.errstate(all="ignore")
def build_search_tables(
    rule: NVFP4Rule, t: TensorScale, multiplier: F32, tables: Tables, dtype: str
) -> SearchTables | None:
    """Numbers of every scale byte for the exact search (reference/search.py), pre-scaled by a power of two.

    tables: those of the same rule and tensor. None where no multiplier stands for the rule's way to a code.
    """
    divides, constants = element_constants(rule, t)
    exponent = int(np.frexp(multiplier)[1]) - 1
    unit = np.ldexp(multiplier, -exponent).astype(np.float32)
    scale = decode(ALL_BYTES[:127], E4M3) * unit
    search = SearchTables(divides=divides, prescale=float(np.ldexp(np.float32(1), -exponent)), unit=float(unit))
    search.to_scale = float(np.float32(1) / (np.float32(6) * unit))
    search.first = first_byte(rule)
    search.zero_byte = int(scale_byte(rule.pre_scale(np.zeros(1, np.float32), t), rule.scale_byte)[0])
    # y = x·m = x'·(m·2**k), or x/d = x'/(d·2**-k): exact, because k is small (the caller checked the range of A).
    numbers = np.ldexp(constants, -exponent if divides else exponent).astype(np.float32)
    if divides or rule.rounding.tie != "even":
        fitted = fit_multipliers(tables, np.reciprocal(numbers) if divides else numbers, search.prescale, dtype)
        if fitted is not None:
            search.divides, numbers = 0, fitted
        elif rule.rounding.tie != "even":
            return None
    as_array(search.multiplier, np.float32)[:127] = numbers
    as_array(search.scale, np.float32)[:127] = scale
    return search


def first_byte(rule: NVFP4Rule) -> int:
    """The smallest scale that a search tries."""
    return int(np.searchsorted(E4M3.magnitudes, max(rule.scale_byte.smallest, E4M3.smallest)))


def triangle(matrices: F32) -> F32:
    """Upper triangles of (columns, n, n) row by row, doubled off the diagonal: (columns, n·(n + 1)/2)."""
    rows, columns = np.triu_indices(matrices.shape[1])
    factor = np.where(rows == columns, 1, 2).astype(np.float32)
    return np.ascontiguousarray(matrices[:, rows, columns] * factor)


def hessian_bounds(matrices: F32) -> F32:
    """For each matrix: bounds on the root of its largest eigenvalue, on its trace, and on its smallest eigenvalue.

    With them the kernel leaves out scales that cannot win (native/hessian.inc). A matrix that is not positive
    semidefinite gets a root of -1: nothing is left out.
    """
    exact = matrices.astype(np.float64)
    values = np.linalg.eigvalsh(exact)
    trace = np.trace(exact, axis1=1, axis2=2) * (1 + 1e-6)
    root = np.sqrt(np.maximum(values[:, -1], 0)) * (1 + 1e-6)
    root = np.where(values[:, 0] < 0, -1, root)
    smallest = np.maximum(values[:, 0] - 1e-6 * trace, 0)
    return np.ascontiguousarray(np.stack([root, trace, smallest], axis=1).astype(np.float32))


def exponent_of_largest(values: F32) -> I32:
    """floor(log2) of the largest entry."""
    return np.asarray(np.frexp(np.float32(values.max() if values.max() > 0 else 1))[1] - 1, np.int32)
