"""Floats as integers. The expected numbers come from plain integer arithmetic or Python's struct."""

from __future__ import annotations

import math
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.codec import bits
from halfbyte.errors import InputError
from halfbyte.testing import assert_same_bits
from tests.samples import above, below, every_bf16, f32

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def word(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


# --- widening ---


def test_widen_bf16_shifts_the_bits() -> None:
    every = np.arange(65536, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        widened = bits.widen(every.view(ml_dtypes.bfloat16))
        assert_same_bits(widened, every_bf16(), any_nan=True)


def test_widen_fp16_is_exact() -> None:
    every = np.arange(65536, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        widened = bits.widen(every.view(np.float16)).astype(np.float64)
    expected = np.array([struct.unpack("<e", code.tobytes())[0] for code in every], np.float64)
    assert_same_bits(widened, expected, any_nan=True)


def test_widen_float32_copies_nothing() -> None:
    x = f32(1, -0.0, 1e-45, np.inf)
    assert np.shares_memory(bits.widen(x), x)


# --- rounding to a narrower dtype ---


@given(FLOATS)
def test_round_to_bf16_by_integer_arithmetic(x: float) -> None:
    w = word(x)
    rounded = (w + 0x7FFF + (w >> 16 & 1)) & 0xFFFF0000  # half a unit, less one bit where the kept part is even
    with np.errstate(over="ignore"):
        got = bits.round_to(f32(x), "bf16")
    assert got.view(np.uint32).tolist() == [rounded]


@given(st.floats(-65504, 65504, width=32))
def test_round_to_fp16_by_struct(x: float) -> None:
    assert_same_bits(bits.round_to(f32(x), "fp16"), f32(struct.unpack("<e", struct.pack("<e", x))[0]))


def test_round_to_overflows_like_ieee() -> None:
    with np.errstate(over="ignore"):
        assert bits.round_to(f32(65519, 65520, -65520), "fp16").tolist() == [65504, math.inf, -math.inf]
        assert bits.round_to(bits.FLOAT32_MAX.reshape(1), "bf16").tolist() == [math.inf]


def test_round_to_ties_go_to_even() -> None:
    # bfloat16 near 1 has steps of 2**-7
    x = f32(1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8)
    assert bits.round_to(x, "bf16").tolist() == [1.0, 1 + 2 * 2.0**-7, -1.0]
    assert bits.round_to(above(x[:1]), "bf16").tolist() == [1 + 2.0**-7]


def test_round_to_fp32_is_the_same_array() -> None:
    x = f32(1.1)
    assert bits.round_to(x, "fp32") is x


# --- dtypes ---


@pytest.mark.parametrize(("dtype", "name"), [(np.float32, "fp32"), (np.float16, "fp16"), (ml_dtypes.bfloat16, "bf16")])
def test_dtype_name(dtype: type, name: str) -> None:
    assert bits.dtype_name(np.dtype(dtype)) == name


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8, np.bool_, np.complex64, ml_dtypes.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: type) -> None:
    with pytest.raises(InputError, match=f"cannot quantize dtype {np.dtype(dtype)}: give float32, float16 or bfloat16"):
        bits.dtype_name(np.dtype(dtype))


def test_smallest_normal() -> None:
    assert [float(bits.smallest_normal(name)) for name in ("fp32", "bf16", "fp16")] == [2.0**-126, 2.0**-126, 2.0**-14]


# --- fields ---


@given(FLOATS)
def test_fields_put_together_are_the_number(x: float) -> None:
    value = f32(x)
    exponent, mantissa = bits.exponent_field(value), bits.mantissa_field(value)
    sign = (value.view(np.int32) >> 31) << 31
    assert_same_bits(bits.from_bits(sign | exponent << 23 | mantissa), value)


def test_fields_of_landmarks() -> None:
    x = f32(0.0, -0.0, 1e-45, 2.0**-126, 1, -1.5, np.inf, np.nan)
    assert bits.exponent_field(x).tolist() == [0, 0, 0, 1, 127, 127, 255, 255]
    assert bits.mantissa_field(x).tolist() == [0, 0, 1, 0, 0, 1 << 22, 0, 1 << 22]


def test_power_of_two() -> None:
    exponents = np.arange(-151, 130, dtype=np.int32)
    with np.errstate(over="ignore", under="ignore"):
        got = bits.power_of_two(exponents)
    expected = [0.0 if k < -149 else math.inf if k > 127 else 2.0**k for k in exponents.tolist()]
    assert got.tolist() == expected


# --- log2 ---


def test_log2_is_exact_on_powers_of_two() -> None:
    k = np.arange(-149, 128, dtype=np.int32)
    assert_same_bits(bits.log2_float32(bits.power_of_two(k)), k.astype(np.float32))


@pytest.mark.parametrize(("k", "last"), [(100, 22), (64, 22), (-100, 22), (4, 1), (5, 1), (0, 0)])
def test_log2_reaches_an_integer_early(k: int, last: int) -> None:
    """Up to `last` ulps above 2**k the rounded logarithm is k itself; a test of the mantissa would say otherwise."""
    power = f32(2.0**k).view(np.int32)
    near, beyond = bits.from_bits(power + last), bits.from_bits(power + last + 1)
    assert bits.log2_float32(near).tolist() == [k]
    assert bits.log2_float32(beyond)[0] > k


def test_log2_below_a_power_of_two() -> None:
    power = f32(2.0**100).view(np.int32)
    assert bits.log2_float32(bits.from_bits(power - 44)).tolist() == [100]
    assert bits.log2_float32(bits.from_bits(power - 45))[0] < 100


def test_log2_of_the_ends() -> None:
    with np.errstate(divide="ignore", invalid="ignore"):
        assert bits.log2_float32(f32(0, np.inf)).tolist() == [-math.inf, math.inf]


# --- the quarter rule ---


@pytest.mark.parametrize("k", [-126, -20, 0, 7, 100])
def test_quarter_rule_moves_up_from_seven_quarters(k: int) -> None:
    edge = f32(1.75 * 2.0**k)
    power = f32(2.0**k)
    x = np.concatenate([power, below(edge), edge, above(edge), below(2 * power)])
    got = bits.drop_mantissa_after_quarter(x, "fp32")
    assert_same_bits(got, np.concatenate([power, power, 2 * power, 2 * power, 2 * power]), inputs=x)


@pytest.mark.parametrize(("name", "mantissa", "top"), [("bf16", 7, 127), ("fp16", 10, 15)])
def test_quarter_rule_in_sixteen_bits(name: str, mantissa: int, top: int) -> None:
    """In the dtype's own steps; v is a number of that dtype."""
    step = 2.0**-mantissa
    x = f32(1, 1.75 - step, 1.75, 2 - step) * np.float32(2.0**top)
    with np.errstate(over="ignore"):
        got = bits.drop_mantissa_after_quarter(x, name)
    assert got.tolist() == [2.0**top, 2.0**top, math.inf, math.inf]  # the top binade carries into Inf


def test_quarter_rule_of_subnormals_and_zero() -> None:
    """The rule works on the bits, so a subnormal's leading zeros count as mantissa."""
    x = f32(0, 2.0**-149, 0.75 * 2.0**-126, 2.0**-126)
    got = bits.drop_mantissa_after_quarter(x, "fp32")
    assert got.tolist() == [0.0, 0.0, 2.0**-126, 2.0**-126]
