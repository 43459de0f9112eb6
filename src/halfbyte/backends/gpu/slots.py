"""What the kernels know of formats and of the slots of a rule; a Reason for everything else.

Each function below looks at one part of a request and returns None if some kernel was written for it. `choose.py` puts
the parts together. Formulas are compared by identity: one that computes the same under another name is not listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np

from halfbyte.backends.numbering import (
    DECODES,
    DTYPE_NUMBERS,
    ELEMENTS,
    ERRORS,
    FACTORS,
    METRICS,
    MULTIPLIERS,
    PRE_SCALES,
    SIGNS,
    STORED,
    SUMS,
    TIES,
    exponent_rule,
    number_of,
)
from halfbyte.backends.protocol import Reason
from halfbyte.contracts import MXRule, NVFP4Rule, exponents, expressions, reductions
from halfbyte.contracts.peers.flashinfer import ceil_bits_of_factor
from halfbyte.contracts.peers.gguf import decode_scale_halved, first_nearest
from halfbyte.contracts.searches.qwantize import search_e4m3, search_e8m0
from halfbyte.contracts.searches.static import search_block_amax
from halfbyte.contracts.spec import DecodeRule, FourSixRule, Rounding, ScaleByte, Tile, formula
from halfbyte.formats import E2M1, E4M3, E8M0, BlockFormat, ElementFormat
from halfbyte.methods import FourSix, Hessian, Optimal

Kind = tuple[ElementFormat, ElementFormat, bool]
"""Element, scale, and whether there is a tensor-level scale."""

NVFP4_BLOCKS: Mapping[Kind, tuple[int, ...]] = {(E2M1, E4M3, True): (16, 32)}
MX_BLOCKS: Mapping[Kind, tuple[int, ...]] = {(E2M1, E8M0, False): (16, 32), (E4M3, E8M0, False): (32,)}
"""Block lengths of the formats that the kernels quantize and decode."""

TILE = (16, 16)
"""The only tile of several rows."""

MX_MULTIPLYING: list[object] = [exponents.times_reciprocal, exponents.times_reciprocal_zeroed]
MX_DIVIDING: list[object] = [exponents.over, exponents.over_or_zero]
"""Element formulas of the MX rules. Kernels multiply: that is dividing where the scale is a power of two."""

MX_DECODES: list[object] = [exponents.decode_e8m0, exponents.decode_power, decode_scale_halved]
"""Decoding formulas that are one exact product with a number that depends on the scale byte alone."""

QWANTIZE_ROUNDING = Rounding(tie="down", nan_code=7, zero_input=True)
"""What the kernel of qwantize's searches rounds by."""

AMAX_READERS: list[object] = [
    expressions.store_amax,
    expressions.store_reciprocal_or_zero,
    expressions.static_scale,
    expressions.divided_then_factor_or_zero,
    expressions.error_by_amax,
]
"""Formulas that look at the tensor's amax itself, not only at what `factor` made of it."""


def no_kernel(slot: str, found: object) -> Reason:
    """The wording for a slot whose content is not listed."""
    text = (formula(found) or getattr(found, "__name__", repr(found))) if callable(found) else repr(found)
    return Reason(f"no GPU kernel knows the contract's {slot}: {text}")


def _unlisted(slot: str, found: object, listed: Sequence[object]) -> Reason | None:
    return no_kernel(slot, found) if number_of(listed, found) is None else None


# --- formats, tiles, dtypes ---


def format_reason(format: BlockFormat, listed: Mapping[Kind, tuple[int, ...]]) -> Reason | None:
    """Element, scale and block length, by value: a name alone proves nothing."""
    blocks = listed.get((format.element, format.scale, format.has_global))
    if type(format) is not BlockFormat or blocks is None:
        return Reason(
            f"no GPU kernel takes {format.element.name} elements ({format.element.bits} bits, largest "
            f"{format.element.max:g}) with {format.scale.name} scales under this rule, as format {format.name} has "
            "them; the kernels have NVFP4, MXFP4 and MXFP8"
        )
    if format.block not in blocks:
        allowed = " or ".join(map(str, blocks))
        return Reason(f"no GPU kernel takes blocks of {format.block}; for {format.name} they take {allowed}")
    return None


def operand_reason(format: BlockFormat, tile: Tile, scaling: str, dtype: str) -> Reason | None:
    """Dtype, tile and scaling."""
    if dtype not in DTYPE_NUMBERS:
        return Reason(f"no GPU kernel reads dtype {dtype}; they read {', '.join(DTYPE_NUMBERS)}")
    if scaling not in ("tensor", "row"):
        return Reason(f"no GPU kernel has scaling {scaling!r}; they have one scale per tensor or per row")
    if tile == (1, format.block):
        return None
    if tile != TILE or format.block != TILE[1]:
        return Reason(f"no GPU kernel has tiles of {tile[0]}x{tile[1]}; they have blocks of one row and 16x16")
    if scaling != "tensor":
        return Reason("tiles of 16x16 span rows, which have a scale of their own here")
    return None


# --- NVFP4 ---


def nvfp4_reason(rule: NVFP4Rule, pre_scale: object) -> Reason | None:
    """The slots that every NVFP4 kernel runs."""
    return (
        _factor_reason(rule)
        or _unlisted("block scale", pre_scale, PRE_SCALES)
        or scale_byte_reason(rule.scale_byte)
        or _unlisted("element formula", rule.element, ELEMENTS)
        or rounding_reason(rule.rounding)
        or _stored_reason(rule)
        or (no_kernel("statistics", rule.statistics) if rule.statistics not in ("input", "fp32") else None)
        or anchor_reason(rule.element_max, rule.e4m3_max)
    )


def _factor_reason(rule: NVFP4Rule) -> Reason | None:
    given = rule.constant_factor
    if given is None:
        return _unlisted("tensor-level factor", rule.factor, FACTORS)
    positive = isinstance(given, np.float32) and isfinite(given) and given > 0
    return None if positive else no_kernel("given tensor-level factor", given)


def _stored_reason(rule: NVFP4Rule) -> Reason | None:
    if rule.stored is None:
        return None
    return _unlisted("stored scale", rule.stored, STORED) or _unlisted("multiplier", rule.multiplier, MULTIPLIERS)


def scale_byte_reason(policy: ScaleByte) -> Reason | None:
    """Slot 3: any scale from 0 to 448 in place of small ones or of zero, any positive byte in place of byte 0."""
    if type(policy) is not ScaleByte:
        return no_kernel("scale byte policy", policy)
    numbers = [policy.smallest] if policy.for_zero is None else [policy.smallest, policy.for_zero]
    if not all(isinstance(number, int | float) and 0 <= number <= E4M3.max for number in numbers):
        return no_kernel("scale byte policy (kernels take numbers from 0 to 448)", policy)
    byte = policy.for_zero_byte
    if byte is not None and not (isinstance(byte, int) and 0 <= byte < E4M3.magnitudes.size):
        return no_kernel("byte for zero (kernels take 0 to 126)", byte)
    return None


def rounding_reason(rounding: Rounding) -> Reason | None:
    """Slot 5 of E2M1 elements."""
    if type(rounding) is not Rounding or rounding.tie not in TIES or rounding.sign not in SIGNS:
        return no_kernel("rounding", rounding)
    if not (isinstance(rounding.nan_code, int) and 0 <= rounding.nan_code < E2M1.magnitudes.size):
        return no_kernel("code for NaN (kernels take 0 to 7)", rounding.nan_code)
    return None


def anchor_reason(element_max: float, e4m3_max: float) -> Reason | None:
    """Q and c: positive numbers, as slots 1, 2 and 6 use them."""
    numbers = (element_max, e4m3_max)
    if all(isinstance(number, int | float) and 0 < number <= 1 << 16 for number in numbers):
        return None
    return Reason(f"the kernels take an element_max and e4m3_max from 0 to 65536, not {element_max!r} and {e4m3_max!r}")


# --- methods under NVFP4 ---


def four_six_reason(four_six: FourSixRule, method: FourSix, error: object, tile: Tile) -> Reason | None:
    """4over6: error and order of sums."""
    if type(four_six) is not FourSixRule or method.error not in METRICS:
        return no_kernel("4over6", four_six)
    reason = _unlisted("4over6 error", error, ERRORS) or anchor_reason(1, method.e4m3_max)
    if reason is not None or tile[0] == 1:
        return reason or _unlisted("sum of 4over6 over a block", four_six.block_sum, SUMS)
    if four_six.tile_sum is reductions.eight_lanes_flat:
        return None
    if four_six.tile_sum is not reductions.rows_then_tree:
        return no_kernel("sum of 4over6 over a tile", four_six.tile_sum)
    if method.error == "abs_max":
        return Reason("no GPU kernel has the largest error of a tile whose rows are added one by one")
    return None


def static_reason(rule: NVFP4Rule) -> Reason | None:
    """Model-Optimizer's search for block amaxes."""
    return None if rule.block_search is search_block_amax else no_kernel("block search", rule.block_search)


def exact_search_reason(rule: NVFP4Rule) -> Reason | None:
    """The searches over every scale, as backends/reference/search.py defines them."""
    own = rule.searches if rule.search_rule is None else (*rule.searches, *rule.search_rule.searches)
    if any(isinstance(method, Optimal | Hessian) for method in own):
        return Reason("the contract has a block search of its own before the exact search, which no GPU kernel runs")
    return None


def qwantize_reason(rule: NVFP4Rule | MXRule, search: str) -> Reason | None:
    """qwantize's own searches, with its element formula and rounding: the kernel has them written into it."""
    if rule.scale_search is not (search_e4m3 if isinstance(rule, NVFP4Rule) else search_e8m0):
        return no_kernel("scale search", rule.scale_search)
    if search == "weighted":
        return Reason("the contract's own search knows no weights")
    if search == "descent":
        return Reason("the contract's own search has nearest codes only")
    if isinstance(rule, NVFP4Rule):
        plain = rule.element is expressions.over_scale
    else:
        plain = rule.nearest is None and not (rule.rounds_quotient and rule.statistics == "input")
    if not plain or rule.rounding != QWANTIZE_ROUNDING:
        return Reason(
            "the kernel of qwantize's search has qwantize's element formula and rounding, not this contract's"
        )
    return None


# --- MX ---


def mx_reason(rule: MXRule, format: BlockFormat) -> Reason | None:
    """The slots of a rule with power-of-two scales."""
    if rule.blocks is not None and format.block not in rule.blocks:
        return Reason(f"the contract has blocks of {', '.join(map(str, rule.blocks))}, not {format.block}")
    if rule.statistics not in ("input", "fp32"):
        return no_kernel("statistics", rule.statistics)
    return _mx_scale_reason(rule) or rounding_reason(rule.rounding) or _mx_element_reason(rule, format.element)


def _mx_scale_reason(rule: MXRule) -> Reason | None:
    known = exponent_rule(rule.scale)
    if known is None:
        return no_kernel("exponent rule", rule.scale)
    if known is ceil_bits_of_factor and rule.nearest is None and number_of(MX_MULTIPLYING, rule.element) is None:
        return Reason("the scale is no power of two under this exponent rule, and the kernels do not divide by it")
    return None


def _mx_element_reason(rule: MXRule, element: ElementFormat) -> Reason | None:
    rounding = rule.rounding
    if rounding.wraps:
        return no_kernel("rounding without saturation for power-of-two scales", rounding)
    if rule.nearest is not None:
        if rule.scale is not exponents.floor_log2_wrapping:
            return Reason("the first nearest code is compiled for gguf's own exponent rule")
        return None if rule.nearest is first_nearest and element == E2M1 else no_kernel("nearest code", rule.nearest)
    if element == E4M3 and (rounding.tie, rounding.sign, rounding.zero_input) != ("even", "sign bit", False):
        return Reason("the kernels round E4M3 elements to even and keep every sign bit, as this contract does not")
    if rule.element is exponents.over_or_zero and rounding.sign == "sign bit":
        return Reason("under a scale of zero the kernels keep the sign of zero, where x/S, 0 if S = 0 has none")
    return _unlisted("element formula", rule.element, [*MX_MULTIPLYING, *MX_DIVIDING])


# --- decoding ---


def decoding_reason(rule: NVFP4Rule | MXRule | DecodeRule, format: BlockFormat) -> Reason | None:
    """Formats and formulas that the decoding kernel has."""
    if isinstance(rule, NVFP4Rule):
        reason = format_reason(format, NVFP4_BLOCKS) or _unlisted("decoding", rule.decode, DECODES)
        if reason is None and rule.stored is None and rule.decode is not expressions.decode_single_level:
            return Reason("the contract stores no scale, but its decoding formula has one")
        return reason
    known = MX_BLOCKS if isinstance(rule, MXRule) else {**MX_BLOCKS, **NVFP4_BLOCKS}
    return format_reason(format, known) or _unlisted("decoding", rule.decode, MX_DECODES)
