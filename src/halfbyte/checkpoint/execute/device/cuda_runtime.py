"""The functions of the CUDA runtime that a conversion calls by itself, and its errors."""

from __future__ import annotations

import ctypes
import functools

from halfbyte.errors import BackendError, UnsupportedError


class Runtime:
    """The CUDA runtime that torch has loaded."""

    def __init__(self) -> None:
        import torch

        name = f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}"
        try:
            self.short, self.long = ctypes.PyDLL(name), ctypes.CDLL(name)
        except OSError as error:
            raise UnsupportedError(
                f"{name}, which torch should have brought along, is not found; use --device cpu"
            ) from error
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self.short.cudaMemcpyAsync.argtypes = [pointer, pointer, ctypes.c_size_t, number, pointer]
        self.short.cudaEventCreateWithFlags.argtypes = [ctypes.POINTER(pointer), ctypes.c_uint]
        self.short.cudaEventRecord.argtypes = [pointer, pointer]
        for library in (self.short, self.long):
            library.cudaEventQuery.argtypes = library.cudaEventSynchronize.argtypes = [pointer]
            library.cudaEventDestroy.argtypes = [pointer]

    def addresses(self) -> tuple[int, ...]:
        """Those of the functions that a DeviceReader takes."""
        functions = (self.long.cudaMemcpyAsync, self.long.cudaEventRecord, self.long.cudaEventSynchronize)
        return tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)


@functools.cache
def runtime() -> Runtime:
    return Runtime()


def check(status: int, what: str) -> None:
    """Raise for an error of CUDA."""
    if status:
        raise BackendError(f"{what} failed with CUDA's error {status}")
