"""The exponent rules of the MX contracts at the ends of the range: bytes and scales computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from halfbyte.codec.bits import FLOAT32_MAX, from_bits
from halfbyte.contracts import exponents
from halfbyte.contracts.peers.flashinfer import ceil_bits_of_factor
from halfbyte.formats import E2M1, E4M3, E8M0, ElementFormat
from halfbyte.testing import assert_same_bits
from tests.samples import F32, U8, above, below, f32, u8

Rule = Callable[[F32, str, ElementFormat], tuple[U8, F32]]
MAX = float(FLOAT32_MAX)
TINY = 2.0**-149
NAN = math.nan
INF = math.inf


@np.errstate(all="ignore")
def apply(rule: Rule, v: F32, statistics: str = "fp32", element: ElementFormat = E2M1) -> tuple[list[int], list[float]]:
    byte, scale = rule(v, statistics, element)
    assert (byte.dtype.name, scale.dtype.name) == ("uint8", "float32")
    return byte.tolist(), scale.tolist()


def same(got: list[float], expected: list[float]) -> bool:
    """Equal lists of floats, NaN equal to NaN."""
    return np.array_equal(np.array(got), np.array(expected), equal_nan=True)


# v = 6 is exponent 0 for every rule that looks at v/6, and floor(log2 6) - 2 = 0 as well.
LANDMARKS = (0.0, TINY, 2.0**-126, 1.0, 4.0, 6.0, 7.0, MAX, INF, NAN)

# Bytes for the landmarks, and the scales of the elements if they differ from the decoded bytes.
EDGES: dict[str, tuple[Rule, list[int], dict[int, float]]] = {
    "ocp_floor": (exponents.ocp_floor, [0, 0, 0, 125, 127, 127, 127, 252, 254, 255], {}),
    # ceil(log2(v/6)); 2**-126/6 is below the range
    "ceil_log2_clamped": (exponents.ceil_log2_clamped, [0, 0, 0, 125, 127, 127, 128, 253, 254, 255], {}),
    "ceil_log2_or_none": (exponents.ceil_log2_or_none, [0, 0, 0, 125, 127, 127, 128, 253, 0, 0], {8: NAN, 9: NAN}),
    # a subnormal share has a mantissa bit, so byte 1; TINY/6 rounds to 0, and byte 0 means a scale of 0
    "ceil_bits_of_six": (
        exponents.ceil_bits_of_six,
        [0, 0, 1, 125, 127, 127, 128, 253, 255, 255],
        {0: 0.0, 1: 0.0, 8: INF, 9: INF},
    ),
    "ceil_bits_of_four": (
        exponents.ceil_bits_of_four,
        [0, 0, 1, 125, 127, 128, 128, 253, 255, 255],
        {0: 0.0, 1: 0.0, 8: INF, 9: INF},
    ),
    "round_up_quarter": (exponents.round_up_quarter, [0, 0, 0, 125, 127, 127, 128, 127, 127, 255], {7: INF, 8: INF}),
    # exponent field - 2; amaxes below the range divide by 2**-126, and NaN divides by the NaN of byte 255
    "floor_field": (
        exponents.floor_field,
        [0, 0, 0, 125, 127, 127, 127, 252, 253, 255],
        {0: 2.0**-126, 1: 2.0**-126, 2: 2.0**-126, 9: INF},
    ),
    "even_field": (
        exponents.even_field,
        [0, 0, 0, 125, 127, 127, 128, 253, 253, 255],
        {0: 2.0**-126, 1: 2.0**-126, 2: 2.0**-126, 9: INF},
    ),
    "ceil_field": (
        exponents.ceil_field,
        [0, 0, 0, 125, 127, 128, 128, 253, 253, 255],
        {0: 2.0**-126, 1: 2.0**-126, 2: 2.0**-126, 9: INF},
    ),
    "rceil_log2": (
        exponents.rceil_log2,
        [0, 0, 0, 125, 127, 127, 128, 253, 254, 255],
        {0: 1.0, 1: 1.0, 2: 1.0},
    ),
    # log2(1e-30) is -99.66
    "floor_log2_floored": (exponents.floor_log2_floored, [25, 25, 25, 125, 127, 127, 127, 253, 254, 0], {9: NAN}),
    # -149 - 2 + 127 = -24 is byte 232; byte 255 is read back as 2**128
    "floor_log2_wrapping": (exponents.floor_log2_wrapping, [0, 232, 255, 125, 127, 127, 127, 253, 0, 0], {2: INF}),
}


@pytest.mark.parametrize("name", EDGES)
def test_landmarks(name: str) -> None:
    rule, bytes_, exceptions = EDGES[name]
    values = [
        math.inf if byte == 255 and name == "floor_log2_wrapping" else float(E8M0.values[byte]) for byte in bytes_
    ]
    scales = [exceptions.get(index, value) for index, value in enumerate(values)]
    if name == "floor_log2_wrapping":
        scales[2] = INF  # 2**128 is no float32
    got_bytes, got_scales = apply(rule, f32(*LANDMARKS))
    assert got_bytes == bytes_
    assert same(got_scales, scales), got_scales


EXPONENTS = range(-120, 120, 7)


@pytest.mark.parametrize("k", EXPONENTS)
def test_around_seven_quarters(k: int) -> None:
    """1.75·2**k ± one ulp: the even rules move up from 1.75 on, floor never does, ceil always."""
    edge = f32(1.75 * 2.0**k)
    v = np.concatenate([below(edge), edge, above(edge)])
    byte = 127 + k - 2
    assert apply(exponents.even_field, v)[0] == [byte, byte + 1, byte + 1]
    assert apply(exponents.round_up_quarter, v)[0] == [byte, byte + 1, byte + 1]
    assert apply(exponents.floor_field, v)[0] == [byte] * 3
    assert apply(exponents.ocp_floor, v)[0] == [byte] * 3
    assert apply(exponents.ceil_field, v)[0] == [byte + 1] * 3


@pytest.mark.parametrize("k", EXPONENTS)
def test_around_a_power_of_two(k: int) -> None:
    power = f32(2.0**k)
    v = np.concatenate([below(power), power, above(power)])
    byte = 127 + k - 2
    assert apply(exponents.ocp_floor, v)[0] == [byte - 1, byte, byte]
    assert apply(exponents.floor_field, v)[0] == [byte - 1, byte, byte]
    assert apply(exponents.ceil_field, v)[0] == [byte, byte, byte + 1]
    assert apply(exponents.ceil_bits_of_four, v)[0] == [byte, byte, byte + 1]


@pytest.mark.parametrize("k", [-100, -70, 70, 100])
def test_float32_log2_reaches_the_power_early(k: int) -> None:
    """22 ulps above 6·2**k still give 2**k; in a rule on the bits, one ulp is too many."""
    six = f32(6 * 2.0**k).view(np.int32)
    near = from_bits(np.concatenate([six, six + 1, six + 16, six + 40]))
    byte = 127 + k
    assert apply(exponents.ceil_log2_clamped, near)[0] == [byte, byte, byte, byte + 1]
    assert apply(exponents.ceil_log2_or_none, near)[0] == [byte, byte, byte, byte + 1]
    assert apply(exponents.ceil_bits_of_six, near)[0] == [byte, byte + 1, byte + 1, byte + 1]
    power = f32(2.0**k).view(np.int32)
    just_below = from_bits(np.concatenate([power - 44, power - 45]))
    assert apply(exponents.floor_log2_wrapping, just_below)[0] == [byte - 2, byte - 3]
    assert apply(exponents.floor_log2_floored, just_below[:1])[0] == [byte - 2]
    assert apply(exponents.ocp_floor, just_below)[0] == [byte - 3, byte - 3]


def test_e4m3_elements_subtract_eight() -> None:
    """MXFP8: floor(log2 448) = 8."""
    v = f32(1.0, 256.0, 448.0, 2.0**-120)
    assert apply(exponents.ocp_floor, v, element=E4M3)[0] == [119, 127, 127, 0]
    assert apply(exponents.floor_field, v, element=E4M3)[0] == [119, 127, 127, 0]
    # half of the last place of three mantissa bits: 1.9375 moves up, one ulp below does not
    edge = f32(1.9375)
    assert apply(exponents.even_field, np.concatenate([below(edge), edge]), element=E4M3)[0] == [119, 120]


def test_quarter_rule_in_the_dtype_of_the_statistics() -> None:
    """In fp16 a scale below 2**-24 vanishes and becomes 1; amaxes from 57344 on carry to Inf."""
    v = f32(0.0, 2.0**-24, 2.0**-23, 0.75 * 2.0**-14, 1.0, 57344.0, 65504.0)
    bytes_, scales = apply(exponents.round_up_quarter, v, "fp16")
    assert bytes_ == [127, 127, 127, 127 - 16, 125, 127, 127]
    assert scales == [1.0, 1.0, 1.0, 2.0**-16, 0.25, INF, INF]
    # bfloat16 has float32's range: only the mantissa steps are coarser
    assert apply(exponents.round_up_quarter, f32(1.75, 1.7421875, 2.0**-100), "bf16")[0] == [126, 125, 25]


@pytest.mark.parametrize("factor", [1.0, 0.5, 3.0])
def test_flashinfer_s_rule_with_a_factor(factor: float) -> None:
    """g·(v·sixth) is rounded up to a power of two on its bits, and elements use this power divided by g."""
    v = f32(6.0, 12.0, 13.0, 100.0)
    byte, scale = ceil_bits_of_factor(v, "fp32", E2M1, factor=np.float32(factor))
    sixth, one = np.float32(1 / 6), np.float32(1)
    for value, got, met in zip(v, byte.tolist(), scale, strict=True):
        share = float(np.float32(np.float32(factor) * np.float32(value * sixth)))
        mantissa, exponent = math.frexp(share)
        assert got == 127 + exponent - (mantissa == 0.5)
        assert met == np.float32(np.float32(2.0 ** (got - 127)) * (one / np.float32(factor)))


# --- element steps and decoding ---


def test_element_steps() -> None:
    x, scale = f32(3, -1, 5, 7), f32(2, 4, 0.5, 0)
    with np.errstate(divide="ignore"):
        assert exponents.over(x, scale).tolist() == [1.5, -0.25, 10, INF]
        assert exponents.over_or_zero(x, scale).tolist() == [1.5, -0.25, 10, 0]
        assert exponents.times_reciprocal(x, scale).tolist() == [1.5, -0.25, 10, INF]
        assert exponents.times_reciprocal_zeroed(x, scale).tolist() == [1.5, -0.25, 10, 0]


def test_reciprocal_is_another_number_than_division() -> None:
    """1/2**-127 is 2**127. One binade lower the reciprocal overflows, but the division does not."""
    x, scale = f32(2.0**-130), f32(2.0**-149)
    with np.errstate(over="ignore"):
        assert exponents.over(x, scale).tolist() == [2.0**19]
        assert exponents.times_reciprocal(x, scale).tolist() == [INF]


def test_decode() -> None:
    q, byte = f32(6, -6, -0.0, 1.5, 1.0), u8(127, 0, 254, 255, 255)
    with np.errstate(over="ignore"):
        by_format, by_power = exponents.decode_e8m0(q, byte), exponents.decode_power(q, byte)
    assert_same_bits(by_format, f32(6, -6 * 2.0**-127, -0.0, NAN, NAN), any_nan=True)
    assert_same_bits(by_power, f32(6, -6 * 2.0**-127, -0.0, INF, INF))
    assert exponents.decode_power(f32(0.5), u8(255)).tolist() == [2.0**127]  # byte 255 is 2**128


def test_bytes_stay_within_a_byte() -> None:
    v = f32(1, 1, 1, NAN)
    assert exponents._with_nan(np.array([300, -5, 7, 7], np.int32), v).tolist() == [255, 0, 7, 255]
