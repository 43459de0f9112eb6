"""SHA-256 of pieces, compiled or not, is that of hashlib."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from halfbyte.backends import sha256


@pytest.mark.parametrize("isa", ["the widest", "portable", "not compiled"])
@pytest.mark.parametrize("length", [64, 128, 16384])
def test_digests_are_those_of_hashlib(isa: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa == "not compiled":
        monkeypatch.setattr(sha256, "load_library", lambda: None)
    elif isa == "portable":
        monkeypatch.setenv("HALFBYTE_ISA", isa)
    generator = np.random.default_rng(0)
    for size in (0, 1, length - 1, *(count * length for count in (1, 2, 3, 15, 16, 17, 35)), 18 * length + 5):
        data = generator.integers(0, 256, size, dtype=np.uint8)
        found, other = sha256.sha256_pieces([data, data[:length]], length)
        pieces = [data[at : at + length] for at in range(0, size, length)]
        assert [bytes(digest) for digest in found] == [hashlib.sha256(piece.tobytes()).digest() for piece in pieces]
        assert other.tobytes() == b"".join(hashlib.sha256(piece.tobytes()).digest() for piece in pieces[:1])
