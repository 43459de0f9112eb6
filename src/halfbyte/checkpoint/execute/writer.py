"""One output file while it is written. Threads write at any position; hashes are updated in the order of the bytes."""

from __future__ import annotations

import errno
import hashlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.journal import Finished
from halfbyte.checkpoint.execute.manifest import DIGITS
from halfbyte.checkpoint.plan.types import Output, Shard
from halfbyte.errors import CheckpointError


class Stopped(Exception):
    """Raised in a thread to end it, because another one failed or the user stopped the run."""


class Digest:
    """A hash of pieces that arrive from several threads. Each piece waits until the pieces before it are hashed."""

    def __init__(self, stop: threading.Event, spoiled: threading.Event) -> None:
        self._hash = hashlib.sha256()
        self._next = 0
        self.bytes = 0
        """Bytes hashed so far."""
        self._turn = threading.Condition()
        self._stop, self._spoiled = stop, spoiled

    def update(self, number: int, data: npt.NDArray[Any]) -> None:
        """Add piece `number`, counted from 0. Pieces are handed out in order, so the wait is short and ends."""
        with self._turn:
            while self._next != number:
                if self._stop.is_set():
                    raise Stopped
                if self._spoiled.is_set():  # an earlier piece may never come
                    return
                self._turn.wait(0.2)
        self._hash.update(data.data)
        with self._turn:
            self.bytes += data.nbytes
            self._next += 1
            self._turn.notify_all()

    def text(self) -> str:
        return self._hash.hexdigest()[:DIGITS]


class ShardWriter:
    """A shard under its temporary name. It is complete when all tasks that write to it are done."""

    def __init__(self, shard: Shard, folder: Path, stop: threading.Event, disk: Disk) -> None:
        self.shard, self.disk = shard, disk
        self.temporary = folder / f"{shard.name}.part"
        self.final = folder / shard.name
        self.pending = 0
        """Tasks that have not finished; the run counts them under its own lock."""
        self.stop = stop
        self._spoiled = threading.Event()
        self._digests: dict[str, Digest] = {}
        self._changed: dict[str, int] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._descriptor = disk.create(self.temporary)
        try:
            disk.resize(self._descriptor, shard.size)
            self._write(shard.header, 0)
        except BaseException:
            disk.close(self._descriptor)
            raise

    def put(self, output: Output, data: npt.NDArray[Any], at: int = 0, piece: int = 0) -> None:
        """Write contiguous bytes at a position within a tensor, as piece `piece`, which fixes the order of the hash."""
        if self.spoiled:
            return
        flat = data.reshape(-1).view(np.uint8)
        if at < 0 or at + flat.size > output.bytes:
            raise CheckpointError(f"{output.part.name}: {flat.size} bytes at {at} leave the tensor's {output.bytes}")
        self._digest(output.part.name).update(piece, flat)
        self._write(flat.data, output.start + at)

    def spoil(self) -> None:
        """Give the shard up: a module of it cannot be written. What else it should hold is no longer written."""
        self._spoiled.set()

    @property
    def spoiled(self) -> bool:
        return self._spoiled.is_set()

    def count(self, module: str, blocks: int) -> None:
        """Add to the blocks of a module of which a cast changed some value."""
        if blocks:
            with self._lock:
                self._changed[module] = self._changed.get(module, 0) + blocks

    def _digest(self, name: str) -> Digest:
        with self._lock:
            if name not in self._digests:
                self._digests[name] = Digest(self.stop, self._spoiled)
            return self._digests[name]

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        try:
            # One write at a time: the kernel serialises writes to a file anyway, and waiting threads would spin.
            with self._writing:
                self.disk.write_at(self._descriptor, data, offset)
        except OSError as error:
            raise disk_error(error, self.temporary) from error

    def finish(self, fingerprint: str) -> Finished:
        """Flush the file and give it its name in the work folder."""
        try:
            self.disk.flush(self._descriptor)
        except OSError as error:
            raise disk_error(error, self.temporary) from error
        finally:
            self.disk.close(self._descriptor)
        tensors = {output.part.name: self._text(output) for output in self.shard.outputs}
        self.disk.rename(self.temporary, self.final)
        return Finished(self.shard.name, self.shard.size, tensors, dict(sorted(self._changed.items())), fingerprint)

    def _text(self, output: Output) -> str:
        digest = self._digest(output.part.name)
        if digest.bytes != output.bytes:
            raise CheckpointError(
                f"{output.part.name} was planned with {output.bytes} bytes, and {digest.bytes} written"
            )
        return digest.text()

    def abandon(self) -> None:
        """Close without finishing; the temporary file is written anew by the next run."""
        self.disk.close(self._descriptor)

    def discard(self) -> None:
        """Close and remove the temporary file."""
        self.abandon()
        self.disk.remove(self.temporary)


def disk_error(error: OSError, path: Path) -> CheckpointError:
    """What to say when writing fails."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CheckpointError(
            f"no space left for {path}: {error.strerror}. Finished shards are kept; make room and run the same command "
            "again"
        )
    return CheckpointError(f"{path} cannot be written: {error.strerror or error}")
