"""Float32 to BF16 on the bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from halfbyte.checkpoint.io.bfloat16 import bf16
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
