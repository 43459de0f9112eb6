"""torchao: NVFP4 with one or two levels of scales, MX with four ways to choose the exponent.

NVFP4: E4M3 subnormals are never used; zero blocks have scale byte 0x08 (2**-6). -0.0 keeps its sign (code 8). An
all-zero tensor with two levels has NaN scales. MX: a block with NaN has byte 255, and its NaN elements have code 3
(MXFP8: NaN). With byte 0, elements are divided by 2**-126, but the byte decodes to 2**-127, so the decoded values are
half as large.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from halfbyte.codec.bits import F32, U8
from halfbyte.contracts import exponents, expressions
from halfbyte.contracts.options import changed, check_name, choices, listing_options
from halfbyte.contracts.spec import Contract, MXRule, NVFP4Rule, Rounding, ScaleByte
from halfbyte.formats.elements import E4M3
from halfbyte.formats.spec import ElementFormat

TWO_LEVEL = NVFP4Rule(
    factor=expressions.quotient,
    pre_scale=expressions.divided_twice,
    scale_byte=ScaleByte(smallest=E4M3.smallest_normal),
    element=expressions.times_reciprocal_over_scale,
    rounding=Rounding(sign="sign bit", nan_code=7),
    stored_as="multiplier",
    stored=expressions.store_factor,
    multiplier=expressions.as_stored,
    decode=expressions.decode_by_multiplier,
)

ONE_LEVEL = dataclasses.replace(
    TWO_LEVEL,
    factor=expressions.no_factor,
    pre_scale=expressions.divided,
    element=expressions.times_reciprocal_of_scale,
    stored_as="none",
    stored=None,
    decode=expressions.decode_single_level,
)

SCALES: dict[str, Callable[[F32, str, ElementFormat], tuple[U8, F32]]] = {
    "floor": exponents.floor_field,
    "even": exponents.even_field,
    "ceil": exponents.ceil_field,
    "rceil": exponents.rceil_log2,
}


@choices(mode=("nvfp4", "mx"), scaling_mode=SCALES)
@listing_options
def torchao(
    *, mode: str | None = None, two_level: bool = True, scaling_mode: str = "floor", swizzled: bool = False
) -> Contract:
    """torchao. `two_level`: use a tensor scale (NVFP4). `scaling_mode`: floor, even, ceil or rceil (MX).

    `mode` only restricts the contract to "nvfp4" or "mx". `swizzled` changes the order of torchao's output, not the
    value of a byte; to get that order, apply `halfbyte.layouts.swizzle` to the result.
    """
    check_name("scaling_mode of torchao", str(scaling_mode), SCALES)
    check_name("mode of torchao", mode, ("nvfp4", "mx"))
    mx = MXRule(
        scale=SCALES[scaling_mode],
        element=exponents.times_reciprocal if scaling_mode == "rceil" else exponents.over,
        rounding=Rounding(sign="sign bit", nan_code=3),
        decode=exponents.decode_e8m0,
    )
    rules: dict[str, NVFP4Rule | MXRule] = {}
    if mode != "mx":
        rules["nvfp4"] = TWO_LEVEL if two_level else ONE_LEVEL
    if mode != "nvfp4":
        rules["mxfp4"] = rules["mxfp8"] = mx
    return Contract(name="torchao", source="torchao 0.18.0", rules=rules, options=changed(torchao, locals()))
