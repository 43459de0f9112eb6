"""Bytes against the hashes that `halfbyte convert` left in its manifest: damage since, without the source at hand."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from halfbyte.checkpoint.execute.hashes import hash_named
from halfbyte.checkpoint.execute.manifest import read_manifest
from halfbyte.checkpoint.io.files import read_all
from halfbyte.checkpoint.io.index import MANIFEST, Checkpoint, Tensor
from halfbyte.codec.bits import U8
from halfbyte.errors import CheckpointError
from halfbyte.verify.parallel import InOrder, in_order
from halfbyte.verify.problems import Problem

PART = 1 << 20
"""Bytes that are read and hashed at a time: they stay in the cache."""

_kept = threading.local()
"""The buffer of each thread: fresh memory takes longer than what is read into it."""


def recorded_problems(checkpoint: Checkpoint, headers_only: bool, each: InOrder = in_order) -> Iterator[Problem]:
    """Tensors that the manifest names and that are gone or changed, or that came later. Nothing without a manifest.

    headers_only: names alone, no hashes.
    """
    manifest = read_manifest(checkpoint.path)
    if manifest is None:
        return
    recorded: dict[str, str] = {}
    for name, shard in manifest["shards"].items():
        tensors = shard.get("tensors") if isinstance(shard, dict) else None
        if not isinstance(tensors, dict):
            yield Problem("error", "manifest", MANIFEST, f"says nothing of the tensors in {name}")
            continue
        recorded |= {str(tensor): str(digest) for tensor, digest in tensors.items()}
    for name in sorted(recorded.keys() - checkpoint.tensors.keys()):
        yield Problem("error", "manifest", name, f"named by {MANIFEST}, but not there")
    for name in sorted(checkpoint.tensors.keys() - recorded.keys()):
        yield Problem("error", "manifest", name, f"not named by {MANIFEST}: it was added after the conversion")
    if headers_only:
        return
    kind = hash_named(manifest)
    if kind is None:
        yield Problem("error", "manifest", MANIFEST, f"has hashes that this version cannot check: {manifest['hash']}")
        return
    present = [checkpoint.tensors[name] for name in recorded if name in checkpoint.tensors]
    present.sort(key=lambda tensor: -tensor.info.bytes)  # the largest first, so that threads end together

    path = checkpoint.path

    def text_of(tensor: Tensor) -> tuple[str, str]:
        digest = kind(tensor.info.bytes)
        for at, part in read_parts(path / tensor.file, tensor):
            digest.add(at, part)
        return tensor.name, digest.text()

    found = dict(each(text_of, present))
    for name, wanted in recorded.items():
        if name in found and found[name] != wanted:
            text = f"its bytes are not those that were written: SHA-256 {found[name][:8]}…, not {wanted[:8]}…"
            yield Problem("error", "manifest", name, text)


def read_parts(file: Path, tensor: Tensor) -> Iterator[tuple[int, U8]]:
    """A tensor's bytes in order, a part at a time, each with its position; a part is gone when the next one comes.

    They are read and not mapped: what a disk cannot read is an error then, and not the end of the process.
    """
    if not hasattr(_kept, "buffer"):
        _kept.buffer = np.empty(PART, np.uint8)
    at = 0
    try:
        opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while at < tensor.info.bytes:
                part: U8 = _kept.buffer[: tensor.info.bytes - at]
                if read_all(opened, tensor.info.start + at, part) < part.size:
                    raise CheckpointError(f"{file} was cut while it was checked: {tensor.name} ends behind its end")
                yield at, part
                at += part.size
        finally:
            os.close(opened)
    except OSError as error:
        place = tensor.info.start + at
        raise CheckpointError(f"{file} cannot be read after byte {place}: {error.strerror or error}") from error
