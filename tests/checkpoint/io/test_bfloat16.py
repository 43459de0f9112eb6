"""Float32 to BF16 on the bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from halfbyte.checkpoint.io.bfloat16 import ELEMENTS, bf16
from halfbyte.testing import assert_same_bits


def test_bf16_rounds_once_and_keeps_what_is_special() -> None:
    values = np.array([1.00390625, -0.0, np.inf, 3.4e38], np.float32)
    assert bf16(values).astype(np.float32).tolist() == [1.0, -0.0, np.inf, np.inf]


def test_bf16_equals_the_cast_of_the_dtype() -> None:
    """Every upper half, with lower halves around the tie; NaN may have any bits."""
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | np.uint32(lower)).view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = values.astype(ml_dtypes.bfloat16)
        assert_same_bits(bf16(values), expected, any_nan=True)
        assert (np.isnan(values) == np.isnan(bf16(values).astype(np.float32))).all()


def test_more_than_one_step_and_the_payload_of_nan() -> None:
    """NaN keeps its upper bits and becomes quiet, as in IEEE; the array's shape stays."""
    bits = np.zeros((2, ELEMENTS + 3), np.uint32)
    bits[0, ELEMENTS - 1 :] = [0x7F800001, 0xFF8A0000, 0x7FC0FFFF, 0x7F7FFFFF]
    bits[1] = np.arange(ELEMENTS + 3, dtype=np.uint32) << np.uint32(15)
    result = bf16(bits.view(np.float32))
    assert (result.shape, result.dtype) == ((2, ELEMENTS + 3), ml_dtypes.bfloat16)
    assert result[0, ELEMENTS - 1 :].view(np.uint16).tolist() == [0x7FC0, 0xFFCA, 0x7FC0, 0x7F80]
    assert not result[0, : ELEMENTS - 1].view(np.uint16).any()
    ties = np.arange(ELEMENTS + 3, dtype=np.uint32)
    assert result[1, :1000].view(np.uint16).tolist() == ((ties + ((ties >> 1) & 1)) >> 1)[:1000].tolist()
    assert bf16(np.zeros(0, np.float32)).shape == (0,)
