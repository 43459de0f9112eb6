"""How verify reads tensors: where they lie, and what it says of files that were cut or cannot be read."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from halfbyte.checkpoint.io.index import Checkpoint
from halfbyte.errors import CheckpointError
from halfbyte.verify.against.compare import compare
from halfbyte.verify.problems import Report
from halfbyte.verify.reading import read_pieces, read_rows, read_scalar, read_whole
from halfbyte.verify.stored import read_contents
from tests.samples import f32
from tests.tiny_models import BF16
from tests.verify.headers import opened

STACK = np.arange(3 * 4 * 5 * 6, dtype=np.float32).reshape(3, 4, 5, 6)


def test_tensors_are_read_where_they_lie(tmp_path: Path) -> None:
    large = np.arange(20000, dtype=np.float32).reshape(100, 200)
    made = opened(tmp_path, {"s": f32(1, 2, 3), "l": large, "e": np.zeros((0, 4), BF16), "n": f32(0.5)}).tensors
    for name, wanted in (("s", f32(1, 2, 3)), ("l", large)):
        np.testing.assert_array_equal(read_whole(tmp_path, made[name]), wanted)
    empty = read_whole(tmp_path, made["e"])
    assert (empty.shape, empty.dtype) == ((0, 4), BF16)
    assert [float(read_scalar(tmp_path, made[name])) for name in "sn"] == [1, 0.5]


@pytest.mark.parametrize("rows", [slice(1, 3), slice(0, 9), slice(1, 4, 2), slice(2, 2), slice(None)])
def test_rows_come_first_whatever_their_axis(tmp_path: Path, rows: slice) -> None:
    tensor = opened(tmp_path, {"a": f32(8), "w": STACK}).tensors["w"]
    np.testing.assert_array_equal(read_rows(tmp_path, tensor, rows), STACK[rows])
    for expert in range(3):
        for axis in (1, 2, 3):
            wanted = np.moveaxis(STACK[expert], axis - 1, 0)[rows]
            found = read_rows(tmp_path, tensor, rows, axis, expert)
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, wanted)
    transposed = read_rows(tmp_path, tensor, slice(0, 2), 3, 1)
    assert transposed.flags.c_contiguous  # the kernel that compares rows takes no others


@pytest.mark.parametrize(("piece", "sizes"), [(2, [2, 2, 1]), (5, [5]), (4, [4, 1])])
def test_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, sizes: list[int]) -> None:
    monkeypatch.setattr("halfbyte.verify.reading.PIECE", piece)
    made = opened(tmp_path, {"a": f32(9), "b": np.arange(5).astype(BF16), "c": np.arange(5, dtype=np.uint8)})
    for name, kind in (("b", BF16), ("c", np.uint8)):
        parts = list(read_pieces(tmp_path, made.tensors[name]))
        assert [part.size for part in parts] == sizes
        assert np.concatenate(parts).tolist() == [0, 1, 2, 3, 4]
        assert {part.dtype for part in parts} == {np.dtype(kind)}


def pair(folder: Path) -> tuple[Checkpoint, Checkpoint]:
    """A checkpoint and its source, with a tensor that both keep and a weight in another dtype."""
    kept, weight = np.arange(64, dtype=np.float32), np.ones((64, 64), np.float32)
    mine = opened(folder / "mine", {"a.bias": kept, "z.weight": weight.astype(BF16)})
    return mine, opened(folder / "source", {"a.bias": kept, "z.weight": weight})


def compared(mine: Checkpoint, source: Checkpoint) -> Report:
    report = Report("mine")
    compare(mine, read_contents(mine), source, 0.25, report)
    return report


@pytest.mark.parametrize("which", [0, 1])
def test_a_file_that_is_cut_before_it_is_compared(tmp_path: Path, which: int) -> None:
    both = pair(tmp_path)
    assert compared(*both).problems == []
    file = both[which].path / both[which].tensors["z.weight"].file
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError) as caught:
        compared(*both)
    assert str(caught.value) == f"{file} was cut while it was checked: z.weight ends behind its end"


@pytest.mark.parametrize("name", ["a.bias", "z.weight"])
def test_a_disk_that_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The error names the file, the place and the tensor. Of a mapped file, it would end the process."""
    mine, source = pair(tmp_path)
    tensor, real = source.tensors[name], os.preadv
    file = source.path / tensor.file

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == tensor.info.start and os.readlink(f"/proc/self/fd/{descriptor}") == str(file):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError) as caught:
        compared(mine, source)
    place = f"{file} cannot be read after byte {tensor.info.start}, in {name}"
    assert str(caught.value) == f"{place}: Input/output error"
    assert len(os.listdir("/proc/self/fd")) == before


CUT_UNDER_A_READER = """
import os, sys
from pathlib import Path
import numpy as np
from halfbyte.checkpoint.io.index import open_checkpoint
from halfbyte.verify.stored import read_contents
from halfbyte.verify.values import matrices
made = open_checkpoint(Path(sys.argv[1]))
rows = matrices(made, read_contents(made))["z"].stored(0, 1024)
os.truncate(made.path / made.tensors["z.weight"].file, 0)
print(int(np.asarray(rows).sum()))
"""


def test_rows_that_were_read_outlive_their_file(tmp_path: Path) -> None:
    """In a process of its own: mapped pages of a file that was cut would end it."""
    opened(tmp_path, {"z.weight": np.ones((1024, 256), np.float32)})
    done = subprocess.run(
        [sys.executable, "-c", CUT_UNDER_A_READER, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(1024 * 256), "")
