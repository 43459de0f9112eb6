"""A matrix, from memory or a file, to codes and scale bytes in another file: quantized, hashed and written in one call.

The compiled function works in pieces that stay in the cache, and the calling thread needs no interpreter meanwhile.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends import Cpu, choose_backend
from halfbyte.backends.cpu.library import choose_isa, load_library, pointer
from halfbyte.backends.cpu.structs import Encoding
from halfbyte.backends.cpu.whole import WholeCall
from halfbyte.backends.sha256 import can_hash
from halfbyte.codec.bits import U8
from halfbyte.request import Request

DIGEST = 32
"""Bytes of a SHA-256."""


class Ended(IntEnum):
    """How a call ended, by its number in native/codes/encoding.cpp."""

    ENCODED = 0
    LEFT_TO_REFERENCE = 1
    """The matrix holds something that only the reference describes. What was written is not valid."""
    NOT_READ = 2
    NOT_WRITTEN = 3


@dataclass(frozen=True)
class EncodingSource:
    """A contiguous matrix of whole blocks: in memory, or in an open file."""

    bytes: int
    memory: npt.NDArray[Any] | None = None
    file: int = -1
    offset: int = 0


@dataclass(frozen=True)
class EncodingTarget:
    """Where one output goes."""

    place: int
    """The first byte, in the file."""
    bytes: int


@dataclass(frozen=True)
class Hashed:
    """What was written of an output: the digests of its whole leaves, and the bytes after them."""

    digests: U8
    tail: U8


@dataclass(frozen=True)
class EncodingResult:
    """What a call did."""

    ended: Ended
    done: int
    """Bytes of the source that were read."""
    error: int
    """The system's number for an error of reading or writing, or 0."""
    codes: Hashed
    scales: Hashed


class Encoder:
    """Encodes matrices under one request."""

    def __init__(self, call: WholeCall, leaf: int) -> None:
        """leaf: bytes of which a digest is made. The outputs of a call begin with a leaf."""
        self._call, self.leaf = call, leaf
        self._library = call.library
        self.room = int(self._library.hb_encoding_room(ctypes.c_void_p(call.address), ctypes.c_int64(leaf)))
        """Bytes of scratch memory that a call takes."""

    def width(self, role: str, columns: int) -> int:
        """Bytes of codes, or of scales, per row."""
        return columns // (self._call.codes_per_byte if role == "codes" else self._call.block)

    def encode(
        self,
        rows: EncodingSource,
        amax: float | None,
        file: int,
        codes: EncodingTarget,
        scales: EncodingTarget,
        scratch: U8,
    ) -> EncodingResult:
        """Encode into an open file. amax: of all that share the tensor scale; None: the format has none.

        Without an amax, a matrix with NaN or Inf is left to the reference.
        """
        digests = [np.empty((part.bytes // self.leaf, DIGEST), np.uint8) for part in (codes, scales)]
        call = Encoding(
            recipe=self._call.address, held=None if rows.memory is None else pointer(rows.memory).value,
            offset=rows.offset, bytes=rows.bytes, source=rows.file, target=file, codes_at=codes.place,
            scales_at=scales.place, leaf=self.leaf, code_digests=pointer(digests[0]).value,
            scale_digests=pointer(digests[1]).value, scratch=pointer(scratch).value,
            amax=-1.0 if amax is None else amax, isa=choose_isa(self._library),
        )  # fmt: skip
        ended = Ended(self._library.hb_encode(ctypes.byref(call)))
        tails = [scratch[:0], scratch[:0]]
        if ended == Ended.ENCODED:
            base = pointer(scratch).value or 0
            starts = [tail - base for tail in call.tails]
            sizes = [part.bytes % self.leaf for part in (codes, scales)]
            tails = [scratch[at : at + size] for at, size in zip(starts, sizes, strict=True)]
        parts = [Hashed(each, tail) for each, tail in zip(digests, tails, strict=True)]
        return EncodingResult(ended, call.done, call.error, *parts)


def encoder_of(request: Request, leaf: int) -> Encoder | None:
    """The encoder of a request; None if there is none, or if this machine hashes without the library."""
    if sys.platform == "win32" or load_library() is None or not can_hash():
        return None
    backend = choose_backend("auto", request)
    call = backend.whole_call(request) if isinstance(backend, Cpu) else None
    return None if call is None else Encoder(call, leaf)
