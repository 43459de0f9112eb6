"""Encode and decode single elements of any ElementFormat. Slow and obvious: a search among the format's values."""

from __future__ import annotations

from typing import Literal

import numpy as np

from halfbyte.codec.bits import F32, U8
from halfbyte.errors import InputError
from halfbyte.formats.spec import ElementFormat

Tie = Literal["even", "down", "up"]


@np.errstate(invalid="ignore")
def encode_magnitude(magnitude: F32, element: ElementFormat, tie: Tie = "even") -> U8:
    """Code of the value nearest to a non-negative number. Numbers above the range, and Inf, get the largest code.

    `tie`: which value wins exactly half-way between two: "even" (the even code), "down" (the smaller value) or "up".
    NaN gives the largest finite code, so callers must handle NaN before.
    """
    values = element.magnitudes.astype(np.float64)
    middles = (values[:-1] + values[1:]) / 2  # exact: neighbours of one format, in float64
    exact = magnitude.astype(np.float64)
    lower = np.searchsorted(middles, exact, side="left")  # a tie stays with the smaller code
    upper = np.searchsorted(middles, exact, side="right")  # a tie goes to the larger code
    match tie:
        case "down":
            code = lower
        case "up":
            code = upper
        case "even":
            code = np.where(lower % 2 == 0, lower, upper)  # without a tie both are equal
    return code.astype(np.uint8)


@np.errstate(invalid="ignore")
def encode(x: F32, element: ElementFormat, *, tie: Tie = "even", saturate: bool = True) -> U8:
    """Code of the nearest value, with the sign bit of x (so -0.0 keeps its sign).

    NaN gives the format's NaN code; if the format has none, NaN raises. Numbers beyond the largest value, and Inf, get
    the largest code. With `saturate=False` they get NaN if rounding would leave the range. A format without sign and
    zero (E8M0) gives NaN for every number that is not positive.

    >>> from halfbyte.formats import E2M1
    >>> encode(np.float32([0.75, -5, 100]), E2M1).tolist()
    [2, 14, 7]
    """
    nan = np.isnan(x)
    if nan.any() and element.nan_code is None:
        raise InputError(f"{element.name} has no NaN, and the input has {int(nan.sum())}; replace them first")
    magnitude = np.abs(x)
    code = encode_magnitude(magnitude, element, tie)
    if element.nan_code is not None:
        if not saturate:
            last_step = float(element.magnitudes[-1]) - float(element.magnitudes[-2])
            step = element.max if element.mantissa_bits == 0 else last_step
            bound = np.float64(element.max + step / 2)
            last_is_even = len(element.magnitudes) % 2 == 1
            tie_stays = tie == "down" or (tie == "even" and last_is_even)
            nan |= (magnitude > bound) if tie_stays else (magnitude >= bound)
        if not element.signed:
            nan |= x <= 0
        code = np.where(nan, element.nan_code, code).astype(np.uint8)
    sign = np.where(np.signbit(x), element.sign_code, 0)
    return (code | sign).astype(np.uint8)


def decode(codes: U8, element: ElementFormat) -> F32:
    """Value of each code, exactly, as float32.

    >>> from halfbyte.formats import E2M1
    >>> decode(np.uint8([7, 15, 0, 8]), E2M1).tolist()
    [6.0, -6.0, 0.0, -0.0]
    """
    return element.values[codes]
