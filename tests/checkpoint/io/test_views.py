"""Views into files: every stride, read in pieces; buffers that are taken and given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.io.views import View, read_rows, read_scratch, scratch_bytes
from halfbyte.errors import CheckpointError
from halfbyte.layouts.fp8 import block_length
from halfbyte.testing import assert_same_bits

STACK = np.arange(3 * 20 * 24, dtype=np.float32).reshape(3, 20, 24)
VIEWS = {
    "whole": (0, 60, 24, 24, 1, STACK.reshape(60, 24)),
    "second of the stack": (480, 20, 24, 24, 1, STACK[1]),
    "lower half": (480 + 240, 10, 24, 24, 1, STACK[1, 10:]),
    "odd rows": (24, 10, 24, 48, 1, STACK[0, 1::2]),
    "transposed": (480, 24, 20, 1, 24, STACK[1].T),
    "transposed right half": (480 + 12, 12, 20, 1, 24, STACK[1, :, 12:].T),
    "transposed odd columns": (481, 12, 20, 2, 24, STACK[1, :, 1::2].T),
}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    (tmp_path / "f").write_bytes(bytes(8) + STACK.tobytes())
    opened = Files({"f": str(tmp_path / "f"), "none": str(tmp_path / "none")})
    yield opened
    opened.close()


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("step", [1, 3, 100])
def test_rows_of_a_view(files: Files, name: str, step: int) -> None:
    offset, rows, columns, row_stride, column_stride, expected = VIEWS[name]
    view = View("t", "f", "F32", 8 + 4 * offset, rows, columns, row_stride, column_stride)
    arena = Arena(1 << 23)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        arena.release()
        assert_same_bits(read_rows(files, view, start, stop, arena), np.ascontiguousarray(expected[start:stop]))


def test_a_view_beyond_the_end(files: Files) -> None:
    with pytest.raises(CheckpointError, match=r"f ended at byte \d+"):
        read_rows(files, View("t", "f", "F32", 8, 61, 24, 24), 0, 61, Arena(1 << 16))


def test_a_file_that_is_not_there(files: Files) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read after byte 0: .*No such file"):
        files.read("none", 0, np.zeros(4, np.uint8))


def test_an_arena_is_a_stack() -> None:
    arena = Arena(1024)
    first = arena.take(10)
    mark = arena.mark()
    second = arena.take(100)
    assert not np.shares_memory(first, second)
    assert (first.ctypes.data % 64, second.ctypes.data % 64) == (0, 0)
    arena.release(mark)
    assert np.shares_memory(arena.take(100), second)
    with pytest.raises(CheckpointError, match="a work buffer of"):
        arena.take(1024)
    arena.release()
    assert arena.take(1024).size == 1024


@pytest.mark.parametrize(
    ("size", "scales", "length"), [(200, 2, 128), (256, 2, 128), (300, 1, 300), (300, 300, 1), (64, 2, 32), (1, 1, 1)]
)
def test_block_lengths(size: int, scales: int, length: int) -> None:
    assert block_length(size, scales) == length


def test_block_lengths_that_are_none() -> None:
    with pytest.raises(CheckpointError, match="5 scales do not fit an axis of 256"):
        block_length(256, 5)


@pytest.mark.parametrize(
    ("columns", "row_stride", "column_stride", "wanted"),
    [(64, 64, 1, 0), (64, 200, 1, (6 * 200 + 64) * 2), (64, 1, 500, 4 << 20), (8, 1 << 20, 2, (6 * (1 << 20) + 1) * 2)],
)
def test_bytes_beyond_the_rows(columns: int, row_stride: int, column_stride: int, wanted: int) -> None:
    """Rows that do not lie side by side are read with what is between them; columns at least 4 MiB at a time."""
    view: Any = SimpleNamespace(dtype="BF16", columns=columns, row_stride=row_stride, column_stride=column_stride)
    assert read_scratch(view, 7) == wanted
    assert scratch_bytes(cast("Any", SimpleNamespace(weight=view)), 7) == wanted + 4096
