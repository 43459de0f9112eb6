"""Values that were only converted to another float: off by no more than one rounding and the slack."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from halfbyte.codec.bits import F32
from halfbyte.verify.rounded import SLACK, _outside
from tests.samples import f32


@pytest.mark.parametrize("sign", [1, -1])
def test_the_slack_is_the_same_on_both_sides(sign: int) -> None:
    wanted = np.full(6, sign, np.float32)
    stored = np.float32(sign) * (1 + np.float32(SLACK) * f32(0, 0.9, 1.5, 1.9, -0.9, -1.5)).astype(np.float32)
    assert _outside(stored, wanted, SLACK).tolist() == [False, False, True, True, False, True]


def test_one_rounding_to_a_shorter_float() -> None:
    wanted: F32 = np.linspace(-3, 3, 1001, dtype=np.float32)
    stored = wanted.astype(ml_dtypes.bfloat16)
    assert not _outside(stored, wanted, SLACK).any()
    other = np.nextafter(stored, ml_dtypes.bfloat16(np.inf))
    assert _outside(other, wanted, SLACK).mean() > 0.99
    both = f32(np.nan, np.inf, np.nan, 1)
    assert _outside(both, f32(np.nan, np.inf, 1, np.nan), SLACK).tolist() == [False, False, True, True]
