"""Reading from files: opened once, to the last byte, and an error that says where one ends."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from halfbyte.checkpoint.io import files as module
from halfbyte.checkpoint.io.files import Files, read_all
from halfbyte.errors import CheckpointError


def open_files(folder: Path, data: bytes) -> Files:
    (folder / "f").write_bytes(data)
    return Files({"f": str(folder / "f"), "gone": str(folder / "gone")})


def test_a_file_is_opened_once_and_closed(tmp_path: Path) -> None:
    files = open_files(tmp_path, bytes(range(100)))
    into = np.zeros(10, np.uint8)
    files.read("f", 90, into)
    assert into.tolist() == list(range(90, 100))
    (tmp_path / "f").unlink()
    files.read("f", 0, into)
    assert into.tolist() == list(range(10))
    (descriptor,) = files._descriptors.values()
    files.close()
    files.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    with pytest.raises(CheckpointError, match=r"gone cannot be read after byte 7: \[Errno 2\] No such file"):
        files.read("gone", 7, into)


@pytest.mark.parametrize(("offset", "at"), [(95, 100), (100, 100), (120, 120)])
def test_a_file_that_ends_early(tmp_path: Path, offset: int, at: int) -> None:
    files = open_files(tmp_path, bytes(100))
    with pytest.raises(CheckpointError) as caught:
        files.read("f", offset, np.zeros(6, np.uint8))
    assert str(caught.value) == f"f ended at byte {at}: it was cut since the plan was made"
    files.read("f", 100, np.zeros(0, np.uint8))
    files.close()


@pytest.mark.parametrize("by_kernel", [True, False])
def test_the_largest_magnitude_is_found_while_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_kernel: bool
) -> None:
    if not by_kernel:
        monkeypatch.setattr(module, "can_read", lambda: False)
    values = np.array([[1, -9, 2], [3, 0, -4]], np.float32)
    files = open_files(tmp_path, bytes(4) + values.tobytes())
    for rows, wanted in ((2, 9), (1, 4)):
        into = np.zeros((rows, 3), np.float32)
        amax = files.read_amax("f", 4 + 12 * (2 - rows), into)
        assert amax == wanted
        assert type(amax) is np.float32
        assert into.tolist() == values[2 - rows :].tolist()
    with pytest.raises(CheckpointError, match=r"^f ended at byte 28: it was cut since the plan was made$"):
        files.read_amax("f", 20, np.zeros(3, np.float32))
    files.close()


def test_a_reader_may_get_less_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems read at most some 2 GiB in one call."""
    (tmp_path / "f").write_bytes(bytes(range(100)))
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: whole(file, [into[0][:7]], at))
    into = np.zeros(20, np.uint8)
    descriptor = os.open(tmp_path / "f", os.O_RDONLY)
    assert read_all(descriptor, 50, into) == 20
    assert into.tolist() == list(range(50, 70))
    assert read_all(descriptor, 90, into) == 10
    assert into.tolist() == [*range(90, 100), *range(60, 70)]
    os.close(descriptor)
