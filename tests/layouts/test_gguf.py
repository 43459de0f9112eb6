"""GGUF block order, both ways."""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.codec.pack import pack
from halfbyte.errors import InputError
from halfbyte.formats import FORMATS
from halfbyte.layouts.gguf import even_odd, from_blocks, half_split, to_blocks
from halfbyte.testing import assert_same_bits
from tests.samples import U8, u8

RNG = np.random.default_rng(0)


def parts(name: str, rows: int, blocks: int) -> tuple[U8, U8]:
    block = FORMATS[name].block
    codes = RNG.integers(0, 256, (rows, blocks * block // 2)).astype(np.uint8)
    return codes, RNG.integers(0, 256, (rows, blocks)).astype(np.uint8)


def test_mxfp4_by_hand() -> None:
    """Byte j holds elements j and j + 16; the scale stands in front."""
    elements = np.arange(32, dtype=np.uint8) % 16
    elements[16:] = 15 - elements[16:]
    codes = pack(elements[None], FORMATS["mxfp4"])
    blocks = to_blocks(codes, u8(200)[None], FORMATS["mxfp4"])
    assert blocks.tolist() == [[200, *(j | (15 - j) << 4 for j in range(16))]]


def test_nvfp4_by_hand() -> None:
    """Four scales, then for each group of 16 eight bytes: elements j and j + 8."""
    elements = np.tile(np.arange(16, dtype=np.uint8), 4)
    blocks = to_blocks(pack(elements[None], FORMATS["nvfp4"]), u8(1, 2, 3, 4)[None], FORMATS["nvfp4"])
    assert blocks.tolist() == [[1, 2, 3, 4, *[j | (j + 8) << 4 for j in range(8)] * 4]]


@pytest.mark.parametrize(("name", "blocks"), [("mxfp4", 1), ("mxfp4", 5), ("nvfp4", 4), ("nvfp4", 12)])
def test_from_blocks_inverts_to_blocks(name: str, blocks: int) -> None:
    codes, scales = parts(name, 3, blocks)
    written = to_blocks(codes, scales, FORMATS[name])
    assert written.shape == (3, codes.shape[1] + scales.shape[1])
    read_codes, read_scales = from_blocks(written, FORMATS[name])
    assert_same_bits(read_codes, codes)
    assert_same_bits(read_scales, scales)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_even_odd_inverts_half_split(name: str) -> None:
    codes, _ = parts(name, 4, 4)
    halves = half_split(codes, FORMATS[name])
    assert not np.array_equal(halves, codes)
    assert_same_bits(even_odd(halves, FORMATS[name]), codes)
    assert_same_bits(half_split(even_odd(codes, FORMATS[name]), FORMATS[name]), codes)


def test_rows_that_are_not_whole() -> None:
    with pytest.raises(InputError, match="a GGUF row of nvfp4 is a multiple of 64 elements"):
        to_blocks(*parts("nvfp4", 1, 3), FORMATS["nvfp4"])
    with pytest.raises(
        InputError, match=r"GGUF blocks of mxfp4 of shape \(\d, 20\): expected \(rows, bytes\) with a multiple of 17"
    ):
        from_blocks(np.zeros((1, 20), np.uint8), FORMATS["mxfp4"])


def test_shapes_that_are_no_rows_of_blocks() -> None:
    mxfp4, nvfp4 = hb.get_format("mxfp4"), hb.get_format("nvfp4")
    with pytest.raises(InputError, match=r"codes of shape \(16,\): expected \(rows, bytes\)"):
        half_split(np.zeros(16, np.uint8), mxfp4)
    with pytest.raises(InputError, match=r"codes of shape \(2, 12\): .* a multiple of 16 bytes"):
        even_odd(np.zeros((2, 12), np.uint8), mxfp4)
    with pytest.raises(InputError, match=r"need scales of shape \(2, 4\), not \(2, 3\)"):
        to_blocks(np.zeros((2, 32), np.uint8), np.zeros((2, 3), np.uint8), nvfp4)
    with pytest.raises(hb.UnknownNameError, match="unknown format of GGUF 'mxfp8'; known: mxfp4, nvfp4"):
        from_blocks(np.zeros((2, 33), np.uint8), hb.get_format("mxfp8"))
