"""The largest magnitude of an array, or of what is read from a file, by the compiled kernel if it is installed."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.library import load_library, native, pointer
from halfbyte.backends.cpu.plain import tensor_amax
from halfbyte.backends.cpu.tables_mx import magnitude_values
from halfbyte.backends.numbering import DTYPE_NUMBERS
from halfbyte.codec.bits import dtype_name, widen


def largest_magnitude(x: npt.NDArray[Any], threads: int | None = None) -> np.float32:
    """The largest magnitude of an array as float32; NaN if it holds one."""
    if load_library() is None or not x.flags.c_contiguous:
        return np.float32(np.abs(widen(x)).max())
    return np.float32(tensor_amax(x, dtype_name(x.dtype), threads=threads)[0])


def can_read() -> bool:
    """Whether `read_largest_magnitude` can be used."""
    return load_library() is not None and sys.platform != "win32"


def is_cached_here(file: int) -> bool:
    """Whether an open file is cheap to read again at once: whether a file system of this machine caches it."""
    library = load_library()
    return library is not None and bool(library.hb_is_cached_here(file))


def read_largest_magnitude(
    file: int, offset: int, into: npt.NDArray[Any], size: int | None = None
) -> tuple[np.float32, int]:
    """Fill a contiguous array from a position of an open file: the largest magnitude, as above, and the bytes read.

    size: bytes to read, if they are more than the array has: then it is filled again and again. Fewer bytes are read if
    the file ends early. Raises OSError.
    """
    library, isa = native()
    name = dtype_name(into.dtype)
    bits, error = ctypes.c_uint32(), ctypes.c_int()
    done = library.hb_read_amax(
        isa, file, ctypes.c_int64(offset), pointer(into), ctypes.c_int64(into.nbytes),
        ctypes.c_int64(into.nbytes if size is None else size), DTYPE_NUMBERS[name],
        into.dtype.itemsize, ctypes.byref(bits), ctypes.byref(error),
    )  # fmt: skip
    if error.value:
        raise OSError(error.value, os.strerror(error.value))
    return np.float32(magnitude_values(np.array([bits.value], np.int64), name)[0]), done
