"""FlashInfer's reference functions: its own quantizer, TransformerEngine's, and 4over6.

Mode "ref" stores an encode factor; a block whose scale underflows gets codes 0. Mode "te" uses TransformerEngine's
arithmetic. Mode "4over6" uses it too, but measures the exact per-tensor error with 1/enc, and stores 1/enc.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from halfbyte.codec.bits import F32, U8, exponent_field, from_bits
from halfbyte.contracts import exponents, expressions
from halfbyte.contracts.options import (
    ERROR_MODES,
    changed,
    check_choice,
    check_name,
    choices,
    encode_factor,
    error_name,
    listing_options,
)
from halfbyte.contracts.peers.transformer_engine import FOUR_SIX as TE_FOUR_SIX
from halfbyte.contracts.peers.transformer_engine import NVFP4 as TE_NVFP4
from halfbyte.contracts.spec import Contract, MXRule, NVFP4Rule, Rounding, ScaleByte
from halfbyte.formats.spec import ElementFormat
from halfbyte.methods import Amax, FourSix, Method

REF = NVFP4Rule(
    factor=expressions.reciprocal_product_or_max,
    pre_scale=expressions.sixth_then_factor,
    scale_byte=ScaleByte(),
    element=expressions.times_reciprocal_zeroed,
    rounding=Rounding(),
    stored_as="encode factor",
    stored=expressions.store_factor,
    multiplier=expressions.reciprocal_of_stored,
    decode=expressions.decode_by_reciprocal,
)

TE = dataclasses.replace(TE_NVFP4, tiles=((1, 16),), four_six=None)

FOUR_SIX = dataclasses.replace(
    TE,
    stored_as="multiplier",
    stored=expressions.store_reciprocal,
    multiplier=expressions.as_stored,
    decode=expressions.decode_by_multiplier,
    four_six=dataclasses.replace(
        TE_FOUR_SIX,
        exact_error=expressions.error_by_reciprocal,
        exact_row_error=expressions.error_by_amax,
        tile_sum=None,
    ),
)

MODES = {"ref": REF, "te": TE, "4over6": FOUR_SIX}


def ceil_bits_of_factor(v: F32, statistics: str, element: ElementFormat, *, factor: np.float32) -> tuple[U8, F32]:
    """smallest power of two ≥ g·(v·sixth) by the float's bits; elements use this power divided by g"""
    share = factor * (v * expressions.SIXTH)
    rounded_up = from_bits((share.view(np.int32) + 0x7FFFFF) & 0x7F800000)
    return exponent_field(rounded_up).astype(np.uint8), rounded_up * (expressions.ONE / factor)


@functools.cache  # one rule per factor, so that contracts with the same options are equal
def ue8m0_rule(factor: float) -> MXRule:
    """MXFP4 with an encode factor g."""
    return MXRule(
        scale=functools.partial(ceil_bits_of_factor, factor=np.float32(factor)),
        element=exponents.times_reciprocal_zeroed,
        rounding=Rounding(),
        decode=exponents.decode_e8m0,
    )


@choices(mode=MODES, e4m3_max=(448, 256), err_mode=ERROR_MODES)
@listing_options
def flashinfer(
    *,
    mode: str = "ref",
    per_token: bool = False,
    global_scale: float | None = None,
    ue8m0: bool = False,
    e4m3_max: int = 448,
    err_mode: str = "MAE",
    fast: bool = False,
) -> Contract:
    """FlashInfer's reference functions.

    `mode`: ref, te or 4over6. `per_token` presets row scaling. `global_scale` is the encode factor of mode ref. `ue8m0`
    restricts mode ref to MXFP4 (blocks of 32, power-of-two scales). `e4m3_max`, `err_mode` and `fast` preset the 4over6
    method.
    """
    check_name("mode of flashinfer", str(mode), MODES)
    check_choice(
        "global_scale and ue8m0 belong to flashinfer's mode 'ref'", mode == "ref" or not (global_scale or ue8m0)
    )
    check_choice("flashinfer's mode 'ref' has no per_token form", mode != "ref" or not per_token)
    method: Method = Amax()
    if mode == "4over6":
        method = FourSix(error_name(err_mode), e4m3_max, fast)
    nvfp4 = MODES[mode]
    if per_token and mode == "4over6":
        nvfp4 = dataclasses.replace(nvfp4, stored=expressions.store_reciprocal_or_zero)
    given = encode_factor(global_scale)
    nvfp4 = dataclasses.replace(nvfp4, constant_factor=given)
    rules: dict[str, NVFP4Rule | MXRule] = {} if ue8m0 else {"nvfp4": nvfp4}
    if mode == "ref":
        rules["mxfp4"] = ue8m0_rule(1.0 if given is None else float(given))
    return Contract(
        name="flashinfer",
        source="FlashInfer (2026-08-22), reference functions",
        rules=rules,
        method=method,
        scaling="row" if per_token else "tensor",
        options=changed(flashinfer, locals()),
    )
