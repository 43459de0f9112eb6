"""Several writes to a file in one compiled call: a thread gives up the interpreter once, not once per write."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halfbyte.backends.cpu.library import choose_isa, load_library, pointer
from halfbyte.backends.sha256 import can_hash, sha256_pieces
from halfbyte.codec.bits import U8

DIGEST = 32
"""Bytes of a SHA-256."""


def write_parts(file: int, parts: Sequence[tuple[U8, int]]) -> None:
    """Write contiguous bytes at their positions in an open file, one after the other. Raises OSError."""
    library = load_library()
    if library is None or sys.platform == "win32":
        for data, offset in parts:
            write_all(file, data.data, offset)
        return
    count = len(parts)
    failed = library.hb_write_parts(
        file,
        count,
        (ctypes.c_void_p * count)(*(pointer(data).value for data, _ in parts)),
        (ctypes.c_int64 * count)(*(data.nbytes for data, _ in parts)),
        (ctypes.c_int64 * count)(*(offset for _, offset in parts)),
    )
    if failed:
        raise OSError(failed, os.strerror(failed))


@dataclass(frozen=True)
class BytesToHash:
    """Contiguous bytes to write at a position of a file, and which of them to hash."""

    data: U8
    offset: int
    skip: int
    """Bytes before the first whole leaf."""
    leaves: int


def write_hashed(file: int, parts: Sequence[BytesToHash], leaf: int) -> list[U8]:
    """Write like `write_parts`; for each part the SHA-256 of its whole leaves, (leaves, 32). Raises OSError.

    Compiled, a piece is hashed and written while it is in the cache.
    """
    library = load_library()
    if library is None or sys.platform == "win32" or not can_hash():
        write_parts(file, [(part.data, part.offset) for part in parts])
        return sha256_pieces([part.data[part.skip : part.skip + part.leaves * leaf] for part in parts], leaf)
    digests: list[U8] = [np.empty((part.leaves, DIGEST), np.uint8) for part in parts]
    count = len(parts)
    numbers = ctypes.c_int64 * count
    addresses = ctypes.c_void_p * count
    failed = library.hb_write_hashed(
        choose_isa(library),
        file,
        count,
        addresses(*(pointer(part.data).value for part in parts)),
        numbers(*(part.data.nbytes for part in parts)),
        numbers(*(part.offset for part in parts)),
        numbers(*(part.skip for part in parts)),
        numbers(*(part.leaves for part in parts)),
        ctypes.c_int64(leaf),
        addresses(*(pointer(found).value for found in digests)),
    )
    if failed:
        raise OSError(failed, os.strerror(failed))
    return digests


def write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of the data at a position, in as many steps as the system takes."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        got = os.pwrite(file, view[done:], offset + done)
        if got == 0:  # no error, and no room: it would be so for ever
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += got
