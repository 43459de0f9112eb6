"""Model-Optimizer's casts from MXFP4 to NVFP4: through bfloat16, or with both amaxes in closed form.

The closed form fixes the global scale at 2**m with m = k_max - 8. A block whose 2**(k - m) is an E4M3 value gets the
amax 6·2**k, so its scale is exactly 2**(k - m) and its codes stay. Any other block keeps the amax of its data. k_max is
the largest exponent among bytes above 0.
"""

from __future__ import annotations

import numpy as np

from halfbyte.codec.bits import F32, U8, power_of_two
from halfbyte.contracts.spec import CastRule

E4M3_HIGHEST, E4M3_LOWEST = 8, -9
"""E4M3 holds 2**k for k from -9 to 8."""


def largest_exponent(byte: U8) -> int:
    """max(byte − 127) over bytes above 0; 0 if there is none"""
    used = byte[byte > 0]
    return int(used.max()) - 127 if used.size else 0


def factor_of_exponent(k_max: int) -> F32:
    """2^(k_max − 8)"""
    return power_of_two(np.array([k_max - E4M3_HIGHEST], np.int32))


def amax_of_block(largest: F32, byte: U8) -> F32:
    """6·2^k where k − (k_max − 8) is in [−9, 8], else (largest magnitude)·2^k

    Here k_max is always the tensor's own; it is -127 if every byte is 0.
    """
    k = byte.astype(np.int32) - 127
    delta = k - (int(k.max()) - E4M3_HIGHEST)
    inside = (delta >= E4M3_LOWEST) & (delta <= E4M3_HIGHEST)
    amax: F32 = np.where(inside, np.float32(6), largest).astype(np.float32) * power_of_two(k)
    return amax


def count_lossless(byte: U8, k_max: int) -> int:
    """Blocks that the peer reports as lossless: byte 0, or k ≥ k_max − 17"""
    k = byte.astype(np.int32) - 127
    return int(((k >= k_max - (E4M3_HIGHEST - E4M3_LOWEST)) | (byte == 0)).sum())


THROUGH_BF16 = CastRule()
CLOSED_FORM = CastRule(factor=factor_of_exponent, block_amax=amax_of_block)
