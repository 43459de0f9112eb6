"""NVIDIA Model-Optimizer: dynamic NVFP4, static weights with two searches, MXFP4, and casts from MXFP4 to NVFP4.

NVFP4: zero blocks have scale byte 0x38 (1.0), and no byte is 0. An all-zero tensor has NaN scales and codes 7; any
y = NaN gives code 7. MXFP4: ties go to the smaller magnitude, and +0.0 becomes code 8. A block with Inf or NaN has byte
0 and codes 8. The closed-form cast treats a block with byte 0 as empty, whatever its codes are. In both casts MXFP4's
code 8 becomes 0.
"""

from __future__ import annotations

import dataclasses

from halfbyte.contracts import exponents, expressions
from halfbyte.contracts.options import changed, check_choice, check_name, choices, listing_options
from halfbyte.contracts.peers.modelopt_cast import CLOSED_FORM, THROUGH_BF16
from halfbyte.contracts.searches.static import search_block_amax
from halfbyte.contracts.spec import Contract, MXRule, NVFP4Rule, Rounding, ScaleByte
from halfbyte.methods import Amax, FourSix, Method, Sweep

FOUR_OVER_SIX = FourSix("mse", 256)

DYNAMIC = NVFP4Rule(
    factor=expressions.quotient,
    pre_scale=expressions.over_product,
    scale_byte=ScaleByte(smallest=2.0**-9, for_zero=1.0),
    element=expressions.over_scale_product,
    rounding=Rounding(nan_code=7),
    stored_as="multiplier",
    stored=expressions.store_factor,
    multiplier=expressions.as_stored,
    decode=expressions.decode_by_multiplier,
    negative_zero=False,
)

STATIC = dataclasses.replace(
    DYNAMIC,
    pre_scale=expressions.static_scale,
    scale_byte=ScaleByte(smallest=2.0**-9),
    block_search=search_block_amax,
    searches=(FOUR_OVER_SIX, Sweep(), Sweep(fused=True)),
)

MX = MXRule(
    scale=exponents.ceil_log2_or_none,
    element=exponents.over,
    rounding=Rounding(tie="down", sign="y <= 0"),
    decode=exponents.decode_e8m0,
)

MODES: dict[str, tuple[NVFP4Rule, Method]] = {
    "nvfp4": (dataclasses.replace(DYNAMIC, search_rule=STATIC), Amax()),
    "mxfp4": (dataclasses.replace(DYNAMIC, search_rule=STATIC), Amax()),
    "max": (STATIC, Amax()),
    "four_over_six": (STATIC, FOUR_OVER_SIX),
    "fp8_sweep": (STATIC, Sweep()),
    "fp8_sweep_kernel": (STATIC, Sweep(fused=True)),
    "quantize_mxfp4_to_nvfp4": (DYNAMIC, Amax()),
    "quantize_mxfp4_to_nvfp4_lossless": (DYNAMIC, Amax()),
}

CASTS = {"quantize_mxfp4_to_nvfp4": THROUGH_BF16, "quantize_mxfp4_to_nvfp4_lossless": CLOSED_FORM}


@choices(mode=MODES)
@listing_options
def modelopt(*, mode: str = "nvfp4", k_max: int | None = None) -> Contract:
    """Model-Optimizer. `mode` nvfp4 is the dynamic quantizer.

    The modes max, four_over_six, fp8_sweep and fp8_sweep_kernel are for static weights and compute the block scale by
    another formula. The modes quantize_mxfp4_to_nvfp4 and quantize_mxfp4_to_nvfp4_lossless are for `hb.cast`. The
    latter takes `k_max`, the largest exponent of all tensors that share a global scale (None: of this tensor).
    """
    check_name("mode of modelopt", str(mode), MODES)
    cast = CASTS.get(mode)
    check_choice("k_max belongs to the mode quantize_mxfp4_to_nvfp4_lossless", k_max is None or cast is CLOSED_FORM)
    rule, method = MODES[mode]
    return Contract(
        name="modelopt",
        source="NVIDIA Model-Optimizer 0.47.0",
        rules={"nvfp4": rule, "mxfp4": MX},
        ragged="pad",
        method=method,
        cast=cast if k_max is None else dataclasses.replace(CLOSED_FORM, k_max=k_max),
        options=changed(modelopt, {"mode": mode, "k_max": k_max}),
    )
