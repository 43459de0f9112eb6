"""Several writes in one call write what single ones do, and say what went wrong."""

from __future__ import annotations

import errno
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
