"""fouroversix (PyTorch backend): the package that introduced 4over6.

A value is rounded without saturation, and the code is taken from the bits of the rounded value. So if the tiny scale of
a block was rounded down by more than 1/7, the largest elements of the block become -0.0. A tensor with A below 7.9e-36
overflows, and its codes are not defined; nor are those of a tensor with NaN or Inf.
"""

from __future__ import annotations

import dataclasses

from halfbyte.contracts import exponents, expressions, reductions
from halfbyte.contracts.options import changed, check_name, choices, listing_options
from halfbyte.contracts.spec import Contract, FourSixRule, MXRule, NVFP4Rule, Rounding, ScaleByte, Transform
from halfbyte.methods import Amax, FourSix, Method

FOUR_SIX = FourSixRule(
    pre_scale=expressions.divided_then_factor_or_zero,
    exact_error=expressions.error_by_amax,
    fast_error=None,
    block_sum=reductions.eight_lanes,
    tile_sum=reductions.eight_lanes_flat,
    default=FourSix("mse", 256),
    e4m3_maxes=(256,),
    errors=("mae", "mse", "abs_max"),
)

NVFP4 = NVFP4Rule(
    factor=expressions.ratio,
    pre_scale=expressions.divided_then_factor_or_zero,
    scale_byte=ScaleByte(),
    element=expressions.times_reciprocal_or_zero,
    rounding=Rounding(wraps=True),
    stored_as="amax",
    stored=expressions.store_amax,
    multiplier=expressions.amax_over_top,
    decode=expressions.decode_by_amax,
    tiles=((1, 16), (16, 16)),
    four_six=FOUR_SIX,
)

MX = MXRule(
    scale=exponents.ceil_bits_of_six,
    element=exponents.over_or_zero,
    rounding=Rounding(),
    decode=exponents.decode_e8m0,
)

RULES: dict[str, Method] = {
    "static_6": Amax(),
    "static_4": Amax(),
    "mae": FourSix("mae", 256),
    "mse": FourSix("mse", 256),
    "abs_max": FourSix("abs_max", 256),
}


@choices(rule=RULES, dtype=("nvfp4", "mxfp4"))
@listing_options
def fouroversix(
    *,
    rule: str = "static_6",
    block_2d: bool = False,
    rht: bool = False,
    transpose: bool = False,
    dtype: str | None = None,
    dequant: bool = False,
) -> Contract:
    """fouroversix. `rule`: static_6, static_4 (blocks are scaled to 4), or mae, mse, abs_max for 4over6.

    `block_2d` presets 16x16 tiles. `transpose` quantizes the transpose. `rht` applies the random Hadamard transform
    first. `dtype` only restricts the contract to nvfp4 or mxfp4. `dequant` changes no byte.
    """
    check_name("rule of fouroversix", str(rule), RULES)
    check_name("dtype of fouroversix", dtype, ("nvfp4", "mxfp4"))
    nvfp4, mx = NVFP4, MX
    if rule == "static_4":
        nvfp4 = dataclasses.replace(NVFP4, element_max=4, four_six=None)
        mx = dataclasses.replace(MX, scale=exponents.ceil_bits_of_four)
    rules: dict[str, NVFP4Rule | MXRule] = {"nvfp4": nvfp4, "mxfp4": mx}
    return Contract(
        name="fouroversix",
        source="fouroversix (2026-04-21), PyTorch backend",
        rules={name: value for name, value in rules.items() if dtype in (None, name)},
        ragged="pad",
        transform=Transform(transpose, rht),
        method=RULES[rule],
        tile=(16, 16) if block_2d else None,
        options=changed(fouroversix, locals()),
    )
