"""The kernels' constants, made from the numbers that Python passes to them: so the two sides cannot differ.

A constant that stands for a formula has the formula's name in capitals.
"""

from collections.abc import Sequence

import triton.language as tl

from halfbyte.backends import numbering
from halfbyte.backends.gpu import constants
from halfbyte.codec import bits
from halfbyte.contracts import expressions


def _by_name(listed: Sequence[object], name: str) -> tl.constexpr:
    names = [getattr(entry, "__name__", entry) for entry in listed]
    return tl.constexpr(names.index(name))


FLOAT32_MAX = tl.constexpr(float(bits.FLOAT32_MAX))
SIXTH = tl.constexpr(float(expressions.SIXTH))  # 1/6 rounded to float32

# --- dtypes, where blocks lie, which assembly there is ---

BF16 = tl.constexpr(numbering.DTYPE_NUMBERS["bf16"])
FP16 = tl.constexpr(numbering.DTYPE_NUMBERS["fp16"])
FP32 = tl.constexpr(numbering.DTYPE_NUMBERS["fp32"])

FLAT = tl.constexpr(constants.FLAT)
ROWS = tl.constexpr(constants.ROWS)
TILES = tl.constexpr(constants.TILES)
LISTED = tl.constexpr(constants.LISTED)

ONE_GROUP = tl.constexpr(constants.ONE_GROUP)
GROUP_OF_PROGRAM = tl.constexpr(constants.GROUP_OF_PROGRAM)
GROUP_OF_BLOCK = tl.constexpr(constants.GROUP_OF_BLOCK)

FP4_ASSEMBLY = tl.constexpr(constants.FP4_ASSEMBLY)

# --- where an amax comes from ---

AMAX_OF_PARTS = tl.constexpr(constants.AMAX_OF_PARTS)
AMAX_GIVEN = tl.constexpr(constants.AMAX_GIVEN)
MOST_PARTS = tl.constexpr(constants.MOST_PARTS)

# --- the prepared numbers of a group ---

NUMBERS = tl.constexpr(constants.NUMBERS)
WORDS = tl.constexpr(constants.WORDS)
AMAX = _by_name(constants.PREPARED, "amax")
FACTOR = _by_name(constants.PREPARED, "factor")
INVERSE = _by_name(constants.PREPARED, "inverse")
FOLDED = _by_name(constants.PREPARED, "folded")
REGULAR = _by_name(constants.PREPARED, "regular")
SHARE_OF_TOP = _by_name(constants.PREPARED, "share_of_top")
SHARE_OF_AMAX = _by_name(constants.PREPARED, "share_of_amax")
PRESCALE = _by_name(constants.PREPARED, "prescale")
PRESCALE_AGAIN = _by_name(constants.PREPARED, "prescale_again")
UNIT = _by_name(constants.PREPARED, "unit")
SEARCHED = _by_name(constants.PREPARED, "searched")
NO_UNDERFLOW = _by_name(constants.PREPARED, "no_underflow")

# --- slot 1: factor ---

CLAMPED_RATIO = _by_name(numbering.FACTORS, "clamped_ratio")
RATIO = _by_name(numbering.FACTORS, "ratio")
RECIPROCAL_PRODUCT = _by_name(numbering.FACTORS, "reciprocal_product")
RECIPROCAL_PRODUCT_OR_MAX = _by_name(numbering.FACTORS, "reciprocal_product_or_max")
RECIPROCAL_PRODUCT_IN_STATISTICS = _by_name(numbering.FACTORS, "reciprocal_product_in_statistics")
QUOTIENT = _by_name(numbering.FACTORS, "quotient")
NO_FACTOR = _by_name(numbering.FACTORS, "no_factor")
CONSTANT_FACTOR = tl.constexpr(constants.CONSTANT_FACTOR)

# --- slot 2: block scale ---

FOLDED_SIXTH = _by_name(numbering.PRE_SCALES, "folded_sixth")
SIXTH_THEN_FACTOR = _by_name(numbering.PRE_SCALES, "sixth_then_factor")
DIVIDED_THEN_FACTOR_OR_ZERO = _by_name(numbering.PRE_SCALES, "divided_then_factor_or_zero")
OVER_PRODUCT = _by_name(numbering.PRE_SCALES, "over_product")
FACTOR_TIMES_DIVIDED = _by_name(numbering.PRE_SCALES, "factor_times_divided")
DIVIDED_TWICE = _by_name(numbering.PRE_SCALES, "divided_twice")
DIVIDED = _by_name(numbering.PRE_SCALES, "divided")
DIVIDED_FLOORED = _by_name(numbering.PRE_SCALES, "divided_floored")
STATIC_SCALE = _by_name(numbering.PRE_SCALES, "static_scale")
DIVIDED_THEN_FACTOR = _by_name(numbering.PRE_SCALES, "divided_then_factor")

# --- slot 4: element ---

TIMES_CLAMPED_RECIPROCAL = _by_name(numbering.ELEMENTS, "times_clamped_reciprocal")
TIMES_RECIPROCAL_OR_ZERO = _by_name(numbering.ELEMENTS, "times_reciprocal_or_zero")
TIMES_RECIPROCAL_OVER_SCALE = _by_name(numbering.ELEMENTS, "times_reciprocal_over_scale")
TIMES_RECIPROCAL_OF_SCALE = _by_name(numbering.ELEMENTS, "times_reciprocal_of_scale")
TIMES_RECIPROCAL_ZEROED = _by_name(numbering.ELEMENTS, "times_reciprocal_zeroed")
TIMES_RECIPROCAL_SHRUNK = _by_name(numbering.ELEMENTS, "times_reciprocal_shrunk")
OVER_SCALE_PRODUCT = _by_name(numbering.ELEMENTS, "over_scale_product")
OVER_SCALE_QUOTIENT = _by_name(numbering.ELEMENTS, "over_scale_quotient")
OVER_SCALE = _by_name(numbering.ELEMENTS, "over_scale")

# --- slot 5: rounding ---

DOWN = tl.constexpr(numbering.TIES.index("down"))
BELOW_ZERO = tl.constexpr(numbering.SIGNS.index("y < 0"))
SIGN_BIT = tl.constexpr(numbering.SIGNS.index("sign bit"))

# --- slot 6: stored scale, multiplier, decoding ---

STORE_AMAX = _by_name(numbering.STORED, "store_amax")
STORE_FACTOR = _by_name(numbering.STORED, "store_factor")
STORE_RECIPROCAL = _by_name(numbering.STORED, "store_reciprocal")
STORE_RECIPROCAL_OR_ZERO = _by_name(numbering.STORED, "store_reciprocal_or_zero")
NOT_STORED = tl.constexpr(constants.NOT_STORED)

AMAX_OVER_TOP = _by_name(numbering.MULTIPLIERS, "amax_over_top")
AS_STORED = _by_name(numbering.MULTIPLIERS, "as_stored")
RECIPROCAL_OF_STORED = _by_name(numbering.MULTIPLIERS, "reciprocal_of_stored")
ONE_LEVEL = tl.constexpr(constants.ONE_LEVEL)

DECODE_BY_AMAX = _by_name(numbering.DECODES, "decode_by_amax")
DECODE_BY_MULTIPLIER = _by_name(numbering.DECODES, "decode_by_multiplier")
DECODE_BY_DIVISOR = _by_name(numbering.DECODES, "decode_by_divisor")
DECODE_BY_RECIPROCAL = _by_name(numbering.DECODES, "decode_by_reciprocal")
DECODE_SINGLE_LEVEL = _by_name(numbering.DECODES, "decode_single_level")
DECODE_BY_TABLE = tl.constexpr(constants.DECODE_BY_TABLE)
DECODE_BY_POWER = tl.constexpr(constants.DECODE_BY_POWER)

# --- 4over6 ---

ERROR_BY_AMAX = _by_name(numbering.ERRORS, "error_by_amax")
ERROR_BY_RECIPROCAL = _by_name(numbering.ERRORS, "error_by_reciprocal")
ERROR_SCALED = _by_name(numbering.ERRORS, "error_scaled")
MAE = _by_name(numbering.METRICS, "mae")
MSE = _by_name(numbering.METRICS, "mse")
ABS_MAX = _by_name(numbering.METRICS, "abs_max")
SEQUENTIAL = _by_name(numbering.SUMS, "sequential")
EIGHT_LANES = _by_name(numbering.SUMS, "eight_lanes")

# --- searches ---

UNIFORM = tl.constexpr(constants.UNIFORM)
WEIGHTED = tl.constexpr(constants.WEIGHTED)
HESSIAN = tl.constexpr(constants.HESSIAN)
STATIC_FOUR_SIX = tl.constexpr(constants.STATIC_FOUR_SIX)
EAGER_SWEEP = tl.constexpr(constants.EAGER_SWEEP)
FUSED_SWEEP = tl.constexpr(constants.FUSED_SWEEP)
