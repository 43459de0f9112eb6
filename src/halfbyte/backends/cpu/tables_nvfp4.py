"""Tables of one NVFP4 tensor: the scale byte for each amax, the thresholds of the codes, and numbers for the searches.

They depend on the tensor's amax. C++ code (native/) builds them: it evaluates the contract's formulas to find where
each byte and each code starts. Kernels only look them up.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from halfbyte.backends.cpu.library import native
from halfbyte.backends.cpu.multipliers import fit_multipliers
from halfbyte.backends.cpu.structs import Rule, SearchTables, Tables, as_array
from halfbyte.backends.numbering import DTYPE_NUMBERS, PRE_SCALES, SIGNS, TIES
from halfbyte.codec.bits import F32
from halfbyte.codec.element import decode
from halfbyte.contracts import NVFP4Rule, expressions
from halfbyte.contracts.arithmetic import first_scale_byte, zero_scale_byte
from halfbyte.contracts.spec import Rounding, TensorScale
from halfbyte.formats import E4M3

DIVISORS: dict[object, Callable[[F32, TensorScale], F32]] = {
    expressions.over_scale_product: lambda scale, t: scale * t.factor,
    expressions.over_scale_quotient: lambda scale, t: scale / t.factor,
    expressions.over_scale: lambda scale, t: scale,
}
"""Element formulas that divide x, with their divisor. The other formulas that kernels serve multiply x by a number that
depends only on S."""

SIGN_OF_X = 3
"""Take the sign of x itself unless x is zero (qwantize): the sign stays even if y underflows."""

SCALES = decode(np.arange(127, dtype=np.uint8), E4M3)
"""The value of every finite scale byte."""


def sign_number(rounding: Rounding) -> int:
    """When the sign bit of a code is set, by its number in native/tables.h."""
    return SIGN_OF_X if rounding.zero_input else SIGNS.index(rounding.sign)


@np.errstate(all="ignore")
def element_constants(rule: NVFP4Rule, t: TensorScale) -> tuple[bool, F32]:
    """Whether elements are divided (or multiplied), and the divisor (or multiplier) of each of 127 scale bytes."""
    if rule.element in DIVISORS:
        return True, np.asarray(DIVISORS[rule.element](SCALES, t), np.float32)
    return False, np.asarray(rule.element(np.ones(127, np.float32), SCALES, t), np.float32)


@np.errstate(all="ignore")
def build_nvfp4_tables(rule: NVFP4Rule, t: TensorScale, dtype: str) -> Tables | None:
    """Tables of one tensor. None if its numbers are not finite; then the reference must quantize."""
    library, _ = native()
    divides, constants = element_constants(rule, t)
    policy, rounding = rule.scale_byte, rule.rounding
    for_zero = policy.for_zero
    if rule.pre_scale is expressions.static_scale:
        for_zero = float(rule.pre_scale(np.zeros((), np.float32), t))  # the formula itself replaces zero
    described = Rule(
        pre_scale=PRE_SCALES.index(rule.pre_scale),
        divides=divides,
        tie=TIES.index(rounding.tie),
        sign=sign_number(rounding),
        wraps=rounding.wraps,
        for_zero_byte=-1 if policy.for_zero_byte is None else policy.for_zero_byte,
        statistics=DTYPE_NUMBERS[t.statistics],
        smallest=policy.smallest,
        for_zero=-1.0 if for_zero is None else for_zero,
        factor=float(t.factor),
        largest=float(t.largest),
        top=float(t.top),
        amax=float(t.amax),
    )
    as_array(described.constant, np.float32)[:127] = constants
    tables = Tables()
    refused = library.hb_build_tables(ctypes.byref(described), DTYPE_NUMBERS[dtype], ctypes.byref(tables))
    return None if refused else tables


@np.errstate(all="ignore")
def build_search_tables(
    rule: NVFP4Rule, t: TensorScale, multiplier: F32, tables: Tables, dtype: str
) -> SearchTables | None:
    """Numbers of every scale byte for the exact search (reference/search.py), scaled by a power of two.

    tables: the tables of the same rule and tensor. Returns None if no multiplier gives the rule's codes.
    """
    divides, constants = element_constants(rule, t)
    exponent = int(np.frexp(multiplier)[1]) - 1
    unit = np.ldexp(multiplier, -exponent).astype(np.float32)
    search = SearchTables(divides=divides, prescale=float(np.ldexp(np.float32(1), -exponent)), unit=float(unit))
    search.to_scale = float(np.float32(1) / (np.float32(6) * unit))
    search.first = first_scale_byte(rule)
    search.zero_byte = zero_scale_byte(rule, t)
    # y = x·m = x'·(m·2**k), or x/d = x'/(d·2**-k): exact, because k is small (the caller checked the range of A).
    numbers = np.ldexp(constants, -exponent if divides else exponent).astype(np.float32)
    if divides or rule.rounding.tie != "even":
        fitted = fit_multipliers(tables, np.reciprocal(numbers) if divides else numbers, search.prescale, dtype)
        if fitted is not None:
            search.divides, numbers = 0, fitted
        elif rule.rounding.tie != "even":
            return None
    as_array(search.multiplier, np.float32)[:127] = numbers
    as_array(search.scale, np.float32)[:127] = SCALES * unit
    return search
