"""The source files of a run, read from any thread. Plain reads, no mapped pages: those would count as memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

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
                    raise CheckpointError(f"{file} ended at byte {offset + done}: it was cut since the plan was made")
                done += got
        except OSError as error:
            raise CheckpointError(f"{self._paths[file]} cannot be read at byte {offset + done}: {error}") from error

    def _open(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(self._paths[file], os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[file]

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
