"""Rounding y to a code: each option of `Rounding`, computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.contracts.rounding import round_elements
from halfbyte.contracts.spec import Rounding
from halfbyte.formats import E2M1, E4M3
from halfbyte.testing import assert_same_bits
from tests.samples import F32, U8, above, below, f32

TINY = 2.0**-20


def codes(y: F32, rounding: Rounding, x: F32 | None = None) -> list[int]:
    """Codes of y; x is given if it matters."""
    got: list[int] = round_elements(y if x is None else x, y, E2M1, rounding)[0].tolist()
    return got


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        # y:                            6    -6  0.25 -0.25   5  -0.0   0  -tiny  9  Inf
        (Rounding(), [7, 15, 0, 8, 6, 0, 0, 8, 7, 7]),
        (Rounding(sign="sign bit"), [7, 15, 0, 8, 6, 8, 0, 8, 7, 7]),
        (Rounding(sign="y <= 0"), [7, 15, 0, 8, 6, 8, 8, 8, 7, 7]),
        (Rounding(tie="down"), [7, 15, 0, 8, 6, 0, 0, 8, 7, 7]),
        (Rounding(tie="up"), [7, 15, 1, 9, 7, 0, 0, 8, 7, 7]),
    ],
)
def test_sign_and_tie(rounding: Rounding, expected: list[int]) -> None:
    assert codes(f32(6, -6, 0.25, -0.25, 5, -0.0, 0, -TINY, 9, np.inf), rounding) == expected


@pytest.mark.parametrize(
    ("tie", "expected"), [("even", [2, 2, 4, 4, 6, 6]), ("down", [1, 2, 3, 4, 5, 6]), ("up", [2, 3, 4, 5, 6, 7])]
)
def test_ties(tie: str, expected: list[int]) -> None:
    assert codes(f32(0.75, 1.25, 1.75, 2.5, 3.5, 5.0), Rounding(tie=tie)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        (Rounding(), 0),
        (Rounding(nan_code=7), 7),
        (Rounding(nan_code=3, sign="sign bit"), 3),  # the sign bit of a NaN does not count
        (Rounding(nan_code=0, sign="y <= 0"), 8),  # not above zero
    ],
)
def test_nan(rounding: Rounding, expected: int) -> None:
    nans = np.array([0x7FC00000, 0xFFC00000], np.uint32).view(np.float32)
    assert codes(nans, rounding) == [expected, expected]


def test_zero_input_looks_at_x() -> None:
    """0/0 is NaN and x/0 is Inf. The sign of x decides, and it is 0 if x is zero or NaN."""
    x = f32(0.0, -0.0, np.nan, 1.0, -1.0, -1.0)
    y = f32(np.nan, np.nan, np.nan, np.inf, -np.inf, np.nan)
    assert codes(y, Rounding(zero_input=True, nan_code=7), x) == [0, 0, 0, 7, 15, 15]
    assert codes(y, Rounding(nan_code=7), x) == [7, 7, 7, 7, 15, 7]


def test_values_follow_the_codes() -> None:
    y = f32(0.3, -0.3, 5.5, -100, -0.0)
    got, values = round_elements(y, y, E2M1, Rounding())
    assert got.tolist() == [1, 9, 7, 15, 0]
    assert_same_bits(values, f32(0.5, -0.5, 6, -6, 0.0))


# --- without saturation ---


def wrapped(*y: float) -> tuple[U8, F32]:
    return round_elements(f32(*y), f32(*y), E2M1, Rounding(wraps=True))


def test_wrap_agrees_with_saturation_within_the_range() -> None:
    """Every tie and its neighbours, and every value, up to 6."""
    middles = f32(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    x = np.concatenate([middles, below(middles), above(middles), E2M1.magnitudes, f32(TINY, 6.9)])
    for y in (x, -x):
        plain, values = round_elements(y, y, E2M1, Rounding())
        got, got_values = round_elements(y, y, E2M1, Rounding(wraps=True))
        assert_same_bits(got, plain, inputs=y)
        assert_same_bits(got_values, values, inputs=y)


def test_wrap_beyond_the_range() -> None:
    """The grid continues in steps of 2. 7 is a tie and goes to 8, whose code 2·(3 + 1) + 0 = 8 decodes to -0.0."""
    got, values = wrapped(7, 8, 8.9, 9.1, -7, -8)
    assert got.tolist() == [8, 8, 8, 8, 8, 8]
    assert_same_bits(values, f32(8, 8, 8, 10, -8, -8))


def test_wrap_just_below_seven_is_six() -> None:
    got, values = round_elements(y := below(f32(7.0)), y, E2M1, Rounding(wraps=True))
    assert (got.tolist(), values.tolist()) == ([7], [6.0])


# --- other element formats ---


def test_eight_bit_elements_saturate_at_448_and_have_a_nan() -> None:
    y = f32(448, 449, np.inf, -1e9, 1.0, -0.0, np.nan)
    got, _ = round_elements(y, y, E4M3, Rounding(sign="sign bit"))
    assert got.tolist() == [0x7E, 0x7E, 0x7E, 0xFE, 0x38, 0x80, 0x7F]
