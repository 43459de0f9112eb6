"""The kernel of the verbatim cast gives the bytes of the numpy definition."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.backends.cpu.repack import cast_blocks, has_kernels
from halfbyte.testing import assert_same_bits
from tests.backends.test_bits import each_isa, isa

__all__ = ["isa"]  # the fixture


def test_the_kernels_are_there() -> None:
    assert has_kernels()


@each_isa
@pytest.mark.parametrize("blocks", [1, 2, 7, 8, 9, 100, 40000])
def test_the_cast_copies_codes_and_doubles_scales(blocks: int, isa: str) -> None:
    generator = np.random.default_rng(blocks)
    codes = generator.integers(0, 256, (blocks, 16), dtype=np.uint8)
    codes[::3] = generator.choice([0x00, 0x08, 0x80, 0x88], codes[::3].shape)
    codes[-1, :] = 0
    codes[-1, 15] = 0x10  # one element that is not zero, the last
    scales = generator.integers(0, 256, blocks, dtype=np.uint8)
    table = generator.permutation(256).astype(np.uint8)
    new_codes, new_scales, zeros = cast_blocks(codes, scales, table, threads=2)
    assert_same_bits(new_codes, codes)
    assert_same_bits(new_scales, np.repeat(table[scales], 2).reshape(blocks, 2))
    assert zeros == int(((codes & 0x77) == 0).all(axis=1).sum())


def test_what_does_not_fit_is_refused() -> None:
    codes, scales, table = np.zeros((4, 16), np.uint8), np.zeros(4, np.uint8), np.zeros(256, np.uint8)
    with pytest.raises(TypeError, match=r"codes \(4, 16\) and table \(256,\) do not fit 5 blocks"):
        cast_blocks(codes, np.zeros(5, np.uint8), table)
    with pytest.raises(TypeError, match=r"out is uint8 of shape \(3, 2\), but the result is uint8 of \(4, 2\)"):
        cast_blocks(codes, scales, table, out=(codes.copy(), np.zeros((3, 2), np.uint8)))
