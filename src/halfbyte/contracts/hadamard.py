"""The random Hadamard transform of groups of sixteen. Training recipes apply it before they quantize.

y_j = Σ_i x_i · sign_i · H_ij / 4, where H is the Sylvester matrix. The products are exact (the factors are ±1/4). The
sum runs in index order in float32, and 16-bit operands are rounded once at the end.
"""

from __future__ import annotations

import numpy as np

from halfbyte.codec.bits import F32, round_to

GROUP = 16
# The fixed signs of TransformerEngine; fouroversix uses the same vector.
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=np.float32)


def sylvester(order: int) -> F32:
    """The Sylvester Hadamard matrix: entry (i, j) is -1 if i & j has an odd number of one bits, else +1."""
    index = np.arange(order)
    parity = np.bitwise_count(index[:, None] & index[None, :]) % 2
    return np.where(parity, -1, 1).astype(np.float32)


def rotation(random_signs: bool) -> F32:
    """sign_i · H_ij / 4, entry (i, j)."""
    matrix = sylvester(GROUP) / np.float32(4)
    return SIGNS[:, None] * matrix if random_signs else matrix


@np.errstate(all="ignore")  # NaN and Inf propagate; 16-bit results may overflow to Inf
def rotate(x: F32, dtype: str, random_signs: bool) -> F32:
    """Transform groups of 16 along the last axis and round to the dtype of that short name."""
    matrix = rotation(random_signs)
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    total = np.zeros_like(groups)
    for index in range(GROUP):
        total = total + groups[..., index : index + 1] * matrix[index]
    return round_to(total.reshape(x.shape), dtype)
