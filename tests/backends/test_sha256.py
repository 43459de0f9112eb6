"""SHA-256 of pieces, compiled or not, is that of hashlib."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from halfbyte.backends import sha256


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("length", [64, 128, 16384])
def test_digests_are_those_of_hashlib(compiled: bool, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(sha256, "load_library", lambda: None)
    generator = np.random.default_rng(0)
    for size in (0, 1, length - 1, *(count * length for count in (1, 2, 3, 15, 16, 17, 35)), 18 * length + 5):
        data = generator.integers(0, 256, size, dtype=np.uint8)
        found = sha256.sha256_pieces(data, length)
        pieces = [data[at : at + length] for at in range(0, size, length)]
        assert [bytes(digest) for digest in found] == [hashlib.sha256(piece).digest() for piece in pieces]
