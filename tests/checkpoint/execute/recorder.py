"""A disk that records what a conversion does to it, in order, and can stop it at any operation as a kill would."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from halfbyte.checkpoint.execute.disk import Disk, Made, Place

Kind = Literal[
    "create", "reopen", "write", "resize", "set mode", "flush",
    "rename", "remove", "make folder", "remove folder", "flush folder",
]  # fmt: skip
Result = TypeVar("Result")


class Killed(BaseException):
    """Ends a run at the chosen operation. Nothing in the product catches it."""


@dataclass(frozen=True)
class Operation:
    """One operation. Paths are relative to the folder that the disk stands for."""

    kind: Kind
    path: str
    """Of a file: the name under which it was opened."""
    target: str = ""
    """Of a rename: the new name."""
    handle: int = -1
    """Of operations on a file: which opening of it, counted from 0."""
    offset: int = 0
    data: bytes = b""
    size: int = 0
    """Of a resize: the new size; of a change of mode: the mode."""


class Recorder(Disk):
    """Carries out each operation, but no flush, and writes it down. Safe to use from several threads.

    With `kill_at`, that many operations are carried out. The next one is not, or by half if it is a write; it raises
    `Killed`, and so does every later one of any thread: the disk stays as a killed process would leave it. With
    `kill_after`, the first operation that fits is the last one.
    """

    def __init__(
        self,
        root: Path,
        kill_at: int | None = None,
        kill_after: Callable[[Operation], bool] = lambda operation: False,
    ) -> None:
        super().__init__(sync=True)
        self.root, self.kill_at, self.kill_after = root, kill_at, kill_after
        self.operations: list[Operation] = []
        self.killed = False
        self._lock = threading.RLock()
        self._open: dict[int, tuple[str, int]] = {}
        """Descriptor → name and handle."""
        self._handles = 0

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.root))

    def _step(self, operation: Operation, act: Callable[[], Result], half: Callable[[], None] | None = None) -> Result:
        with self._lock:
            if not self.killed and len(self.operations) == self.kill_at:
                self.killed = True
                if half is not None:
                    half()
            if self.killed:
                self._die()
            result = act()
            self.operations.append(operation)
            self.killed = self.kill_after(operation)
            return result

    def _die(self) -> None:
        raise Killed

    def _opened(self, kind: Kind, path: Path, act: Callable[[], int]) -> int:
        with self._lock:
            file = self._step(Operation(kind, self._name(path), handle=self._handles), act)
            self._open[file] = self._name(path), self._handles
            self._handles += 1
            return file

    def create(self, path: Path) -> int:
        return self._opened("create", path, lambda: super(Recorder, self).create(path))

    def reopen(self, path: Path) -> int:
        return self._opened("reopen", path, lambda: super(Recorder, self).reopen(path))

    def write_at(self, file: int, data: bytes | memoryview, offset: int) -> None:
        path, handle = self._open[file]
        raw, write = bytes(data), super().write_at
        operation = Operation("write", path, handle=handle, offset=offset, data=raw)
        self._step(operation, lambda: write(file, raw, offset), lambda: write(file, raw[: len(raw) // 2], offset))

    def write_places(self, file: int, places: Sequence[Place], write: Callable[[int], Made]) -> Made:
        """What was written to a file in memory is written to the real one, a place at a time."""
        memory = os.memfd_create("written")
        try:
            made = write(memory)
            end = os.fstat(memory).st_size
            for offset, size in places:
                if offset + size <= end:
                    self.write_at(file, os.pread(memory, size, offset), offset)
            return made
        finally:
            os.close(memory)

    def resize(self, file: int, size: int) -> None:
        path, handle = self._open[file]
        resize = super().resize
        self._step(Operation("resize", path, handle=handle, size=size), lambda: resize(file, size))

    def set_mode(self, file: int, mode: int) -> None:
        path, handle = self._open[file]
        set_mode = super().set_mode
        self._step(Operation("set mode", path, handle=handle, size=mode), lambda: set_mode(file, mode))

    def flush(self, file: int) -> None:
        path, handle = self._open[file]
        self._step(Operation("flush", path, handle=handle), lambda: None)

    def close(self, file: int) -> None:
        with self._lock:
            self._open.pop(file)
        super().close(file)

    def rename(self, old: Path, new: Path) -> None:
        rename = super().rename
        self._step(Operation("rename", self._name(old), self._name(new)), lambda: rename(old, new))

    def remove(self, path: Path) -> None:
        remove = super().remove
        self._step(Operation("remove", self._name(path)), lambda: remove(path))

    def make_folder(self, path: Path) -> None:
        make_folder = super().make_folder
        self._step(Operation("make folder", self._name(path)), lambda: make_folder(path))

    def remove_folder(self, path: Path) -> None:
        remove_folder = super().remove_folder
        self._step(Operation("remove folder", self._name(path)), lambda: remove_folder(path))

    def flush_folder(self, path: Path) -> None:
        self._step(Operation("flush folder", self._name(path)), lambda: None)
