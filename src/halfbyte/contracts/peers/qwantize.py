"""qwantize: single-level scales, ties to the smaller magnitude; naive, or searched (contracts/searches/qwantize.py).

A code is a magnitude times sign(x). So zeros of either sign are code 0 under any scale, and a NaN element is code 0. A
block whose E4M3 scale rounds to 0 stores ±6. An MXFP4 block with a NaN has byte 0, and its finite elements become ±6. A
zero block of MXFP4 has byte 25.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from halfbyte.contracts import exponents, expressions
from halfbyte.contracts.options import changed, check_name, choices, listing_options
from halfbyte.contracts.searches.qwantize import search_e4m3, search_e8m0
from halfbyte.contracts.spec import Contract, MXRule, NVFP4Rule, Rounding, ScaleByte
from halfbyte.methods import Amax, Method, Optimal

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

NAIVE: dict[str, NVFP4Rule | MXRule] = {"nvfp4": NVFP4, "mxfp4": MX}
SEARCHED: dict[str, NVFP4Rule | MXRule] = {
    "nvfp4": dataclasses.replace(NVFP4, scale_search=search_e4m3),
    "mxfp4": dataclasses.replace(MX, scale_search=search_e8m0),
}

METHODS: dict[str, Method | Literal["hessian"]] = {"naive": Amax(), "optimal": Optimal(), "optimal_hessian": "hessian"}
MODES = [f"{format}/{name}" for format in NAIVE for name in METHODS]


@choices(mode=MODES)
@listing_options
def qwantize(*, mode: str | None = None) -> Contract:
    """qwantize's quantizers. `mode`: "nvfp4/" or "mxfp4/", then naive, optimal or optimal_hessian.

    Without a mode the contract is naive and has both formats. The optimal modes run qwantize's own pruned searches:
    optimal presets `Optimal()`, and optimal_hessian needs `method=Hessian(h)` with h = XᵀX. Without a mode, and in the
    naive modes, these methods try every scale, as they do under other contracts.
    """
    options = changed(qwantize, {"mode": mode})
    if mode is None:
        return Contract(name="qwantize", source="qwantize 0.1.1", rules=NAIVE, options=options)
    check_name("mode of qwantize", mode, MODES)
    format, name = mode.split("/")
    rules = NAIVE if name == "naive" else SEARCHED
    return Contract(
        name="qwantize",
        source="qwantize 0.1.1",
        rules={format: rules[format]},
        method=METHODS[name],
        options=options,
    )
