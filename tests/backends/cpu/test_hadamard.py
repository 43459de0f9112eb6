"""The compiled Hadamard transform equals that of contracts/hadamard.py, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte as hb
from halfbyte import contracts
from halfbyte.backends.cpu.hadamard import rotate_matrix
from halfbyte.codec.bits import widen
from halfbyte.contracts.hadamard import rotate
from halfbyte.testing import assert_same_bits
from tests.backends.cases import DTYPES, INPUTS, make_input
from tests.backends.test_bits import each_isa, isa

__all__ = ["isa"]  # the fixture


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("random_signs", [True, False])
def test_every_input_is_rotated_to_the_bits_of_the_reference(random_signs: bool, dtype: str, isa: str) -> None:
    compared = 0
    for name in INPUTS:
        x = make_input(name, dtype)
        if x.shape[1] % 16:
            continue
        with np.errstate(all="ignore"):
            expected = rotate(widen(x), dtype, random_signs).astype(DTYPES[dtype])
        assert_same_bits(rotate_matrix(x, dtype, random_signs), expected, any_nan=True)
        compared += 1
    assert compared >= 25


@each_isa
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_sum_is_rounded_as_numpy_rounds(dtype: str, isa: str) -> None:
    """One large and one small element, so that sums fall on, or one unit next to, midpoints of 16-bit numbers."""
    size = 1 << 16
    x = np.zeros((size // 16, 16), DTYPES[dtype])
    words = np.arange(size, dtype=np.uint16).view(DTYPES[dtype])
    x[:, 0], x[:, 5] = words[::16], words[7::16]
    for shift in range(0, 16, 5):
        moved = np.roll(x, shift, axis=1)
        with np.errstate(all="ignore"):
            expected = rotate(widen(moved), dtype, True).astype(DTYPES[dtype])
        assert_same_bits(rotate_matrix(moved, dtype, True), expected, any_nan=True)


@pytest.mark.parametrize("threads", [1, 3])
def test_transposed_operands_on_threads(threads: int) -> None:
    x = np.random.default_rng(4).normal(size=(512, 2048)).astype(np.float32)
    contract = contracts.transformer_engine(columnwise=True, with_rht=True)
    got, wanted = (
        hb.quantize(x, "nvfp4", contract, backend=backend, threads=threads) for backend in ("cpu", "reference")
    )
    assert_same_bits(got.scales, wanted.scales)
    assert_same_bits(got.codes, wanted.codes)
