"""Locks on files of a shared folder. The kernel gives a lock up when its process ends, so none is ever stale.

Regular files that are open for writing are locked, not folders: on NFS a lock on a folder is seen by one machine alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from halfbyte.errors import CheckpointError

PAUSE = 0.05
"""Seconds between two attempts."""


class FileLock:
    """An exclusive lock on a file, which is created if need be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def take(self, seconds: float = 0) -> bool:
        """Lock it. False if another process has it, and still had it after that many seconds."""
        until = time.monotonic() + seconds
        while not self._try():
            if time.monotonic() >= until:
                return False
            time.sleep(PAUSE)
        return True

    def _try(self) -> bool:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _same(descriptor, self.path):  # who had it has removed the file
                os.close(descriptor)
                return False
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise CheckpointError(
                f"{self.path} cannot be locked: {error.strerror}; give a directory on a file system that has locks "
                "(Lustre: mounted with -o flock)"
            ) from error
        self._descriptor = descriptor
        return True

    def __enter__(self) -> FileLock:
        if not self.take():
            raise CheckpointError(f"{self.path} is locked by another process")
        return self

    def __exit__(self, *details: object) -> None:
        self.release()

    def release(self) -> None:
        """Give it up. The file stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_locked(path: Path) -> bool:
    """Whether a process has the lock of a file. It must not be asked by two processes at the same time."""
    if not path.exists():
        return False
    lock = FileLock(path)
    if lock.take():
        lock.release()
        return False
    return True


def _same(descriptor: int, path: Path) -> bool:
    """Whether an open file still has that name."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    mine = os.stat(descriptor)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)
