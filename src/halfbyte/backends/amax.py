"""The largest magnitude of an array, by the compiled kernel if it is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.library import load_library
from halfbyte.backends.cpu.plain import tensor_amax
from halfbyte.codec.bits import dtype_name, widen


def largest_magnitude(x: npt.NDArray[Any], threads: int | None = None) -> np.float32:
    """The largest magnitude of an array as float32; NaN if it holds one."""
    if load_library() is None or not x.flags.c_contiguous:
        return np.float32(np.abs(widen(x)).max())
    return np.float32(tensor_amax(x, dtype_name(x.dtype), threads=threads)[0])
