"""The source files of a run, read from any thread. Plain reads, no mapped pages: those would count as memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.amax import can_read, largest_magnitude, read_largest_magnitude
from halfbyte.codec.bits import U8
from halfbyte.errors import CheckpointError


class Files:
    """The source files of a run, each opened once."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = paths
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, file: str, offset: int, into: U8) -> None:
        """Fill a contiguous byte array from a position. A file that ends early has changed since the plan."""
        done, total = 0, into.nbytes
        view = into.data
        try:
            descriptor = self._open(file)
            while done < total:
                got = os.preadv(descriptor, [view[done:]], offset + done)
                if got == 0:
                    raise _cut(file, offset + done)
                done += got
        except OSError as error:
            raise CheckpointError(f"{self._paths[file]} cannot be read at byte {offset + done}: {error}") from error

    def read_amax(self, file: str, offset: int, into: npt.NDArray[Any]) -> np.float32:
        """Like `read`, into an array of floats; returns their largest magnitude, NaN if there is one."""
        if not can_read():
            self.read(file, offset, into.reshape(-1).view(np.uint8))
            return largest_magnitude(into, threads=1)
        try:
            amax, done, failed = read_largest_magnitude(self._open(file), offset, into)
        except OSError as error:
            done, failed = 0, error
        if failed is not None:
            raise CheckpointError(f"{self._paths[file]} cannot be read at byte {offset + done}: {failed}") from failed
        if done < into.nbytes:
            raise _cut(file, offset + done)
        return amax

    def _open(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(self._paths[file], os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[file]

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def _cut(file: str, at: int) -> CheckpointError:
    return CheckpointError(f"{file} ended at byte {at}: it was cut since the plan was made")
