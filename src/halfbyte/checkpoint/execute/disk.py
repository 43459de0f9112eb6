"""Durable writes: files are flushed to the disk, and so are the folders that name them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

PIECE = 1 << 20
"""Bytes of a side file per copy step."""


class Disk:
    """Writes that the next step can rely on. Without `sync` they survive a crash of the process, not a power cut."""

    def __init__(self, sync: bool = True) -> None:
        self.sync = sync

    def write(self, path: Path, data: bytes) -> None:
        """Write a whole file."""
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
        """Flush renames and new names in a folder."""
        if not self.sync:
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
