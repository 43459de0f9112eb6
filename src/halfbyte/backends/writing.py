"""Several writes to a file in one compiled call: a thread gives up the interpreter once, not once per write."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

from halfbyte.backends.cpu.library import load_library, pointer
from halfbyte.codec.bits import U8


def write_parts(file: int, parts: Sequence[tuple[U8, int]]) -> None:
    """Write contiguous bytes at their positions in an open file, one after the other. Raises OSError."""
    library = load_library()
    if library is None or sys.platform == "win32":
        for data, offset in parts:
            write_all(file, data.data, offset)
        return
    count = len(parts)
    failed = library.hb_write_parts(
        file,
        count,
        (ctypes.c_void_p * count)(*(pointer(data).value for data, _ in parts)),
        (ctypes.c_int64 * count)(*(data.nbytes for data, _ in parts)),
        (ctypes.c_int64 * count)(*(offset for _, offset in parts)),
    )
    if failed:
        raise OSError(failed, os.strerror(failed))


def write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of the data at a position, in as many steps as the system takes."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(file, view[done:], offset + done)
