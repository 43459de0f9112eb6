"""qwantize, naive: single-level scales, ties to the smaller magnitude.

Codes are magnitudes times sign(x), so zeros of either sign are code 0 whatever the scale, and a NaN element is code 0.
A block whose E4M3 scale rounds to 0 stores ±6. An MXFP4 block with a NaN has byte 0 and ±6 for its finite elements; a
zero block has byte 25.
"""

from __future__ import annotations

from halfbyte.contracts import exponents, expressions
from halfbyte.contracts.options import changed, check_name
from halfbyte.contracts.spec import Contract, MXRule, NVFP4Rule, Rounding, ScaleByte

ROUNDING = Rounding(tie="down", nan_code=7, zero_input=True)

NVFP4 = NVFP4Rule(
    factor=expressions.no_factor,
    pre_scale=expressions.divided_floored,
    scale_byte=ScaleByte(),
    element=expressions.over_scale,
    rounding=ROUNDING,
    stored_as="none",
    stored=None,
    multiplier=expressions.as_stored,
    decode=expressions.decode_single_level,
)

MX = MXRule(scale=exponents.floor_log2_floored, element=exponents.over, rounding=ROUNDING, decode=exponents.decode_e8m0)

MODES = {"nvfp4/naive": "nvfp4", "mxfp4/naive": "mxfp4"}


def qwantize(*, mode: str | None = None) -> Contract:
    """qwantize's naive quantizers. `mode` only restricts the contract to nvfp4/naive or mxfp4/naive."""
    check_name("mode of qwantize", mode or "nvfp4/naive", MODES)
    rules: dict[str, NVFP4Rule | MXRule] = {"nvfp4": NVFP4, "mxfp4": MX}
    return Contract(
        name="qwantize",
        source="qwantize 0.1.1",
        rules={name: rule for name, rule in rules.items() if mode is None or MODES[mode] == name},
        options=changed(qwantize, {"mode": mode}),
    )
