"""The ranges in which the kernels' shortcuts are exact. Outside them the reference quantizes the tensor, or the row."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.call import NVFP4Call
from halfbyte.backends.cpu.choose import Kernel, choose
from halfbyte.backends.cpu.library import native, over_ranges, pointer
from halfbyte.backends.cpu.tables_mx import magnitude_values
from halfbyte.codec.bits import F32

AMAXES = (2.0**-60, 2.0**60)
"""Amaxes for which the searches can factor out powers of two: what underflows does so in the reference too."""
MULTIPLIERS = (2.0**-80, 2.0**60)

FAR_AMAXES = (2.0**-100, 2.0**100)
"""The same for kernels that square nothing, or scale by a power of two before they do (`FAR`)."""
FAR_MULTIPLIERS = (2.0**-115, 2.0**100)
FAR = (Kernel.EXACT_BLOCKS, Kernel.EXACT_ROWS, Kernel.PLAIN_ROWS)

LARGEST_OVER_MULTIPLIER = 2.0**50
"""A caller may give an amax or factor that does not fit the tensor. Beyond this ratio squared errors would overflow."""


def in_range(largest: float | F32, call: NVFP4Call) -> bool:
    """Whether the shortcuts are exact for a tensor with that largest magnitude, or rows with one each.

    NaN and Inf are never in range.
    """
    return bool(each_in_range(np.asarray(largest, np.float32), call).all())


@np.errstate(invalid="ignore")  # NaN counts as out of range
def each_in_range(largest: F32, call: NVFP4Call) -> npt.NDArray[np.bool_]:
    """`in_range` for each amax of a call by itself, with the largest magnitude under each."""
    amax, multiplier = call.t.amax.reshape(-1), call.multiplier.reshape(-1)
    far = choose(call.request) in FAR
    least, most = FAR_AMAXES if far else AMAXES
    amaxes = (amax >= least) & (amax <= most)
    least, most = FAR_MULTIPLIERS if far else MULTIPLIERS
    multipliers = (multiplier >= least) & (multiplier <= most)
    bounded = largest <= multiplier.astype(np.float64) * LARGEST_OVER_MULTIPLIER
    return np.asarray(np.isfinite(largest) & amaxes & multipliers & bounded)


def own_amax_in_range(call: NVFP4Call) -> bool:
    """`in_range` for the tensor's own largest magnitude, which is computed if it is not known yet."""
    return in_range(_largest(call) if call.largest is None else call.largest, call)


def _largest(call: NVFP4Call) -> float:
    """Largest magnitude of the tensor itself; NaN and Inf count."""
    library, isa = native()
    x, size = call.x, call.x.dtype.itemsize

    def part(start: int, stop: int) -> int:
        return int(library.hb_amax(isa, pointer(x, start * size), ctypes.c_int64(stop - start), call.dtype))

    bits = max(over_ranges(part, x.size, size, call.request.threads))
    return float(magnitude_values(np.array(bits, np.int64), call.request.dtype))
