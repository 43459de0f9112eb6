"""Moving blocks: the kernel and the numpy definition give the same bytes; the range of scales that are used."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.backends.cpu.repack import has_kernels
from halfbyte.casting import window
from halfbyte.codec.bits import U8
from halfbyte.testing import assert_same_bits

GENERATOR = np.random.default_rng(3)


def blocks(rows: int, columns: int, zero_share: float) -> tuple[U8, U8]:
    """Codes and scales of which some blocks hold only ±0."""
    codes = GENERATOR.integers(0, 256, (rows, columns, 16), dtype=np.uint8)
    zero = GENERATOR.random((rows, columns)) < zero_share
    codes[zero] = GENERATOR.choice(np.array([0x00, 0x08, 0x80, 0x88], np.uint8), codes[zero].shape)
    scales = GENERATOR.integers(0, 255, (rows, columns), dtype=np.uint8)
    return codes.reshape(rows, -1), scales


@pytest.mark.parametrize("m", [-140, -14, 0, 30, 120])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 64)])
@pytest.mark.parametrize("zero_share", [0.0, 0.4, 1.0])
def test_every_backend_keeps_the_same_bytes(zero_share: float, shape: tuple[int, int], m: int) -> None:
    codes, scales = blocks(*shape, zero_share)
    assert has_kernels()
    by_kernel = window.keep_blocks(codes, scales, m, backend="cpu")
    zeros = int((codes.reshape(-1, 16) & 0x77 == 0).all(axis=1).sum())
    for backend in ("reference", "auto"):
        found = window.keep_blocks(codes, scales, m, backend=backend)
        assert_same_bits(found[0], by_kernel[0])
        assert_same_bits(found[1], by_kernel[1])
        assert found[2] == by_kernel[2] == zeros


@pytest.mark.parametrize("zero_share", [0.0, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("count", [1, 100, 3 * window.CHUNK + 7])
def test_the_range_of_used_scales(count: int, zero_share: float) -> None:
    codes, scales = blocks(1, count, zero_share)
    flat, bytes_ = codes.reshape(-1, 16), scales.reshape(-1)
    used = bytes_[(flat & 0x77 != 0).any(axis=1)]
    wanted = window.Exponents(int(used.min()) - 127, int(used.max()) - 127) if used.size else None
    assert window.used_exponents(flat, bytes_) == wanted


def test_a_zero_block_with_the_largest_scale_does_not_count() -> None:
    codes = np.full((4, 16), 0x21, np.uint8)
    codes[2] = 0x88
    scales = np.array([100, 90, 250, 95], np.uint8)
    assert window.used_exponents(codes, scales) == window.Exponents(90 - 127, 100 - 127)
