"""Encoding and decoding of elements: every code, every bfloat16, every tie and its neighbours."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.codec.element import Tie, decode, encode, encode_magnitude
from halfbyte.errors import InputError
from halfbyte.formats import E2M1, E4M3, E8M0, ELEMENTS
from halfbyte.testing import assert_same_bits
from tests.samples import F32, U8, above, below, every_bf16, f32, u8

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
TIES: tuple[Tie, ...] = get_args(Tie)


# numpy warns when a signalling NaN, or a number out of range, is cast; backends run with these warnings off, too.
quiet = np.errstate(all="ignore")


@quiet
def peer(x: F32, dtype: Any) -> U8:
    """The codes that ml_dtypes gives; 4-bit floats take a byte each there."""
    return np.asarray(x.astype(dtype).view(np.uint8))


# --- against ml_dtypes ---


def test_e2m1_of_every_bf16() -> None:
    x = every_bf16()
    x = x[~np.isnan(x)]
    assert_same_bits(encode(x, E2M1), peer(x, ml_dtypes.float4_e2m1fn))


@quiet
def test_e4m3_of_every_bf16_without_saturation() -> None:
    x = every_bf16()
    assert_same_bits(encode(x, E4M3, saturate=False), peer(x, ml_dtypes.float8_e4m3fn), e4m3=True)


@quiet
def test_e4m3_of_every_bf16_with_saturation() -> None:
    """Equal up to 448. Above it, and for Inf, halfbyte gives the largest code instead of NaN."""
    x = every_bf16()
    expected = peer(np.clip(x, -448, 448), ml_dtypes.float8_e4m3fn)
    assert_same_bits(encode(x, E4M3), expected, e4m3=True)


@quiet
def test_e8m0_of_every_bf16() -> None:
    """ml_dtypes rounds ties up, and numbers beyond the range become NaN.

    Float32 subnormals are left out: ml_dtypes rounds everything between 2**-127 and 2**-126 up. The test of ties
    covers our rule.
    """
    x = every_bf16()
    x = x[~((x > 0) & (x < np.float32(2.0**-126)))]
    expected = peer(x, ml_dtypes.float8_e8m0fnu)
    assert_same_bits(encode(x, E8M0, tie="up", saturate=False), expected)


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e8m0"])
def test_decode_of_every_code(name: str) -> None:
    dtype: Any = {
        "e2m1": ml_dtypes.float4_e2m1fn,
        "e4m3": ml_dtypes.float8_e4m3fn,
        "e8m0": ml_dtypes.float8_e8m0fnu,
    }[name]
    codes = np.arange(1 << ELEMENTS[name].bits, dtype=np.uint8)
    assert_same_bits(decode(codes, ELEMENTS[name]), codes.view(dtype).astype(np.float32), any_nan=True)


# --- ties, one by one ---


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_every_tie_and_its_neighbours(name: str, tie: Tie) -> None:
    """Between codes c and c + 1: one ulp below the middle is c, one above is c + 1, the middle as `tie` says."""
    element = ELEMENTS[name]
    code = np.arange(len(element.magnitudes) - 1, dtype=np.int64)
    middle = ((element.magnitudes[:-1].astype(np.float64) + element.magnitudes[1:]) / 2).astype(np.float32)
    at_tie = {"even": code + code % 2, "down": code, "up": code + 1}[tie]
    for x, expected in ((below(middle), code), (middle, at_tie), (above(middle), code + 1)):
        assert_same_bits(encode_magnitude(x, element, tie), expected.astype(np.uint8), inputs=x)
        assert_same_bits(encode(x, element, tie=tie), expected.astype(np.uint8), inputs=x)


def test_e2m1_ties_typed_out() -> None:
    middles = f32(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    assert encode(middles, E2M1).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert encode(middles, E2M1, tie="down").tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert encode(middles, E2M1, tie="up").tolist() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("name", ELEMENTS)
def test_values_and_their_neighbours_keep_their_code(name: str) -> None:
    """The distance to a midpoint is more than one ulp, except for E8M0's smallest values, which are subnormals."""
    element = ELEMENTS[name]
    code = np.arange(len(element.magnitudes), dtype=np.uint8)[2:]
    value = element.magnitudes[2:]
    for x in (below(value), value, above(value)):
        assert_same_bits(encode(x, element), code, inputs=x)


@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=20))
def test_e2m1_is_the_nearest_by_exact_fractions(numbers: list[float]) -> None:
    codes = encode(f32(*numbers), E2M1)
    values = [Fraction(float(value)) for value in E2M1.magnitudes]
    for number, code in zip(numbers, codes.tolist(), strict=True):
        distance = [abs(value - Fraction(number)) for value in values]
        nearest = [index for index, gap in enumerate(distance) if gap == min(distance)]
        assert code in nearest
        assert len(nearest) == 1 or code % 2 == 0


# --- identities ---


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("name", ELEMENTS)
def test_encode_inverts_decode_on_the_grid(name: str, saturate: bool, tie: Tie) -> None:
    element = ELEMENTS[name]
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    codes = codes[~np.isnan(element.values)]
    assert_same_bits(encode(decode(codes, element), element, tie=tie, saturate=saturate), codes)


@given(st.lists(FLOATS, min_size=1, max_size=50), st.sampled_from([E2M1, E4M3]), st.sampled_from(TIES), st.booleans())
def test_sign_symmetry(numbers: list[float], element: Any, tie: Tie, saturate: bool) -> None:
    x = f32(*numbers)
    positive, negative = encode(x, element, tie=tie, saturate=saturate), encode(-x, element, tie=tie, saturate=saturate)
    assert_same_bits(negative, positive ^ np.uint8(element.sign_code), inputs=x)


@given(st.lists(FLOATS, min_size=2, max_size=50), st.sampled_from([E2M1, E4M3]), st.sampled_from(TIES))
def test_encode_is_monotonic(numbers: list[float], element: Any, tie: Tie) -> None:
    x = np.sort(np.abs(f32(*numbers)))
    assert np.all(np.diff(encode(x, element, tie=tie).astype(int)) >= 0)


# --- corners ---


def test_signed_zeros_keep_their_sign() -> None:
    assert encode(f32(0.0, -0.0, -0.1), E2M1).tolist() == [0, 8, 8]
    assert encode(f32(0.0, -0.0, -1e-30), E4M3).tolist() == [0, 0x80, 0x80]


def test_e2m1_saturates_and_refuses_nan() -> None:
    assert encode(f32(6, 7, 1e30, np.inf, -np.inf), E2M1).tolist() == [7, 7, 7, 7, 15]
    with pytest.raises(InputError, match="e2m1 has no NaN, and the input has 2; replace them first"):
        encode(f32(1, np.nan, np.nan), E2M1)


def test_e4m3_beyond_448() -> None:
    """464 is half-way to 480, which the format does not have. The even neighbour is 448, so NaN starts above 464."""
    top = f32(448, 464)
    x = np.concatenate([top, above(top[1:]), f32(np.inf, -np.inf, np.nan)])
    assert encode(x, E4M3).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F]
    assert encode(x, E4M3, saturate=False).tolist() == [0x7E, 0x7E, 0x7F, 0x7F, 0xFF, 0x7F]


@pytest.mark.parametrize("tie", TIES)
def test_tie_at_the_end_of_the_range(tie: Tie) -> None:
    """Half-way to the first missing value (the codes below, 0x7E and 254, are even): NaN only if ties go up."""
    wanted = {"even": [0x7E, 254], "down": [0x7E, 254], "up": [0x7F, 255]}[tie]
    e4m3 = encode(f32(464), E4M3, tie=tie, saturate=False)
    e8m0 = encode(f32(1.5 * 2.0**127), E8M0, tie=tie, saturate=False)
    assert [*e4m3.tolist(), *e8m0.tolist()] == wanted


def test_e8m0_beyond_its_range() -> None:
    largest, tie = f32(2.0**127), f32(1.5 * 2.0**127)
    x = np.concatenate([largest, below(tie), tie, f32(np.inf)])
    assert encode(x, E8M0, tie="up").tolist() == [254, 254, 254, 254]
    assert encode(x, E8M0, tie="up", saturate=False).tolist() == [254, 254, 255, 255]
    assert encode(f32(0.0, -0.0, -1.0, np.nan), E8M0).tolist() == [255] * 4
    assert encode(f32(2.0**-149, 2.0**-128), E8M0).tolist() == [0, 0]  # the smallest value is the nearest


def test_shapes_are_kept() -> None:
    assert encode(np.zeros((2, 0, 3), np.float32), E2M1).shape == (2, 0, 3)
    assert decode(np.zeros((), np.uint8), E2M1).shape == ()
    assert encode(np.ones((2, 3), np.float32).T, E2M1).tolist() == [[2, 2]] * 3
    assert_same_bits(decode(u8(7, 15, 0, 8), E2M1), f32(6, -6, 0.0, -0.0))
