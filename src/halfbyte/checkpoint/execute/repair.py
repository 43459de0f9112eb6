"""Amaxes without a usable scale: NaN and Inf are refused, zero and tiny ones are raised to the next usable one."""

from __future__ import annotations

import numpy as np

from halfbyte.errors import CheckpointError

SMALLEST_AMAX = np.float32(2688 * 2.0**-126)
"""Below this amax / 2688 is subnormal, which many devices read as zero."""

LARGEST_PRODUCT = np.float32(2688)
"""6 · 448: the amax whose tensor scale is 1."""


def usable_amax(amax: np.float32, module: str, repairs: bool) -> np.float32:
    """The amax to quantize with. NaN and Inf are refused; with `repairs`, zero and tiny ones are raised.

    Model-Optimizer's formula gives NaN scales for an all-zero tensor; stored with a scale of 1 it decodes to zeros.
    """
    if not np.isfinite(amax):
        raise CheckpointError(
            f"{module} holds {'NaN' if np.isnan(amax) else 'Inf'}: its scale would be unusable; repair the source, "
            f"or keep the module unquantized (--keep {module})"
        )
    if repairs and amax == 0:
        return LARGEST_PRODUCT
    if repairs and amax < SMALLEST_AMAX:
        return SMALLEST_AMAX
    return amax
