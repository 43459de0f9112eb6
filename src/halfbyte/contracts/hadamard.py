"""The random Hadamard transform of groups of sixteen, as the training recipes apply it before quantizing.

y_j = Σ_i x_i · sign_i · H_ij / 4, H the Sylvester matrix. The products are exact (±1/4), the sum is taken in index
order in float32, and 16-bit operands get one rounding at the end.
"""

from __future__ import annotations

import numpy as np

from halfbyte.codec.bits import F32, round_to

GROUP = 16
# The fixed signs of TransformerEngine; fouroversix uses the same vector.
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=np.float32)


def sylvester(order: int) -> F32:
    """The Sylvester Hadamard matrix, entries ±1: entry (i, j) is − where i & j has an odd number of bits."""
    index = np.arange(order)
    parity = np.bitwise_count(index[:, None] & index[None, :]) % 2
    return np.where(parity, -1, 1).astype(np.float32)


def rotation(random_signs: bool) -> F32:
    """sign_i · H_ij / 4, entry (i, j)."""
    matrix = sylvester(GROUP) / np.float32(4)
    return SIGNS[:, None] * matrix if random_signs else matrix


@np.errstate(all="ignore")  # NaN and Inf go their way; 16-bit results may overflow to Inf
def rotate(x: F32, dtype: str, random_signs: bool) -> F32:
    """Transform groups of 16 along the last axis, rounded to the dtype of that short name."""
    matrix = rotation(random_signs)
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    total = np.zeros_like(groups)
    for index in range(GROUP):
        total = total + groups[..., index : index + 1] * matrix[index]
    return round_to(total.reshape(x.shape), dtype)
