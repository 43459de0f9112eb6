"""A kernel that tries the short forms of divisions on every significand."""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.four_six import _over_top
from halfbyte.backends.gpu.triton.scales import short_reciprocal, short_sixth


@triton.jit
def try_short_forms(out_ptr, B: tl.constexpr):
    """Counts significands for which a short form differs from the correctly rounded division."""
    significand = tl.program_id(0) * B + tl.arange(0, B)
    x = (significand | 0x3F800000).to(tl.float32, bitcast=True)
    tl.atomic_add(out_ptr, tl.sum((short_reciprocal(x, True) != tl.div_rn(1.0, x)).to(tl.int32), axis=0))
    tl.atomic_add(out_ptr + 1, tl.sum((short_sixth(x, True) != tl.div_rn(x, 6.0)).to(tl.int32), axis=0))
    tl.atomic_add(out_ptr + 2, tl.sum((_over_top(x, 2688.0, True) != tl.div_rn(x, 2688.0)).to(tl.int32), axis=0))
    tl.atomic_add(out_ptr + 3, tl.sum((_over_top(x, 1536.0, True) != tl.div_rn(x, 1536.0)).to(tl.int32), axis=0))
