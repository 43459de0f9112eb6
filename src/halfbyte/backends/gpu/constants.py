"""What the kernels are compiled with: numbers of their own, and a contract's rule as numbers. Loads no framework.

Triton takes the numbers from here and from backends/numbering.py (triton/numbers.py); tests compare CUDA's with them.
"""

from __future__ import annotations

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
    number_of,
)
from halfbyte.contracts import NVFP4Rule, reductions
from halfbyte.contracts.arithmetic import four_six_error, statistics_dtype
from halfbyte.contracts.spec import FourSixRule, Rounding, ScaleByte, Scaling, Tile
from halfbyte.formats.spec import ElementFormat
from halfbyte.methods import FourSix, Method

Constants = dict[str, int | float | bool]

FLAT, ROWS, TILES, LISTED = 0, 1, 2, 3
"""How blocks lie: one after the other, in rows, in tiles of sixteen rows, or in several tensors."""

ONE_GROUP, GROUP_OF_PROGRAM, GROUP_OF_BLOCK = 0, 1, 2
"""Which blocks share a tensor-level scale: all, those of a program, or only some of those."""

NO_ASSEMBLY, ASSEMBLY, FP4_ASSEMBLY = 0, 1, 2
"""Inline assembly: none (the interpreter), that of Ada and Hopper, or that of Blackwell, which converts to FP4."""

AMAX_EACH, AMAX_OF_PARTS, AMAX_GIVEN = 0, 1, 2
"""Where tensor-level numbers come from: one amax per group, several of which the largest counts, or one for all."""

MOST_PARTS = 2048
"""Partial amaxes of a group that one program can read; a power of two."""

UNIFORM, WEIGHTED, HESSIAN = 0, 1, 2
"""What an exact search minimises."""

STATIC_FOUR_SIX, EAGER_SWEEP, FUSED_SWEEP = 0, 1, 2
"""Model-Optimizer's searches for static weights."""

PREPARED = (
    "amax", "factor", "inverse", "folded", "regular", "share_of_top", "share_of_amax", "prescale", "prescale_again",
    "unit", "searched", "no_underflow",
)  # fmt: skip
"""The numbers of a tensor (or of a row, or of a group of tensors) that `prepare` writes for the other kernels:

amax, factor     A, and what slot 1 makes of it; inverse: 1/factor; folded: factor·sixth
regular          1 where no product of the short formulas under- or overflows
share_of_top     c/6; share_of_amax: A/6
prescale, again  the search's 2**-k in two factors; unit: the multiplier times both
searched         1 where the multiplier is positive and finite
no_underflow     1 where, in addition, no y underflows to zero
"""

NUMBERS = 16
"""How many float32 are set aside for them."""

WORDS = 5
"""Words of 32 bits in the sum of a candidate's errors: one error, in steps of 2**-16 of its unit, may have 156 bits."""

CONSTANT_FACTOR = len(FACTORS)
"""The number of a factor that was given with the contract."""

ONE_LEVEL = len(MULTIPLIERS)
"""The number of the multiplier of a rule that stores none: 1."""

DECODE_BY_TABLE = len(DECODES)
"""The number of a decoding formula whose place a table of the scale bytes takes."""

DECODE_BY_POWER = DECODE_BY_TABLE + 1
"""The same, where the table holds powers of two and NaN last: then nothing is looked up."""

NOT_STORED = -1
NOTHING = -1
"""For an option that a contract does not use."""

SMALLEST_NORMAL = 2.0**-126


def rounding_constants(rounding: Rounding, element: ElementFormat) -> Constants:
    """Slot 5."""
    return {
        "TIE": TIES.index(rounding.tie),
        "SIGN": SIGNS.index(rounding.sign),
        "NAN_CODE": rounding.nan_code if element.nan_code is None else element.nan_code,
        "ZERO_INPUT": int(rounding.zero_input),
    }


def prepare_constants(rule: NVFP4Rule, method: Method, dtype: str) -> Constants:
    """Slots 1 and 6: what the kernel needs that makes a tensor's numbers from its amax."""
    constant = rule.constant_factor
    return {
        "TOP": float(rule.anchor(method)),
        "KIND": CONSTANT_FACTOR if constant is not None else _number(FACTORS, rule.factor),
        "STATISTICS": DTYPE_NUMBERS[statistics_dtype(rule, dtype)],
        "CONSTANT": 0.0 if constant is None else float(constant),
        "STORED": NOT_STORED if rule.stored is None else _number(STORED, rule.stored),
        "MULTIPLIER": ONE_LEVEL if rule.stored is None else _number(MULTIPLIERS, rule.multiplier),
        "DTYPE": DTYPE_NUMBERS[dtype],
    }


def block_constants(rule: NVFP4Rule, pre_scale: object, element: ElementFormat, dtype: str) -> Constants:
    """Slots 2 to 5: what the kernels need that quantize blocks."""
    return {
        "PRE": _number(PRE_SCALES, pre_scale),
        "ELEMENT": _number(ELEMENTS, rule.element),
        "STATISTICS": DTYPE_NUMBERS[statistics_dtype(rule, dtype)],
        "LARGEST": float(np.float32(rule.element_max)),
        "WRAPS": int(rule.rounding.wraps),
        "DTYPE": DTYPE_NUMBERS[dtype],
        **scale_byte_constants(rule.scale_byte),
        **rounding_constants(rule.rounding, element),
    }


def scale_byte_constants(policy: ScaleByte) -> Constants:
    """Slot 3. Kernels hold no subnormal constants: a scale as small as that becomes byte 0, as 0 does."""

    def normal(number: float) -> float:
        return float(np.float32(number)) if number >= SMALLEST_NORMAL else 0.0

    return {
        "SMALLEST": normal(policy.smallest),
        "FOR_ZERO": float(NOTHING) if policy.for_zero is None else normal(policy.for_zero),
        "FOR_ZERO_BYTE": NOTHING if policy.for_zero_byte is None else int(policy.for_zero_byte),
    }


def four_six_constants(four_six: FourSixRule, method: FourSix, tile: Tile, scaling: Scaling) -> Constants:
    """4over6: the error, its size, and the order in which the sizes of a row are added."""
    order = four_six.block_sum if tile[0] == 1 else reductions.sequential
    return {
        "KIND": _number(ERRORS, four_six_error(four_six, method, scaling)),
        "METRIC": METRICS.index(method.error),
        "ORDER": _number(SUMS, order),
    }


def _number(listed: list[object], entry: object) -> int:
    number = number_of(listed, entry)
    if number is None:
        raise TypeError(f"{entry} has no number: choose() lets no such rule pass")
    return number
