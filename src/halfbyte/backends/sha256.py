"""SHA-256 of many pieces of equal length, by the compiled kernel if it is installed and this machine can run it."""

from __future__ import annotations

import ctypes
import hashlib

import numpy as np

from halfbyte.backends.cpu.library import load_library, pointer
from halfbyte.codec.bits import U8


def sha256_pieces(data: U8, bytes_each: int) -> U8:
    """The digests, (pieces, 32), of contiguous bytes cut into pieces; the last one may be shorter."""
    whole = data.size // bytes_each
    digests = np.empty((-(-data.size // bytes_each), 32), np.uint8)
    library = load_library()
    done = 0
    if library is not None and library.hb_sha256_pieces(
        pointer(data), ctypes.c_int64(whole), ctypes.c_int64(bytes_each), pointer(digests)
    ):
        done = whole
    for piece in range(done, len(digests)):
        part = data[piece * bytes_each : (piece + 1) * bytes_each]
        digests[piece] = np.frombuffer(hashlib.sha256(part.data).digest(), np.uint8)
    return digests
