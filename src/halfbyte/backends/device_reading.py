"""Read a file into the memory of a device through a ring of pinned buffers, in one compiled call per tensor."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from halfbyte.backends.cpu.library import load_library, native, pointer
from halfbyte.backends.cpu.structs import DeviceFunctions, Ring
from halfbyte.backends.cpu.tables_mx import magnitude_values
from halfbyte.backends.numbering import DTYPE_NUMBERS
from halfbyte.codec.bits import U8, dtype_name
from halfbyte.errors import BackendError


def can_read_to_device() -> bool:
    """Whether `DeviceReader` can be used."""
    return load_library() is not None and sys.platform != "win32"


class DeviceReader:
    """Reads files to one stream of a device.

    functions: addresses of the CUDA runtime's cudaMemcpyAsync, cudaEventRecord and cudaEventSynchronize. memory: pinned
    bytes, cut into as many buffers as there are events. events: handles of events.
    """

    def __init__(self, functions: Sequence[int], memory: U8, events: Sequence[int], stream: int) -> None:
        self._functions = DeviceFunctions(*functions)
        self._memory, self._stream = memory, stream
        self._events = (ctypes.c_void_p * len(events))(*events)
        self._ring = Ring(
            pointer(memory), memory.size // len(events), len(events), ctypes.cast(self._events, ctypes.c_void_p), 0
        )

    def read(
        self, file: int, offset: int, size: int, device: int, dtype: np.dtype[Any] | None
    ) -> tuple[int, np.float32 | None]:
        """Queue copies of bytes of an open file to an address of the device.

        Returns how many bytes the file had, and for a dtype of floats the largest magnitude, NaN if there is one.
        Raises OSError if the file cannot be read, BackendError if the device fails.
        """
        library, isa = native()
        name = None if dtype is None else dtype_name(dtype)
        number, width = (0, 0) if name is None or dtype is None else (DTYPE_NUMBERS[name], dtype.itemsize)
        most, failed = ctypes.c_uint32(), ctypes.c_int32()
        done = int(
            library.hb_read_to_device(
                ctypes.byref(self._functions), ctypes.byref(self._ring), file, ctypes.c_int64(offset),
                ctypes.c_void_p(device), ctypes.c_int64(size), ctypes.c_void_p(self._stream), isa, number, width,
                ctypes.byref(most), ctypes.byref(failed),
            )
        )  # fmt: skip
        if failed.value > 0:
            raise OSError(failed.value, os.strerror(failed.value))
        if failed.value < 0:
            raise BackendError(f"a copy to the device failed with CUDA's error {-failed.value}")
        if name is None:
            return done, None
        return done, np.float32(magnitude_values(np.array([most.value], np.int64), name)[0])
