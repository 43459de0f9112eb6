"""SHA-256 of many pieces of equal length, by the compiled kernel if it is installed and this machine can run it."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence

import numpy as np

from halfbyte.backends.cpu.library import choose_isa, load_library, pointer
from halfbyte.codec.bits import U8


def can_hash() -> bool:
    """Whether the compiled kernel is installed and this machine can run it."""
    library = load_library()
    return library is not None and bool(library.hb_sha256_pieces(0, 0, None, None, ctypes.c_int64(64), None))


def sha256_pieces(arrays: Sequence[U8], bytes_each: int) -> list[U8]:
    """For each array of contiguous bytes the digests, (pieces, 32), of its pieces; the last one may be shorter."""
    digests: list[U8] = [np.empty((-(-data.size // bytes_each), 32), np.uint8) for data in arrays]
    whole = [data.size // bytes_each for data in arrays]
    library = load_library()
    count = len(arrays)
    compiled = library is not None and library.hb_sha256_pieces(
        choose_isa(library),
        count,
        (ctypes.c_void_p * count)(*(pointer(data).value for data in arrays)),
        (ctypes.c_int64 * count)(*whole),
        ctypes.c_int64(bytes_each),
        (ctypes.c_void_p * count)(*(pointer(found).value for found in digests)),
    )
    for data, found, done in zip(arrays, digests, whole, strict=True):
        for piece in range(done if compiled else 0, len(found)):
            part = data[piece * bytes_each : (piece + 1) * bytes_each]
            found[piece] = np.frombuffer(hashlib.sha256(part.data).digest(), np.uint8)
    return digests
