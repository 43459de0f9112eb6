"""vLLM's CPU emulation of NVFP4.

The stored number is an encode factor. A block whose scale underflows gets codes 0 and 8, never ±6. An all-zero tensor
has an infinite factor and NaN scales.
"""

from __future__ import annotations

import dataclasses

from halfbyte.contracts import expressions
from halfbyte.contracts.options import changed, check_name, choices, encode_factor, listing_options
from halfbyte.contracts.peers.flashinfer import REF
from halfbyte.contracts.spec import Contract

NVFP4 = dataclasses.replace(
    REF,
    factor=expressions.reciprocal_product,
    element=expressions.times_reciprocal_shrunk,
    decode=expressions.decode_by_divisor,
)


@choices(mode=("ref",))
@listing_options
def vllm(*, mode: str = "ref", global_scale: float | None = None) -> Contract:
    """vLLM's CPU emulation. `global_scale`: an encode factor given in place of 2688/A. The only `mode` is ref."""
    check_name("mode of vllm", mode, ("ref",))
    given = encode_factor(global_scale)
    return Contract(
        name="vllm",
        source="vLLM (2026-08-22), CPU emulation",
        rules={"nvfp4": dataclasses.replace(NVFP4, constant_factor=given)},
        options=changed(vllm, {"mode": mode, "global_scale": global_scale}),
    )
