"""One output file while it is written: what goes wrong is said, and nothing stays open."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.hashes import TreeHash
from halfbyte.checkpoint.execute.journal import Finished
from halfbyte.checkpoint.execute.writer import ShardWriter
from halfbyte.checkpoint.plan.types import Copy, Output, Shard
from halfbyte.errors import CheckpointError
from halfbyte.layouts.description import Part

HEADER = b"a header"
X = Output(Part("x", "U8", (5,), "values"), 8, 13)
Y = Output(Part("y", "U8", (3,), "values"), 13, 16)
SHARD = Shard("s.safetensors", HEADER, 16, (Copy("f", 0, X), Copy("f", 5, Y)), ())
FIVE, THREE = np.arange(5, dtype=np.uint8), np.arange(5, 8, dtype=np.uint8)


def writer(folder: Path, disk: Disk | None = None, tag: str = "") -> ShardWriter:
    return ShardWriter(SHARD, folder, threading.Event(), disk or Disk(sync=False), tag)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def hash_of(data: bytes) -> str:
    tree = TreeHash(len(data))
    tree.add(0, np.frombuffer(data, np.uint8))
    return tree.text()


@pytest.mark.parametrize("tag", ["", ".7"])
def test_a_shard_in_pieces(tmp_path: Path, tag: str) -> None:
    before = open_files()
    made = writer(tmp_path, tag=tag)
    made.put_scalar(Y, THREE)
    made.put(X, FIVE[3:], 3)
    assert (tmp_path / f"s.safetensors{tag}.part").read_bytes() == HEADER + bytes([0, 0, 0, 3, 4]) + bytes(3)
    made.put(X, FIVE[:3])
    made.count("m", 0)
    made.count("b", 2)
    made.count("a", 1)
    made.count("b", 3)
    found = made.finish("print")
    assert found == Finished(
        "s.safetensors", 16, {"x": hash_of(FIVE.tobytes()), "y": hash_of(THREE.tobytes())}, {"a": 1, "b": 5}, "print"
    )
    assert list(found.changed_blocks) == ["a", "b"]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        f"s.safetensors{tag}": HEADER + bytes(range(8))
    }
    assert open_files() == before


@pytest.mark.parametrize(("at", "size"), [(-1, 1), (5, 1), (3, 3), (0, 6)])
def test_bytes_that_leave_a_tensor(tmp_path: Path, at: int, size: int) -> None:
    made = writer(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        made.put(X, np.zeros(size, np.uint8), at)
    assert str(caught.value) == f"x: {size} bytes at {at} leave the tensor's 5"
    made.put(X, np.zeros(0, np.uint8), 5)
    made.abandon()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("operation", ["resize", "write_at", "write_places", "flush"])
def test_what_fails_leaves_nothing_open(tmp_path: Path, error: BaseException, operation: str) -> None:
    """Whether it is said by the system or by the user."""

    class Failing(Disk):
        pass

    def fail(self: Disk, *given: Any) -> None:
        raise error

    setattr(Failing, operation, fail)
    before = open_files()
    made: list[ShardWriter] = []

    def work() -> None:
        made.append(writer(tmp_path, Failing(sync=False)))
        made[0].put_scalar(Y, THREE)
        made[0].finish("print")

    if isinstance(error, OSError):
        part = tmp_path / "s.safetensors.part"
        words = "no space left for" if error.errno == errno.ENOSPC else f"{part} cannot be written: broken"
        with pytest.raises(CheckpointError, match=words):
            work()
    else:
        with pytest.raises(KeyboardInterrupt):
            work()
    assert open_files() == before
    assert not (tmp_path / "s.safetensors").exists()


def test_a_tensor_of_which_bytes_are_missing(tmp_path: Path) -> None:
    before = open_files()
    made = writer(tmp_path)
    made.put(X, FIVE[:4])
    made.put(Y, THREE)
    with pytest.raises(CheckpointError, match=r"^x was planned with 5 bytes, and 4 written$"):
        made.finish("print")
    assert (open_files(), (tmp_path / "s.safetensors").exists()) == (before, False)


def test_a_shard_that_is_given_up(tmp_path: Path) -> None:
    """Nothing more is written to it, and it goes; one that is left open stays for the next run to write anew."""
    before = open_files()
    made = writer(tmp_path)
    assert not made.spoiled
    made.spoil()
    made.put(X, FIVE)
    assert (made.spoiled, made.temporary.read_bytes()) == (True, HEADER + bytes(8))
    made.discard()
    assert (open_files(), list(tmp_path.iterdir())) == (before, [])
    writer(tmp_path).abandon()
    assert (open_files(), [path.name for path in tmp_path.iterdir()]) == (before, ["s.safetensors.part"])
