"""Float32 to BF16, rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.codec.bits import BFLOAT16, F32


def bf16(values: F32) -> npt.NDArray[Any]:
    """Float32 rounded once to BF16, nearest even, on the bits: several times as fast as a cast of the dtype.

    NaN stays NaN; what rounds beyond the largest number becomes Inf, as in IEEE.
    """
    out = np.empty(values.shape, np.uint16)
    flat, result = values.reshape(-1).view(np.uint32), out.reshape(-1)
    for start in range(0, flat.size, ELEMENTS):
        bits = flat[start : start + ELEMENTS]
        rounded = bits >> np.uint32(16)
        odd = rounded & np.uint32(1)
        odd += np.uint32(0x7FFF)
        odd += bits
        odd >>= np.uint32(16)
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        if nan.any():
            odd[nan] = rounded[nan] | np.uint32(0x40)
        result[start : start + ELEMENTS] = odd
    return out.view(BFLOAT16)


ELEMENTS = 1 << 16
"""Numbers per step, so that they and their intermediate results stay in the cache."""
