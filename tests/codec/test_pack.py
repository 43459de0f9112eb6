"""Packing codes into bytes and unpacking them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from halfbyte.codec.pack import pack, packed_width, unpack
from halfbyte.formats import FORMATS
from halfbyte.testing import assert_same_bits
from tests.samples import U8, codes_of, u8

FOUR_BIT = ["nvfp4", "mxfp4"]
CODES = hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, max_side=9), elements=st.integers(0, 15))


@pytest.mark.parametrize("name", FOUR_BIT)
def test_even_element_in_the_low_nibble(name: str) -> None:
    assert pack(u8(1, 2, 3, 15), FORMATS[name]).tolist() == [0x21, 0xF3]
    assert unpack(u8(0x21, 0xF3), 4, FORMATS[name]).tolist() == [1, 2, 3, 15]


@pytest.mark.parametrize("name", FOUR_BIT)
def test_odd_rows_end_in_a_zero_nibble(name: str) -> None:
    codes = u8(1, 2, 15, 4, 5, 6).reshape(2, 3)
    assert pack(codes, FORMATS[name]).tolist() == [[0x21, 0x0F], [0x54, 0x06]]


@given(CODES)
def test_unpack_inverts_pack(codes: U8) -> None:
    format = FORMATS["nvfp4"]
    packed = pack(codes, format)
    assert packed.shape == (*codes.shape[:-1], packed_width(codes.shape[-1], format))
    assert_same_bits(unpack(packed, codes.shape[-1], format), codes)


@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=3, max_side=9)))
def test_pack_inverts_unpack(packed: U8) -> None:
    """Every byte, compared with another way to unpack."""
    format = FORMATS["mxfp4"]
    codes = unpack(packed, 2 * packed.shape[-1], format)
    assert_same_bits(codes, codes_of(packed))
    assert_same_bits(pack(codes, format), packed)


def test_every_pair_of_codes() -> None:
    low, high = np.meshgrid(np.arange(16, dtype=np.uint8), np.arange(16, dtype=np.uint8))
    pairs = np.stack([low, high], axis=-1).reshape(-1, 2)
    assert_same_bits(pack(pairs, FORMATS["nvfp4"])[:, 0], np.arange(256, dtype=np.uint8))


def test_inputs_are_left_alone() -> None:
    codes = u8(1, 2, 3)
    pack(codes, FORMATS["nvfp4"])
    assert codes.tolist() == [1, 2, 3]


@pytest.mark.parametrize("width", [1, 2, 31, 32])
def test_eight_bit_codes_are_bytes_already(width: int) -> None:
    codes = np.arange(2 * width, dtype=np.uint8).reshape(2, width)
    format = FORMATS["mxfp8"]
    assert packed_width(width, format) == width
    assert_same_bits(pack(codes, format), codes)
    assert_same_bits(unpack(codes, width, format), codes)


@pytest.mark.parametrize(("width", "bytes_"), [(1, 1), (2, 1), (3, 2), (16, 8), (17, 9)])
def test_packed_width(width: int, bytes_: int) -> None:
    assert packed_width(width, FORMATS["nvfp4"]) == bytes_
