"""assert_same_bits is the only equality helper. So it must raise on every kind of difference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from halfbyte.testing import assert_same_bits, find_difference, hex_rows
from tests.samples import f32, gaussian, u8

NAN = 0x7FC00000
"""The bits of the usual float32 NaN. +1 gives another payload; the top bit is the sign."""


def from_bits(*bits: int) -> npt.NDArray[np.float32]:
    return np.array(bits, dtype=np.uint32).view(np.float32)


EQUAL: dict[str, tuple[Any, Any]] = {
    "floats": (gaussian(3, 5), gaussian(3, 5)),
    "same NaN": (from_bits(NAN), from_bits(NAN)),
    "zeros of one sign": (f32(-0.0), f32(-0.0)),
    "bytes": (u8(0, 255), u8(0, 255)),
    "bools": (np.array([True, False]), np.array([True, False])),
    "scalars": (np.array(2, np.float32), np.array(2, np.float32)),
    "empty": (f32(), f32()),
    "strides": (gaussian(4, 6).T, np.ascontiguousarray(gaussian(4, 6).T)),
    "numpy and torch": (gaussian(2, 3), torch.from_numpy(gaussian(2, 3))),
    "bfloat16": (f32(1, 2).astype(ml_dtypes.bfloat16), torch.tensor([1, 2], dtype=torch.bfloat16)),
}

DIFFERENT: dict[str, tuple[Any, Any]] = {
    "last bit": (from_bits(0x3F800001), from_bits(0x3F800000)),
    "top bit": (f32(1), f32(-1)),
    "sign of zero": (f32(0.0), f32(-0.0)),
    "NaN payload": (from_bits(NAN + 1), from_bits(NAN)),
    "NaN sign": (from_bits(NAN | 1 << 31), from_bits(NAN)),
    "NaN and number": (from_bits(NAN), f32(1)),
    "one byte of many": (np.zeros((9, 9), np.uint8), np.pad(u8(1)[None], [(4, 4), (4, 4)])),
    "dtype of one size": (np.array([1], np.int32), np.array([1], np.uint32)),
    "dtype of equal values": (np.array([1], np.float16), np.array([1], np.float32)),
    "shape": (np.zeros((2, 3), np.uint8), np.zeros((3, 2), np.uint8)),
    "broadcastable shape": (np.zeros((1, 3), np.uint8), np.zeros(3, np.uint8)),
    "scalar and vector": (np.zeros((), np.uint8), np.zeros(1, np.uint8)),
    "length": (u8(1, 2), u8(1, 2, 3)),
    "empty and not": (u8(), u8(1)),
    "bools": (np.array([True]), np.array([False])),
    "bfloat16 bit": (np.array([1], ml_dtypes.bfloat16), np.array([1.0078125], ml_dtypes.bfloat16)),
    "torch": (torch.tensor([1.0]), torch.tensor([2.0])),
    "NaN byte of E8M0 style": (u8(0x7F), u8(0xFF)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_passes_on_equal_bits(name: str) -> None:
    a, b = EQUAL[name]
    assert_same_bits(a, b)
    assert find_difference(a, b) is None


@pytest.mark.parametrize("name", DIFFERENT)
def test_raises_on_a_difference_either_way(name: str) -> None:
    a, b = DIFFERENT[name]
    with pytest.raises(AssertionError):
        assert_same_bits(a, b)
    with pytest.raises(AssertionError):
        assert_same_bits(b, a)


@pytest.mark.parametrize("payload", [NAN + 1, NAN | 1 << 31, 0x7F800001])
def test_any_nan_makes_nans_equal(payload: int) -> None:
    assert_same_bits(from_bits(payload, 0), from_bits(NAN, 0), any_nan=True)


@pytest.mark.parametrize("number", [0.0, 1.0, np.inf])
def test_any_nan_still_tells_nan_from_numbers(number: float) -> None:
    for a, b in ((f32(number), from_bits(NAN)), (from_bits(NAN), f32(number)), (f32(number), f32(-number))):
        with pytest.raises(AssertionError):
            assert_same_bits(a, b, any_nan=True)


def test_any_nan_holds_for_ml_dtypes() -> None:
    a, b = np.array([0x7FC0, 0x3F80], np.uint16), np.array([0xFFC1, 0x3F80], np.uint16)
    assert_same_bits(a.view(ml_dtypes.bfloat16), b.view(ml_dtypes.bfloat16), any_nan=True)
    with pytest.raises(AssertionError, match="1 of 2"):
        assert_same_bits(a.view(ml_dtypes.bfloat16), b.view(ml_dtypes.bfloat16))


@pytest.mark.parametrize(("a", "b"), [(0x7F, 0xFF), (0xFF, 0x7F), (0x7F, 0x7F), (0xFF, 0xFF)])
def test_e4m3_has_one_nan(a: int, b: int) -> None:
    assert_same_bits(u8(1, a), u8(1, b), e4m3=True)


@pytest.mark.parametrize(("a", "b"), [(0x7E, 0x7F), (0xFE, 0xFF), (0x00, 0x80), (0x7E, 0xFE), (0x7F, 0x00)])
def test_e4m3_forgives_nothing_else(a: int, b: int) -> None:
    for left, right in ((a, b), (b, a)):
        with pytest.raises(AssertionError):
            assert_same_bits(u8(left), u8(right), e4m3=True)


def test_message_names_count_place_and_bits() -> None:
    expected = gaussian(4, 8)
    got = expected.copy()
    got[2, 3], got[3, 0] = 1.0, 2.0
    wanted = f"0x{expected.view(np.uint32)[2, 3]:08x}"
    with pytest.raises(AssertionError) as error:
        assert_same_bits(got, expected)
    assert str(error.value) == f"2 of 32 elements differ, first at (2, 3): 0x3f800000 where {wanted} is expected"
    difference = find_difference(got, expected)
    assert difference is not None
    assert (difference.count, difference.index) == (2, (2, 3))


def test_message_names_dtypes_and_shapes() -> None:
    with pytest.raises(AssertionError, match="dtype float16 where float32 is expected"):
        assert_same_bits(np.zeros(2, np.float16), np.zeros(2, np.float32))
    with pytest.raises(AssertionError, match=r"shape \(2,\) where \(3,\) is expected"):
        assert_same_bits(u8(1, 2), u8(1, 2, 3))


def test_message_shows_the_inputs_of_the_row() -> None:
    inputs = f32(*range(6)).reshape(3, 2)
    with pytest.raises(AssertionError, match=r"inputs of row 2 from 0 on: 0x40800000 0x40a00000$"):
        assert_same_bits(u8(0, 0, 1)[:, None], u8(0, 0, 0)[:, None], inputs=inputs)


def test_message_shows_the_right_row_of_a_tensor_with_leading_axes() -> None:
    """Row (1, 1) of a (2, 3, 1) tensor is the fifth."""
    inputs = f32(*range(6)).reshape(2, 3, 1)
    got = np.zeros((2, 3, 1), np.uint8)
    got[1, 1, 0] = 1
    with pytest.raises(AssertionError, match=r"inputs of row 4 from 0 on: 0x40800000$"):
        assert_same_bits(got, np.zeros_like(got), inputs=inputs)


def test_hex_rows_prints_bits() -> None:
    assert hex_rows(f32(1, -0.0)) == "0x3f800000 0x80000000"
    assert hex_rows(u8(7, 255).reshape(2, 1)) == "0x07 0xff"


def test_anything_else_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a numpy array or a torch tensor, got list"):
        find_difference([1.0], f32(1))  # type: ignore[arg-type]
