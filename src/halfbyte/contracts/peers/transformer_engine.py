"""TransformerEngine's Python reference quantizer: the bytes of NVIDIA's training recipe.

miles and FlashInfer's "te" mode share this arithmetic and differ only in what they store.

A NaN anywhere makes A NaN; then every scale byte is NaN and every code 0. A = Inf gives a factor of 1. If the scale of
a non-zero block rounds to 0, its codes are ±6, which decode to 0. An all-zero tensor has scale bytes and codes 0.
"""

from __future__ import annotations

from halfbyte.contracts import exponents, expressions, reductions
from halfbyte.contracts.options import ERROR_MODES, changed, check_choice, choices, error_name, listing_options
from halfbyte.contracts.spec import Contract, FourSixRule, MXRule, NVFP4Rule, Rounding, ScaleByte, Tile, Transform
from halfbyte.methods import Amax, FourSix, Method

FOUR_SIX = FourSixRule(
    pre_scale=expressions.divided_then_factor,
    exact_error=expressions.error_by_amax,
    fast_error=expressions.error_scaled,
    block_sum=reductions.sequential,
    tile_sum=reductions.rows_then_tree,
    default=FourSix(),
    e4m3_maxes=(448, 256),
)

NVFP4 = NVFP4Rule(
    factor=expressions.clamped_ratio,
    pre_scale=expressions.folded_sixth,
    scale_byte=ScaleByte(),
    element=expressions.times_clamped_reciprocal,
    rounding=Rounding(),
    stored_as="amax",
    stored=expressions.store_amax,
    multiplier=expressions.amax_over_top,
    decode=expressions.decode_by_amax,
    tiles=((1, 16), (16, 16)),
    row_scaling=True,
    four_six=FOUR_SIX,
)

MX = MXRule(
    scale=exponents.ceil_log2_clamped,
    element=exponents.times_reciprocal,
    rounding=Rounding(),
    decode=exponents.decode_e8m0,
)


@choices(tile=((1, 16), (16, 16)), nvfp4_4over6_err_mode=ERROR_MODES, nvfp4_e4m3_max=(448, 256))
@listing_options
def transformer_engine(
    *,
    tile: Tile | None = None,
    columnwise: bool = False,
    with_rht: bool = False,
    with_random_sign_mask: bool = True,
    row_scaled_nvfp4: bool = False,
    nvfp4_use_4over6: bool = False,
    nvfp4_4over6_err_mode: str = "MAE",
    nvfp4_e4m3_max: int = 448,
    nvfp4_4over6_err_use_fast_math: bool = False,
    pow_2_scales: bool = False,
) -> Contract:
    """TransformerEngine's reference quantizer.

    `columnwise` quantizes the transpose of the (rows, last axis) matrix. `with_rht` applies the random Hadamard
    transform first; TransformerEngine does this only for the columnwise operand. The other options preset the arguments
    `tile`, `scaling` and `method` of `quantize`. Without 4over6, e4m3_max is ignored, as in TransformerEngine. With
    `pow_2_scales` the contract is that of TransformerEngine's MXFP4 block routine.
    """
    options = changed(transformer_engine, locals())
    method: Method = Amax()
    if nvfp4_use_4over6:
        method = FourSix(error_name(nvfp4_4over6_err_mode), nvfp4_e4m3_max, nvfp4_4over6_err_use_fast_math)
    check_choice(
        "with_rht needs columnwise=True: TransformerEngine rotates that operand only", columnwise or not with_rht
    )
    check_choice(
        f"tile is a pair such as (1, 16) or (16, 16), not {tile!r}",
        tile is None or (isinstance(tile, tuple | list) and len(tile) == 2),
    )
    return Contract(
        name="transformer_engine",
        source="TransformerEngine 2.20.0.dev0 (2026-08-22), Python reference quantizer",
        rules={"mxfp4": MX} if pow_2_scales else {"nvfp4": NVFP4, "mxfp4": MX},
        ragged="pad",
        transform=Transform(columnwise, with_rht, with_random_sign_mask),
        method=method,
        tile=None if tile is None else (int(tile[0]), int(tile[1])),
        scaling="row" if row_scaled_nvfp4 else "tensor",
        options=options,
    )
