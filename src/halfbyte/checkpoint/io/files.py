"""The source files of a run, read from any thread. Mapped parts count as memory, and are given back at once."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from halfbyte.backends.mapped import Window, can_map
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
        self.read_by(file, offset, into.nbytes, lambda descriptor: read_all(descriptor, offset, into))

    def window(self, file: str, offset: int, size: int, floats: np.dtype[Any]) -> Window | None:
        """A mapped part of a file that holds floats. None if the file cannot be mapped; then it must be read."""
        if not can_map() or offset % floats.itemsize:
            return None
        try:
            return Window(self._open(file), offset, size, floats)
        except EOFError:
            raise _cut(file, os.fstat(self._open(file)).st_size) from None
        except OSError as error:
            if error.errno in (errno.ENODEV, errno.EMFILE, errno.ENOMEM, errno.EACCES):  # not mapped, but readable
                return None
            raise CheckpointError(f"{self._paths[file]} cannot be read at byte {offset}: {error}") from error

    def close_window(self, window: Window, file: str, offset: int) -> None:
        """Raise if some byte of the window could not be read."""
        if not window.close():
            raise CheckpointError(
                f"{self._paths[file]} cannot be read after byte {offset}: it was cut since the plan was made, or its "
                "disk failed"
            )

    def read_by(self, file: str, offset: int, size: int, reader: Callable[[int], int]) -> None:
        """Let `reader` read `size` bytes at a position of an open file. It returns how many the file had."""
        try:
            done = reader(self._open(file))
        except OSError as error:
            raise CheckpointError(f"{self._paths[file]} cannot be read at byte {offset}: {error}") from error
        if done < size:
            raise _cut(file, offset + done)

    def _open(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(self._paths[file], os.O_RDONLY | os.O_CLOEXEC)
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


def _cut(file: str, at: int) -> CheckpointError:
    return CheckpointError(f"{file} ended at byte {at}: it was cut since the plan was made")
