"""The source files of a run, read from any thread.

Plain reads, no mapped pages: those would count as memory, and mapping does not scale beyond a few threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from halfbyte.backends.amax import can_read, is_cached_here, largest_magnitude, read_largest_magnitude
from halfbyte.codec.bits import U8
from halfbyte.errors import CheckpointError


class Files:
    """The source files of a run, each opened once."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = paths
        self._descriptors: dict[str, int] = {}
        self._cached: dict[str, bool] = {}
        self._lock = threading.Lock()

    def read(self, file: str, offset: int, into: U8) -> None:
        """Fill a contiguous byte array from a position. A file that ends early has changed since the plan."""
        self.read_by(file, offset, into.nbytes, lambda descriptor: read_all(descriptor, offset, into))

    def read_amax(self, file: str, offset: int, into: npt.NDArray[Any], size: int | None = None) -> np.float32:
        """Like `read`, into an array of floats; returns their largest magnitude, NaN if there is one.

        size: bytes to read, if they are more than the array has: nobody needs them afterwards. Only if `can_read`.
        """
        if not can_read():
            self.read(file, offset, into.reshape(-1).view(np.uint8))
            return largest_magnitude(into, threads=1)
        found: list[np.float32] = []

        def read(descriptor: int) -> int:
            amax, done = read_largest_magnitude(descriptor, offset, into, size)
            found.append(amax)
            return done

        self.read_by(file, offset, into.nbytes if size is None else size, read)
        return found[0]

    def read_by(self, file: str, offset: int, size: int, reader: Callable[[int], int]) -> None:
        """Let `reader` read `size` bytes at a position of an open file. It returns how many the file had."""
        try:
            done = reader(self._open(file))
        except OSError as error:
            raise CheckpointError(f"{self._paths[file]} cannot be read after byte {offset}: {error}") from error
        if done < size:
            raise _cut(file, offset + done)

    def refuse(self, file: str, at: int, error: int) -> NoReturn:
        """Raise for a file that could not be read from a byte on; `error`: the system's number, or 0: it ended."""
        if error:
            raise CheckpointError(f"{self._paths[file]} cannot be read after byte {at}: {os.strerror(error)}")
        raise _cut(file, at)

    def is_cached_here(self, file: str) -> bool:
        """Whether to read bytes again, soon after they were read, takes no more than to copy them."""
        if file not in self._cached:
            self._cached[file] = is_cached_here(self.descriptor(file))
        return self._cached[file]

    def descriptor(self, file: str) -> int:
        """Of a file that is open for reading."""
        try:
            return self._open(file)
        except OSError as error:
            raise CheckpointError(f"{self._paths[file]} cannot be read: {error.strerror or error}") from error

    def _open(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(self._paths[file], os.O_RDONLY)
            return self._descriptors[file]

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def read_all(descriptor: int, offset: int, into: U8) -> int:
    """Fill a contiguous byte array from a position of an open file. Returns the bytes read: fewer if the file ends."""
    done, view = 0, into.data
    while done < into.nbytes and (got := os.preadv(descriptor, [view[done:]], offset + done)):
        done += got
    return done


def stat_of(path: Path) -> os.stat_result:
    """Of a source file. One that is gone is an error that names it, and not the destination."""
    try:
        return path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _cut(file: str, at: int) -> CheckpointError:
    return CheckpointError(f"{file} ended at byte {at}: it was cut since the plan was made")
