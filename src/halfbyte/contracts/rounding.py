"""Round y to a code as a contract's `Rounding` says: ties, sign of zero, NaN, overflow."""

from __future__ import annotations

import numpy as np

from halfbyte.codec.bits import F32, U8, exponent_field, mantissa_field
from halfbyte.codec.element import encode_magnitude
from halfbyte.contracts.spec import Rounding
from halfbyte.formats.spec import ElementFormat


def round_elements(x: F32, y: F32, element: ElementFormat, rounding: Rounding) -> tuple[U8, F32]:
    """Codes for y, and the value of each code for measuring errors.

    y was computed from x. x matters only for rules that treat zeros of x in a special way.
    """
    nan = np.isnan(y)
    magnitude = np.abs(np.where(nan, np.float32(0), y)).astype(np.float32)
    if rounding.wraps:
        codes, values = _round_without_end(magnitude)
    else:
        codes = encode_magnitude(magnitude, element, rounding.tie)
        values = element.magnitudes[codes]
    nan_code = rounding.nan_code if element.nan_code is None else element.nan_code
    codes = np.where(nan, nan_code, codes).astype(np.uint8)
    match rounding.sign:
        case "y < 0":
            negative = y < 0
        case "y <= 0":
            negative = ~(y > 0)
        case "sign bit":
            negative = np.signbit(y) & ~nan
    if rounding.zero_input:
        zero = (x == 0) | np.isnan(x)
        codes, negative = np.where(zero, 0, codes).astype(np.uint8), (x < 0)
    codes = (codes | np.where(negative, element.sign_code, 0)).astype(np.uint8)
    return codes, np.where(negative, -values, values).astype(np.float32)


def _round_without_end(magnitude: F32) -> tuple[U8, F32]:
    """Round on the E2M1 grid, continued beyond 6 in steps of 2, and take the code from the bits of the rounded float.

    From 1 on the code is 2·(exponent + 1) + the top mantissa bit. So 8 and 10 give code 8, which decodes to -0.0.
    fouroversix stores this code when a scale was rounded down far enough.
    """
    below_two = np.rint(magnitude * 2) / 2
    below_four = np.rint(magnitude)
    above = np.rint(magnitude / 2) * 2
    values = np.where(magnitude < 2, below_two, np.where(magnitude < 4, below_four, above)).astype(np.float32)
    cut = (exponent_field(values) - 127 + 1) * 2 + (mantissa_field(values) >> 22)
    codes = np.where(values < 1, values * 2, cut).astype(np.int32) & 0xF
    return codes.astype(np.uint8), values
