"""compressed-tensors: the packed NVFP4 and MXFP4 compressors of llm-compressor and vLLM.

The arithmetic depends on the dtype of the observed minima and maxima: with 16-bit statistics, two steps are rounded to
that dtype. The stored global scale is an encode factor, the reciprocal of a decode multiplier. No scale byte is 0: zero
becomes 0x20 (0.125). A NaN in the tensor gives a global scale of 1, an Inf gives 0.
"""

from __future__ import annotations

import dataclasses

from halfbyte.contracts import exponents, expressions
from halfbyte.contracts.options import changed, check_name, choices, listing_options
from halfbyte.contracts.spec import Contract, MXRule, NVFP4Rule, Rounding, ScaleByte

NVFP4 = NVFP4Rule(
    factor=expressions.reciprocal_product_in_statistics,
    pre_scale=expressions.factor_times_divided,
    scale_byte=ScaleByte(for_zero_byte=0x20),
    element=expressions.over_scale_quotient,
    rounding=Rounding(),
    stored_as="encode factor",
    stored=expressions.store_factor,
    multiplier=expressions.reciprocal_of_stored,
    decode=expressions.decode_by_divisor,
    statistics="input",
)

MX = MXRule(
    scale=exponents.round_up_quarter,
    element=exponents.over,
    rounding=Rounding(),
    decode=exponents.decode_e8m0,
    statistics="input",
    rounds_quotient=True,
)

MODES = ("nvfp4", "mxfp4")
STATISTICS = ("input dtype", "fp32")


@choices(minmax=STATISTICS, mode=MODES)
@listing_options
def compressed_tensors(*, minmax: str = "input dtype", mode: str | None = None) -> Contract:
    """compressed-tensors. `minmax`: the dtype of the statistics, "input dtype" or "fp32".

    `mode` only restricts the contract to one format, nvfp4 or mxfp4.
    """
    check_name("minmax of compressed_tensors", minmax, STATISTICS)
    check_name("mode of compressed_tensors", mode, MODES)
    rules: dict[str, NVFP4Rule | MXRule] = {"nvfp4": NVFP4, "mxfp4": MX}
    if minmax == "fp32":
        rules = {name: dataclasses.replace(rule, statistics="fp32") for name, rule in rules.items()}
    return Contract(
        name="compressed_tensors",
        source="compressed-tensors 0.20.0",
        rules={name: rule for name, rule in rules.items() if mode in (None, name)},
        options=changed(compressed_tensors, {"minmax": minmax, "mode": mode}),
    )
