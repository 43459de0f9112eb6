"""One output file while it is written. Threads write at any position, in any order."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.encoding import EncodingResult, EncodingTarget, Ended
from halfbyte.backends.writing import write_hashed
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.hashes import LEAF, TreeHash
from halfbyte.checkpoint.execute.journal import Finished
from halfbyte.checkpoint.plan.types import Output, Shard
from halfbyte.errors import CheckpointError


class Stopped(Exception):
    """Raised in a thread to end it, because another one failed or the user stopped the run."""


class ShardWriter:
    """A shard under its temporary name. It is complete when all tasks that write to it are done."""

    def __init__(self, shard: Shard, folder: Path, stop: threading.Event, disk: Disk, tag: str = "") -> None:
        """tag: what its names in the folder end with, if other processes may write the same shard there."""
        self.shard, self.disk = shard, disk
        self.temporary = folder / f"{shard.name}{tag}.part"
        self.final = folder / f"{shard.name}{tag}"
        self.stop = stop
        self._spoiled = threading.Event()
        self._hashes: dict[str, TreeHash] = {}
        self._changed: dict[str, int] = {}
        self._scalars: list[tuple[Output, npt.NDArray[Any], int]] = []
        self._lock = threading.Lock()
        self._descriptor = disk.create(self.temporary)
        try:
            disk.resize(self._descriptor, shard.size)
            disk.write_at(self._descriptor, shard.header, 0)
        except OSError as error:
            disk.close(self._descriptor)
            raise disk_error(error, self.temporary) from error
        except BaseException:
            disk.close(self._descriptor)
            raise

    def put(self, output: Output, data: npt.NDArray[Any], at: int = 0) -> None:
        """Write contiguous bytes at a position within a tensor. Each byte of a tensor is written once."""
        self.put_all([(output, data, at)])

    def put_all(self, parts: Sequence[tuple[Output, npt.NDArray[Any], int]]) -> None:
        """Likewise for several tensors: (output, data, position)."""
        if self.spoiled:
            return
        flat = [(output, data.reshape(-1).view(np.uint8), at) for output, data, at in parts]
        places = [self._place(output, at, data.size) for output, data, at in flat]
        hashes = [self._hash(output) for output, data, at in flat]
        hashable = [
            tree.hashable(at, data, place) for tree, (_, data, at), (place, _) in zip(hashes, flat, places, strict=True)
        ]
        try:
            digests = self.disk.write_places(self._descriptor, places, lambda file: write_hashed(file, hashable, LEAF))
        except OSError as error:
            raise disk_error(error, self.temporary) from error
        for tree, (_, data, at), found in zip(hashes, flat, digests, strict=True):
            tree.put(at, data, found)

    def put_scalar(self, output: Output, data: npt.NDArray[Any]) -> None:
        """Write the few bytes of a whole tensor when the shard is complete, together with all others."""
        with self._lock:
            self._scalars.append((output, data, 0))

    def takes_encoded(self, parts: Sequence[tuple[Output, int, int]]) -> bool:
        """Whether `put_encoded` can be used for (output, position, size): they must be cut where leaves end."""
        return all(self._hash(output).fits(at, size) for output, at, size in parts)

    def put_encoded(
        self,
        codes: tuple[Output, int, int],
        scales: tuple[Output, int, int],
        encode: Callable[[int, EncodingTarget, EncodingTarget], EncodingResult],
    ) -> EncodingResult:
        """Let `encode` write codes and scale bytes, of which it gives the hashes.

        Each is (output, position, size). If it does not come to the end, nothing counts as written.
        """
        places = [self._place(*part) for part in (codes, scales)]
        targets = [EncodingTarget(*place) for place in places]

        def write(file: int) -> EncodingResult:
            encoded = encode(file, *targets)
            if encoded.ended == Ended.NOT_WRITTEN:
                raise OSError(encoded.error, os.strerror(encoded.error))
            return encoded

        try:
            encoded = self.disk.write_places(self._descriptor, places, write)
        except OSError as error:
            raise disk_error(error, self.temporary) from error
        if encoded.ended == Ended.ENCODED:
            for (output, at, size), hashed in ((codes, encoded.codes), (scales, encoded.scales)):
                self._hash(output).put_hashed(at, size, hashed)
        return encoded

    def _place(self, output: Output, at: int, size: int) -> tuple[int, int]:
        """Where bytes of a tensor lie in the file, and how many they are."""
        if at < 0 or at + size > output.bytes:
            raise CheckpointError(f"{output.part.name}: {size} bytes at {at} leave the tensor's {output.bytes}")
        return output.start + at, size

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

    def _hash(self, output: Output) -> TreeHash:
        with self._lock:
            found = self._hashes.get(output.part.name)
            if found is None:
                found = self._hashes[output.part.name] = TreeHash(output.bytes)
            return found

    def finish(self, fingerprint: str) -> Finished:
        """Flush the file and give it its name in the work folder."""
        try:
            self.put_all(self._scalars)
            self.disk.flush(self._descriptor)
        except OSError as error:
            raise disk_error(error, self.temporary) from error
        finally:
            self.disk.close(self._descriptor)
        tensors = {output.part.name: self._text(output) for output in self.shard.outputs}
        self.disk.rename(self.temporary, self.final)
        return Finished(self.shard.name, self.shard.size, tensors, dict(sorted(self._changed.items())), fingerprint)

    def _text(self, output: Output) -> str:
        found = self._hash(output)
        if found.done != output.bytes:
            raise CheckpointError(f"{output.part.name} was planned with {output.bytes} bytes, and {found.done} written")
        return found.text()

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
