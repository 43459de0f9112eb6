"""Bytes against the hashes that `halfbyte convert` left in its manifest: damage since, without the source at hand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from halfbyte.checkpoint.execute.hashes import hash_named
from halfbyte.checkpoint.execute.manifest import read_manifest
from halfbyte.checkpoint.io.index import MANIFEST, Checkpoint, Tensor
from halfbyte.verify.parallel import InOrder, in_order
from halfbyte.verify.problems import Problem
from halfbyte.verify.values import pieces


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
        digest, at = kind(tensor.info.bytes), 0
        for piece in pieces(path, tensor):
            flat = piece.reshape(-1).view(np.uint8)
            digest.add(at, flat)
            at += flat.size
        return tensor.name, digest.text()

    found = dict(each(text_of, present))
    for name, wanted in recorded.items():
        if name in found and found[name] != wanted:
            text = f"its bytes are not those that were written: SHA-256 {found[name][:8]}…, not {wanted[:8]}…"
            yield Problem("error", "manifest", name, text)
