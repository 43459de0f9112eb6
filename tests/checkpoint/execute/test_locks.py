"""Locks on files: taken once, given up, and refused by file systems that have none."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

import pytest

from halfbyte.checkpoint.execute.locks import FileLock, is_locked
from halfbyte.errors import CheckpointError


def test_a_lock_is_held_until_it_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    assert not path.exists()
    with FileLock(path):
        assert is_locked(path)
        assert not FileLock(path).take()
        with pytest.raises(CheckpointError, match=rf"^{path} is locked by another process$"), FileLock(path):
            pass
    assert not is_locked(path)
    assert path.exists()
    lock = FileLock(path)
    lock.release()
    assert lock.take()
    lock.release()
    lock.release()
    assert not is_locked(path)


def test_how_long_a_lock_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every twentieth of a second, until the time is over; then once more is not tried."""
    now = [100.0]
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    with FileLock(tmp_path / "lock"):
        assert not FileLock(tmp_path / "lock").take(0.26)
        assert pauses == [0.05] * 6
        assert not FileLock(tmp_path / "lock").take()
        assert len(pauses) == 6
    assert FileLock(tmp_path / "lock").take(0.26)
    assert len(pauses) == 6


@pytest.mark.parametrize(("number", "busy"), [(errno.EACCES, True), (errno.EAGAIN, True), (errno.ENOLCK, False)])
def test_what_a_file_system_may_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, busy: bool) -> None:
    opened: list[int] = []
    real = os.open

    def refuse(descriptor: int, kind: int) -> None:
        assert kind == fcntl.LOCK_EX | fcntl.LOCK_NB
        raise OSError(number, "no")

    def note(*arguments: object) -> int:
        opened.append(real(*arguments))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(os, "open", note)
    if busy:
        assert not FileLock(tmp_path / "lock").take()
    else:
        with pytest.raises(CheckpointError) as caught:
            FileLock(tmp_path / "lock").take()
        assert str(caught.value) == (
            f"{tmp_path}/lock cannot be locked: no; give a directory on a file system that has locks (Lustre: mounted "
            "with -o flock)"
        )
    (descriptor,) = opened
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
