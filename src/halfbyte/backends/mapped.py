"""Windows into files: kernels read the page cache itself, and no byte is copied. Linux, with the compiled library."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from typing import Any

import numpy as np

from halfbyte.backends.cpu.library import load_library, native
from halfbyte.backends.cpu.tables_mx import magnitude_values
from halfbyte.backends.numbering import DTYPE_NUMBERS
from halfbyte.codec.bits import U8, dtype_name


def can_map() -> bool:
    """Whether this machine and installation have windows."""
    return sys.platform == "linux" and load_library() is not None


class Window:
    """Some bytes of an open file. Its arrays must not be used after `close`."""

    def __init__(self, file: int, offset: int, size: int, floats: np.dtype[Any] | None = None) -> None:
        """floats: their dtype, to find the largest magnitude as well. Raises OSError, EOFError for a shorter file."""
        library, isa = native()
        self.size = size
        self.amax: np.float32 | None = None
        """The largest magnitude, NaN if there is one."""
        name = None if floats is None else dtype_name(floats)
        address, bits = ctypes.c_void_p(), ctypes.c_uint32()
        number = library.hb_map(
            file, ctypes.c_int64(offset), ctypes.c_int64(size), isa, 0 if name is None else DTYPE_NUMBERS[name],
            0 if floats is None else floats.itemsize, ctypes.byref(address), ctypes.byref(bits),
        )  # fmt: skip
        if number == -errno.ENODATA:
            raise EOFError
        if number < 0:
            raise OSError(-number, os.strerror(-number))
        self._number = number
        self._memory = (ctypes.c_uint8 * size).from_address(address.value or 0)
        if name is not None:
            self.amax = np.float32(magnitude_values(np.array([bits.value], np.int64), name)[0])

    @property
    def bytes(self) -> U8:
        array: U8 = np.frombuffer(memoryview(self._memory), np.uint8)
        array.flags.writeable = False
        return array

    def close(self) -> bool:
        """Whether every page of it could be read. Where one could not, zeros stood in its place."""
        library, _ = native()
        return not library.hb_unmap(self._number)
