"""Every operation of a conversion that changes a disk.

Nothing else in this package creates, writes, renames or removes a file, but for empty files to lock (locks.py). Tests
put another `Disk` in place of this one, which records the operations, stops at one of them, or replays them on a disk
that loses what was not flushed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

from halfbyte.backends.writing import write_all
from halfbyte.errors import CheckpointError

Made = TypeVar("Made")
Place = tuple[int, int]
"""The position of some bytes in a file, and how many they are."""

PIECE = 1 << 20
"""Bytes of a side file per copy step."""


class Disk:
    """Single operations, each safe to use from several threads, and what is made of them.

    What was flushed survives a power cut: a file's bytes with `flush`, names in a folder with `flush_folder`. Without
    `sync` nothing is flushed, and only a crash of the process is survived.
    """

    def __init__(self, sync: bool = True) -> None:
        self.sync = sync

    # Files, by descriptor

    def create(self, path: Path) -> int:
        """A new empty file, or an old one emptied, open for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def reopen(self, path: Path) -> int:
        """A file that is there, open for writing."""
        return os.open(path, os.O_WRONLY)

    def write_at(self, file: int, data: bytes | memoryview, offset: int) -> None:
        """Write all of the data at a position."""
        write_all(file, data, offset)

    def write_places(self, file: int, places: Sequence[Place], write: Callable[[int], Made]) -> Made:
        """Let `write` fill places of a file, whose descriptor it gets. It may do so in any order, or leave them."""
        return write(file)

    def resize(self, file: int, size: int) -> None:
        """Cut a file, or extend it with zeros that take no room yet."""
        os.ftruncate(file, size)

    def set_mode(self, file: int, mode: int) -> None:
        os.fchmod(file, mode)

    def flush(self, file: int) -> None:
        """Bring a file's bytes, size and mode to the disk. Its name is not part of that."""
        if self.sync:
            os.fsync(file)

    def close(self, file: int) -> None:
        """Give up a descriptor. Changes nothing on the disk."""
        os.close(file)

    # Names

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name in one step; a file that has this name is replaced."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def flush_folder(self, path: Path) -> None:
        """Bring to the disk which names a folder holds, and what they stand for."""
        if not self.sync:
            return
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    # Made of the operations above

    def write(self, path: Path, data: bytes, through: Path) -> None:
        """A whole file, on the disk when this returns. It is written under the name `through`, then renamed."""
        file = self.create(through)
        try:
            self.write_at(file, data, 0)
            self.flush(file)
        finally:
            self.close(file)
        self.rename(through, path)
        self.flush_folder(path.parent)

    def copy(self, source: Path, path: Path, through: Path) -> None:
        """Likewise a copy of a file's bytes and mode, whatever its size. Raises if the file changes meanwhile."""
        with _reading(source):
            opened = source.open("rb")
        with opened as original:
            before = os.fstat(original.fileno())
            file = self.create(through)
            try:
                done = 0
                while piece := _next_piece(original, source):
                    self.write_at(file, piece, done)
                    done += len(piece)
                after = os.fstat(original.fileno())
                if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                    raise CheckpointError(f"{source} changed while it was copied; run the same command again")
                self.set_mode(file, before.st_mode & 0o7777)
                self.flush(file)
            finally:
                self.close(file)
        self.rename(through, path)
        self.flush_folder(path.parent)

    def make_folders(self, path: Path) -> None:
        """A folder and those above it, as far as they are missing. On the disk when this returns."""
        if path.is_dir():
            return
        if not os.path.lexists(path.parent):
            self.make_folders(path.parent)
        try:
            self.make_folder(path)
        except FileExistsError:  # another process was quicker, or it is a file
            if not path.is_dir():
                raise
        self.flush_folder(path.parent)

    def remove_tree(self, path: Path) -> None:
        """A folder with all it holds."""
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                self.remove_tree(entry)
            else:
                self.remove(entry)
        self.remove_folder(path)


def _next_piece(original: BinaryIO, source: Path) -> bytes:
    with _reading(source):
        return original.read(PIECE)


@contextmanager
def _reading(source: Path) -> Iterator[None]:
    """What fails in here is the source's fault, and not that of the disk that is written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error.strerror or error}") from error
