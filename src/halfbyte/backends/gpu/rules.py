"""Contracts as numbers that the GPU kernels are compiled with; which requests have a kernel. Loads no framework."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.codec.bits import DTYPES, F32, U8, widen
from halfbyte.contracts import Contract, MXRule, NVFP4Rule, exponents, expressions, reductions
from halfbyte.contracts.searches.qwantize import search_e4m3, search_e8m0
from halfbyte.contracts.searches.static import search_block_amax
from halfbyte.contracts.spec import DecodeRule, FourSixRule, Rounding
from halfbyte.formats import BlockFormat
from halfbyte.formats.spec import ElementFormat
from halfbyte.methods import Amax, FourSix, Hessian, Optimal
from halfbyte.request import Request

DTYPE_NUMBERS = {"bf16": 0, "fp16": 1, "fp32": 2}

FACTORS: list[object] = [
    expressions.clamped_ratio,
    expressions.ratio,
    expressions.reciprocal_product,
    expressions.reciprocal_product_or_max,
    expressions.reciprocal_product_in_statistics,
    expressions.quotient,
    expressions.no_factor,
]
CONSTANT_FACTOR = len(FACTORS)
STORED: list[object] = [
    expressions.store_amax,
    expressions.store_factor,
    expressions.store_reciprocal,
    expressions.store_reciprocal_or_zero,
]
MULTIPLIERS: list[object] = [expressions.amax_over_top, expressions.as_stored, expressions.reciprocal_of_stored]
ONE_LEVEL = len(MULTIPLIERS)
PRE_SCALES: list[object] = [
    expressions.folded_sixth,
    expressions.sixth_then_factor,
    expressions.divided_then_factor_or_zero,
    expressions.over_product,
    expressions.factor_times_divided,
    expressions.divided_twice,
    expressions.divided,
    expressions.divided_floored,
    expressions.static_scale,
    expressions.divided_then_factor,
]
ELEMENTS: list[object] = [
    expressions.times_clamped_reciprocal,
    expressions.times_reciprocal_or_zero,
    expressions.times_reciprocal_over_scale,
    expressions.times_reciprocal_of_scale,
    expressions.times_reciprocal_zeroed,
    expressions.times_reciprocal_shrunk,
    expressions.over_scale_product,
    expressions.over_scale_quotient,
    expressions.over_scale,
]
ERRORS: list[object] = [expressions.error_by_amax, expressions.error_by_reciprocal, expressions.error_scaled]
METRICS = ["mae", "mse", "abs_max"]
SUMS: list[object] = [reductions.sequential, reductions.eight_lanes]
DECODES: list[object] = [
    expressions.decode_by_amax,
    expressions.decode_by_multiplier,
    expressions.decode_by_divisor,
    expressions.decode_by_reciprocal,
    expressions.decode_single_level,
]
SIGNS = ["y < 0", "sign bit", "y <= 0"]
TIES = ["even", "down"]
PLAIN_ROUNDING = Rounding()


@dataclass(frozen=True)
class RuleNumbers:
    """The constants of an NVFP4 rule, by the names that the kernels have for them."""

    prepare: dict[str, int | float]
    blocks: dict[str, int | float]
    short: bool
    """Whether the formulas are TransformerEngine's, which have a shorter kernel."""


def dtype_number(name: str) -> int:
    return DTYPE_NUMBERS[name]


def rounding_numbers(rounding: Rounding, element: ElementFormat) -> dict[str, int | float]:
    """Slot 5."""
    return {
        "TIE": TIES.index(rounding.tie),
        "SIGN": SIGNS.index(rounding.sign),
        "NAN_CODE": rounding.nan_code if element.nan_code is None else element.nan_code,
        "ZERO_INPUT": int(rounding.zero_input),
    }


def rule_numbers(rule: NVFP4Rule, request: Request) -> RuleNumbers:
    """What the kernels need to know of a rule under one method."""
    statistics = DTYPE_NUMBERS[request.dtype if rule.statistics == "input" else "fp32"]
    constant = rule.constant_factor
    prepare: dict[str, int | float] = {
        "TOP": float(rule.anchor(request.method)),
        "KIND": CONSTANT_FACTOR if constant is not None else FACTORS.index(rule.factor),
        "STATISTICS": statistics,
        "CONSTANT": 0.0 if constant is None else float(constant),
        "STORED": -1 if rule.stored is None else STORED.index(rule.stored),
        "MULTIPLIER": ONE_LEVEL if rule.stored is None else MULTIPLIERS.index(rule.multiplier),
        "DTYPE": DTYPE_NUMBERS[request.dtype],
    }
    pre = rule.pre_scale
    if isinstance(request.method, FourSix) and rule.four_six is not None:
        pre = rule.four_six.pre_scale
    policy = rule.scale_byte
    blocks: dict[str, int | float] = {
        "PRE": PRE_SCALES.index(pre),
        "ELEMENT": ELEMENTS.index(rule.element),
        "STATISTICS": statistics,
        "LARGEST": float(rule.element_max),
        "SMALLEST": float(policy.smallest),
        "FOR_ZERO": -1.0 if policy.for_zero is None else float(policy.for_zero),
        "FOR_ZERO_BYTE": -1 if policy.for_zero_byte is None else int(policy.for_zero_byte),
        "WRAPS": int(rule.rounding.wraps),
        **rounding_numbers(rule.rounding, request.format.element),
    }
    short = (
        rule.element is expressions.times_clamped_reciprocal
        and rule.factor is expressions.clamped_ratio
        and constant is None
        and pre in (expressions.folded_sixth, expressions.divided_then_factor)
        and rule.rounding == PLAIN_ROUNDING
        and (policy.smallest, policy.for_zero, policy.for_zero_byte) == (0.0, None, None)
    )
    return RuleNumbers(prepare, blocks, short)


def four_six_numbers(four_six: FourSixRule, method: FourSix, request: Request) -> dict[str, int | float]:
    """Error, its size and the order in which sizes are added."""
    error = four_six.exact_error
    if request.scaling == "row" and four_six.exact_row_error is not None:
        error = four_six.exact_row_error
    if method.fast_error and four_six.fast_error is not None:
        error = four_six.fast_error
    return {
        "KIND": ERRORS.index(error),
        "METRIC": METRICS.index(method.error),
        "ORDER": SUMS.index(four_six.block_sum),
    }


# --- which requests have a kernel ---


def reason_against(request: Request) -> str | None:
    """Why no GPU kernel quantizes a request; None if one does."""
    rule = request.contract.rules.get(request.format.name)
    if isinstance(rule, DecodeRule) or rule is None:
        return None  # refused before any backend is asked
    method = request.method
    if isinstance(rule, MXRule):
        return _peer_reason(rule, request)
    rule = rule.for_method(method)
    if isinstance(method, FourSix) and rule.four_six is not None:
        in_rows = request.tile[0] == 1 or rule.four_six.tile_sum is reductions.rows_then_tree
        return None if in_rows or adds_over_tiles(rule, request) else "its sum over tiles has no GPU kernel"
    if isinstance(method, Amax | Optimal | Hessian):
        return _peer_reason(rule, request)
    if rule.block_search is search_block_amax and method in rule.searches:
        return None
    return f"method {method.name} has no GPU kernel"


def adds_over_tiles(rule: NVFP4Rule, request: Request) -> bool:
    """Whether 4over6 adds its errors over all elements of a tile in one order."""
    four_six = rule.four_six
    fits = four_six is not None and isinstance(request.method, FourSix) and request.tile[0] != 1
    return fits and four_six is not None and four_six.tile_sum is reductions.eight_lanes_flat


def _peer_reason(rule: NVFP4Rule | MXRule, request: Request) -> str | None:
    """Why the search that a rule has of its own has no kernel; None if it has one, or there is no such search."""
    method = request.method
    if not isinstance(method, Optimal | Hessian) or rule.scale_search is None:
        return None
    if rule.scale_search not in (search_e4m3, search_e8m0):
        return f"the search of {request.contract} has no GPU kernel"
    if isinstance(method, Optimal) and method.weights is not None:
        return f"the search of {request.contract} knows no weights"
    if isinstance(method, Hessian) and method.codes != "nearest":
        return f"the search of {request.contract} has nearest codes only"
    return None


# --- tables of the MX formats ---


@dataclass(frozen=True)
class MXTable:
    """Scale byte and element constant by the top fifteen bits of a block's amax; two a bucket for float32."""

    bytes: U8
    constants: F32
    split: npt.NDArray[np.int32]
    """float32: bits from which on the bucket's second entry holds."""


@functools.lru_cache(maxsize=64)
@np.errstate(all="ignore")
def mx_table(rule: MXRule, element: ElementFormat, dtype: str) -> MXTable:
    """The contract's own function asked for every amax (16 bits), or for both ends of every bucket (float32)."""
    statistics = dtype if rule.statistics == "input" else "fp32"

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


@functools.lru_cache(maxsize=64)
@np.errstate(all="ignore")
def mx_decode_table(contract: Contract, format: BlockFormat) -> F32:
    """What a scale byte multiplies twice an element's value by: halves, so that no entry overflows."""
    rule = contract.rule(format)
    if isinstance(rule, NVFP4Rule):
        raise TypeError("NVFP4 decodes by formula")
    byte = np.arange(256, dtype=np.uint8)
    return np.ascontiguousarray(rule.decode(np.full(256, 0.5, np.float32), byte))
