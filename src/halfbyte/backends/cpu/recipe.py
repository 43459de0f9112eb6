"""What the library needs for a call besides the data, as a structure: the formulas and numbers of a request.

It is filled once for a request and kept with it. The library then computes a whole call in one function
(native/whole_call.cpp): amax, tensor-level numbers, scale bytes and codes.
"""

from __future__ import annotations

import ctypes

import numpy as np

from halfbyte.backends.cpu.choose import Kernel
from halfbyte.backends.cpu.decode import decode_table, for_kernel
from halfbyte.backends.cpu.structs import DecodeRecipe, Recipe
from halfbyte.backends.cpu.tables_mx import ELEMENTS as MX_ROUNDINGS
from halfbyte.backends.cpu.tables_mx import build_mx_tables, element_number, search_tables, zero_block_byte
from halfbyte.backends.cpu.tables_nvfp4 import sign_number
from halfbyte.backends.headroom import ALONE, CLEARLY, SAMPLED, SMALL, headrooms, probe
from halfbyte.backends.numbering import (
    DECODES,
    DTYPE_NUMBERS,
    ELEMENTS,
    ERRORS,
    FACTORS,
    METRICS,
    MULTIPLIERS,
    PRE_SCALES,
    STORED,
    TIES,
    number_of,
)
from halfbyte.codec.bits import DTYPES, F32
from halfbyte.contracts import MXRule, NVFP4Rule
from halfbyte.contracts.arithmetic import first_scale_byte, four_six_error, statistics_dtype
from halfbyte.formats import E2M1, E4M3
from halfbyte.methods import FourSix, Hessian, Optimal
from halfbyte.request import Request

ROUTES: dict[Kernel, int] = {
    Kernel.PLAIN_BLOCKS: 0,
    Kernel.FOUR_SIX_BLOCKS: 1,
    Kernel.FOUR_SIX_ORDERED: 2,
    Kernel.EXACT_BLOCKS: 3,
    Kernel.EXACT_GENERAL: 4,
    Kernel.QWANTIZE_SEARCH: 5,
    Kernel.MX_BLOCKS: 6,
    Kernel.MX_EXACT: 7,
}
"""The kernels that the library runs as a whole call, by their numbers in native/recipe.h."""

WORTH_TABLES = 192
"""Blocks of a tensor: with fewer, building tables takes longer than they save."""

E4M3_VALUES: F32 = np.append(E4M3.magnitudes, np.zeros(129, np.float32)).astype(np.float32)
"""The value of each finite scale byte; 0 for the others."""


def recipe_of(request: Request, kernel: Kernel) -> Recipe | None:
    """The structure for a request that `choose` gives to this kernel; None if no function computes it as a whole."""
    contract, method = request.contract, request.method
    weighted = isinstance(method, Hessian) or (isinstance(method, Optimal) and method.weights is not None)
    moved = contract.transform.columnwise or contract.transform.hadamard
    if kernel not in ROUTES or weighted or moved or request.tile[0] != 1 or request.scaling != "tensor":
        return None
    rule = request.rule
    if isinstance(rule, MXRule):
        return _mx_recipe(request, rule, kernel)
    return _nvfp4_recipe(request, rule, kernel) if isinstance(rule, NVFP4Rule) else None


def _nvfp4_recipe(request: Request, rule: NVFP4Rule, kernel: Kernel) -> Recipe | None:
    method, policy, rounding = request.method, rule.scale_byte, rule.rounding
    factor, pre_scale = number_of(FACTORS, rule.factor), number_of(PRE_SCALES, rule.pre_scale)
    element, multiplier = number_of(ELEMENTS, rule.element), number_of(MULTIPLIERS, rule.multiplier)
    stored = -1 if rule.stored is None else number_of(STORED, rule.stored)
    if factor is None or pre_scale is None or element is None or multiplier is None or stored is None:
        return None  # a formula without a number: tables serve it, by the long way
    given = rule.constant_factor
    recipe = Recipe(
        route=ROUTES[kernel],
        block=request.format.block,
        dtype=DTYPE_NUMBERS[request.dtype],
        factor=factor,
        pre_scale=pre_scale,
        element=element,
        stored=stored,
        multiplier=multiplier,
        tie=TIES.index(rounding.tie),
        sign=sign_number(rounding),
        wraps=rounding.wraps,
        nan_code=rounding.nan_code,
        for_zero_byte=-1 if policy.for_zero_byte is None else policy.for_zero_byte,
        statistics=DTYPE_NUMBERS[statistics_dtype(rule, request.dtype)],
        first=first_scale_byte(rule),
        worth_tables=WORTH_TABLES,
        smallest=policy.smallest,
        for_zero=-1.0 if policy.for_zero is None else policy.for_zero,
        largest=rule.element_max,
        top=float(rule.anchor(method)),
        given=0.0 if given is None else float(given),
        values=E4M3_VALUES.ctypes.data,
    )
    if not _fill_headrooms(request, recipe):
        return None
    if isinstance(method, FourSix) and rule.four_six is not None:
        recipe.error = ERRORS.index(four_six_error(rule.four_six, method, request.scaling))
        recipe.metric = METRICS.index(method.error)
    return recipe


def _fill_headrooms(request: Request, recipe: Recipe) -> bool:
    """Fill in the candidates for the amax. Returns False if they are more than the structure holds."""
    recipe.small = SMALL
    large, small = headrooms(request, SMALL + 1), headrooms(request, SMALL)
    if max(len(large), len(small)) > len(recipe.headroom):
        return False
    recipe.headrooms = 0 if large == ALONE else len(large)
    recipe.small_headrooms = 0 if small == ALONE else len(small)
    recipe.headroom[: len(large)], recipe.small_headroom[: len(small)] = large, small
    if probe(request, SMALL + 1) is not None:
        recipe.sampled = SAMPLED
        recipe.clearly[:] = CLEARLY
    return True


def _mx_recipe(request: Request, rule: MXRule, kernel: Kernel) -> Recipe:
    element, dtype = request.format.element, request.dtype
    searches = kernel is Kernel.MX_EXACT
    tables = (search_tables if searches else build_mx_tables)(rule, element, dtype)
    number = element_number(rule, element, dtype) if searches else None
    recipe = Recipe(
        route=ROUTES[kernel],
        block=request.format.block,
        dtype=DTYPE_NUMBERS[dtype],
        mx_element=number if number is not None else 0 if element == E2M1 else len(MX_ROUNDINGS),
        zero_byte=zero_block_byte(rule, element, dtype) if searches else -1,
        tables=ctypes.addressof(tables),
    )
    recipe.held = tables  # the structure has only the address
    return recipe


def decode_recipe_of(request: Request, dtype: str) -> DecodeRecipe | None:
    """The structure for decoding a request to a dtype, given by its short name; None if no function does it.

    Without a tensor-level scale the values of every byte and code are the same for all tensors, and a table has them.
    """
    rule, format = request.contract.rule(request.format), request.format
    recipe = DecodeRecipe(block=format.block, dtype=DTYPE_NUMBERS[dtype], code_bits=format.element.bits)
    if not isinstance(rule, NVFP4Rule):
        table = for_kernel(decode_table(request.contract, format, None, np.float32(1), DTYPES[dtype]), format)
        recipe.table = table.ctypes.data
        recipe.held = table  # the structure has only the address
        return recipe
    number = number_of(DECODES, rule.decode)
    if number is None or format.scale != E4M3:
        return None
    recipe.decode, recipe.negative_zero = number, rule.negative_zero
    recipe.top = float(rule.for_method(request.method).anchor(request.method))
    return recipe
