"""Several writes in one call write what single ones do, and say what went wrong."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from halfbyte.backends import writing


@pytest.mark.parametrize("compiled", [True, False])
def test_parts_land_at_their_positions(tmp_path: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(writing, "load_library", lambda: None)
    data = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 100_010)
    parts = [(data[70_000:], 70_005), (data[:0], 3), (data[:1], 5), (data[1:70_000], 6)]
    writing.write_parts(file, parts)
    os.close(file)
    assert (tmp_path / "file").read_bytes() == bytes(5) + data.tobytes() + bytes(5)


@pytest.mark.parametrize("compiled", [True, False])
def test_what_the_system_says(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(writing, "load_library", lambda: None)
    file = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
            writing.write_parts(file, [(np.zeros(10, np.uint8), 0)])
    finally:
        os.close(file)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_hashed_is_written(tmp_path: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(writing, "load_library", lambda: None)
    data, leaf = np.random.default_rng(0).integers(0, 256, 40 * 1024, dtype=np.uint8), 1024
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    cuts = [
        (data[:7], 0, 7, 0),
        (data[7 : 30 * leaf + 9], 7, leaf - 7, 29),
        (data[30 * leaf + 9 :], 30 * leaf + 9, 3, 9),
    ]
    parts = [writing.BytesToHash(*cut) for cut in reversed(cuts)]
    digests = writing.write_hashed(file, parts, leaf)
    os.close(file)
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    for part, found in zip(parts, digests, strict=True):
        leaves = (part.data[part.skip + at * leaf :][:leaf].tobytes() for at in range(part.leaves))
        assert found.tobytes() == b"".join(hashlib.sha256(each).digest() for each in leaves)


@pytest.mark.parametrize("compiled", [True, False])
def test_what_the_system_says_of_hashed_bytes(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(writing, "load_library", lambda: None)
    file = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            writing.write_hashed(file, [writing.BytesToHash(np.zeros(2048, np.uint8), 0, 0, 2)], 1024)
    finally:
        os.close(file)
