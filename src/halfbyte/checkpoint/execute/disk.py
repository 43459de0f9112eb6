"""Writing files so that they last: flushed to the disk, and the folders that name them too."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

PIECE = 1 << 20
"""Bytes of a side file that are copied at a time."""


class Disk:
    """How sure a write has to be before the next step: on disk, or with the kernel, which is enough unless it dies."""

    def __init__(self, sync: bool = True) -> None:
        self.sync = sync

    def write(self, path: Path, data: bytes) -> None:
        """Write a file of its own."""
        with path.open("wb") as file:
            file.write(data)
            self.flush(file)
        self.folder(path.parent)

    def copy(self, source: Path, path: Path) -> None:
        """Copy a file's bytes and mode, whatever its size."""
        with source.open("rb") as original, path.open("wb") as file:
            shutil.copyfileobj(original, file, PIECE)
            self.flush(file)
        shutil.copymode(source, path)
        self.folder(path.parent)

    def flush(self, file: BinaryIO) -> None:
        file.flush()
        if self.sync:
            os.fsync(file.fileno())

    def folder(self, path: Path) -> None:
        """Make renames and new names in a folder last."""
        if not self.sync:
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
