"""The hash of a tensor's bytes: a tree with leaves of fixed size, so that several threads can work on one tensor.

The leaves are the SHA-256 digests of every 16 KiB of the tensor (the last one of what is left), and the hash is the
SHA-256 of all leaves in order, cut to 32 hex digits. It does not depend on how the bytes were cut into pieces, nor on
the order in which the pieces came.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from halfbyte.backends.encoding import Hashed
from halfbyte.backends.sha256 import sha256_pieces
from halfbyte.backends.writing import BytesToHash
from halfbyte.codec.bits import U8

DIGITS = 32
"""Hex digits of a SHA-256 that are kept."""
LEAF = 1 << 14
"""Bytes of a leaf."""
HELD_BYTES = 2047
"""hashlib gives up the interpreter for more bytes than this. To get it back takes longer than to hash them."""
DIGEST = 32
"""Bytes of a SHA-256."""

PLAIN = f"sha256, first {DIGITS} hex digits, of each tensor's bytes"
"""What manifests called the hash before there was a tree. They are still verified."""
TREE = f"sha256, first {DIGITS} hex digits, of the sha256 of every {LEAF} bytes of each tensor"


class TreeHash:
    """The hash of `size` bytes that arrive in any order, from any thread; each byte once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.done = 0
        """Bytes that have arrived."""
        self._leaves = np.zeros((-(-size // LEAF), DIGEST), np.uint8)
        self._begun: dict[int, tuple[bytearray, int]] = {}
        """Leaf → its bytes and how many have arrived, for leaves of which pieces hold only a part."""
        self._text: str | None = None
        self._lock = threading.Lock()

    def add(self, at: int, data: U8) -> None:
        """Take in contiguous bytes that begin at byte `at` of the tensor."""
        part = self.hashable(at, data, 0)
        digests = sha256_pieces([data[part.skip : part.skip + part.leaves * LEAF]], LEAF)[0]
        self.put(at, data, digests)

    def hashable(self, at: int, data: U8, offset: int) -> BytesToHash:
        """Those bytes as something to write at a position of a file, with the leaves that lie wholly in them."""
        first, stop = -(-at // LEAF), (at + data.size) // LEAF
        return BytesToHash(data, offset, min(first * LEAF - at, data.size), max(0, stop - first))

    def fits(self, at: int, size: int) -> bool:
        """Whether a range of bytes begins with a leaf, and ends with one or with the tensor."""
        return at % LEAF == 0 and (size % LEAF == 0 or at + size == self.size)

    def put(self, at: int, data: U8, digests: U8) -> None:
        """Take in bytes of which the digests of all whole leaves are given, as `hashable` counts them."""
        first = -(-at // LEAF)
        self._leaves[first : first + len(digests)] = digests
        begin, end = first * LEAF - at, (first + len(digests)) * LEAF - at
        self._add_part(at, data[:begin])
        self._add_part(at + end, data[end:])
        self._count(data.size)

    def put_hashed(self, at: int, size: int, hashed: Hashed) -> None:
        """Likewise bytes that begin with a leaf, of which nobody has more than the tail."""
        first = at // LEAF
        self._leaves[first : first + len(hashed.digests)] = hashed.digests
        self._add_part(at + size - hashed.tail.size, hashed.tail)
        self._count(size)

    def _count(self, size: int) -> None:
        with self._lock:
            self.done += size
            if self.done == self.size:
                self._finish()

    def _add_part(self, at: int, data: U8) -> None:
        """Bytes of one leaf, of which other pieces may have a part."""
        if not data.size:
            return
        leaf, skip = divmod(at, LEAF)
        length = min(LEAF, self.size - leaf * LEAF)
        with self._lock:
            room, filled = self._begun.pop(leaf) if leaf in self._begun else (bytearray(length), 0)
            room[skip : skip + data.size] = data.data
            if filled + data.size < length:
                self._begun[leaf] = room, filled + data.size
            else:
                self._leaves[leaf] = np.frombuffer(hashlib.sha256(room).digest(), np.uint8)

    def _finish(self) -> None:
        """Keep the hash alone: a shard has many tensors, and the leaves of all of them would take much memory."""
        root, leaves = hashlib.sha256(), self._leaves.reshape(-1).data
        for start in range(0, len(leaves), HELD_BYTES):
            root.update(leaves[start : start + HELD_BYTES])
        self._text = root.hexdigest()[:DIGITS]
        self._leaves = self._leaves[:0].copy()  # a view would hold all of them

    def text(self) -> str:
        """The hash, once every byte has arrived."""
        if self._text is None:
            self._finish()
        return str(self._text)


class PlainHash:
    """The hash of manifests before the tree. The bytes must come in order."""

    def __init__(self, size: int) -> None:
        self._hash = hashlib.sha256()

    def add(self, at: int, data: U8) -> None:
        self._hash.update(data.data)

    def text(self) -> str:
        return self._hash.hexdigest()[:DIGITS]


def hash_named(manifest: Mapping[str, Any]) -> type[TreeHash] | type[PlainHash] | None:
    """The hash that a manifest uses; None for one that this version does not know."""
    known: dict[str, type[TreeHash] | type[PlainHash]] = {TREE: TreeHash, PLAIN: PlainHash}
    return known.get(str(manifest.get("hash", PLAIN)))
