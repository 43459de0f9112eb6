"""OCP Microscaling: the rules of the MX specification itself, and the default for MXFP4 and MXFP8.

The scale is 2**(floor(log2(amax)) - emax). Elements round to nearest even and saturate. -0.0 keeps its sign. The
specification leaves NaN and Inf to the implementation: here a block with a NaN has scale byte 255 (NaN) and codes 0
(MXFP8: NaN), and a block with Inf has the largest scale, under which the Inf saturates.
"""

from __future__ import annotations

from halfbyte.contracts import exponents
from halfbyte.contracts.options import listing_options
from halfbyte.contracts.spec import Contract, MXRule, Rounding
from halfbyte.formats import E8M0, FORMATS

MX = MXRule(
    scale=exponents.ocp_floor, element=exponents.over, rounding=Rounding(sign="sign bit"), decode=exponents.decode_e8m0
)


@listing_options
def ocp() -> Contract:
    """The MX specification: every format with E8M0 scales and no global one."""
    return Contract(
        name="ocp",
        source="OCP Microscaling Formats v1.0, section 6.3",
        rules={name: MX for name, format in FORMATS.items() if format.scale == E8M0 and not format.has_global},
        ragged="pad",
    )
