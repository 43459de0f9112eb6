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
from halfbyte.checkpoint.io.views import (
    NUMPY,
    SourceMatrix,
    View,
    read_rows,
    read_rows_amax,
    read_scratch,
    scratch_bytes,
)
from halfbyte.codec.bits import U8
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


def test_a_column_that_lies_far_apart_is_read_alone(tmp_path: Path) -> None:
    """Six megabytes for four of its numbers: there is room for no second one."""
    x = np.zeros((4, 1 << 19), np.float32)
    x[:, :4] = np.arange(16).reshape(4, 4)
    x.tofile(tmp_path / "f")
    view = View("t", "f", "F32", 0, 4, 2, 1 << 19, 2)
    files = Files({"f": str(tmp_path / "f")})
    found = read_rows(files, view, 0, 4, Arena(64 + read_scratch(view, 4)))
    files.close()
    assert_same_bits(found, np.ascontiguousarray(x[:, :4:2]))


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


def test_what_a_view_says_of_itself() -> None:
    view = View("t", "f", "BF16", 100, 7, 8, 8)
    assert (view.bytes, view.contiguous, view.place(0), view.place(3)) == (112, True, 100, 148)
    assert not View("t", "f", "BF16", 100, 7, 8, 9).contiguous
    assert not View("t", "f", "BF16", 100, 8, 8, 8, 8).contiguous
    sizes = {name: dtype.itemsize for name, dtype in NUMPY.items()}
    assert sizes == {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}


def test_what_a_source_says_of_itself() -> None:
    def view(file: str) -> View:
        return View("t", file, "F16", 0, 2, 8, 8)

    plain = SourceMatrix("float", 2, 8, view("a"))
    assert (plain.files, plain.row_bytes, plain.divides) == ({"a"}, 16, False)
    whole = SourceMatrix("nvfp4", 2, 8, view("a"), view("b"), view("c"), True, view("d"))
    assert whole.files == {"a", "b", "c", "d"}


@pytest.mark.parametrize(
    ("name", "rows", "wanted"),
    [
        # one read of all rows; one span with what lies between; one read per column
        ("whole", 3, [(8, 288)]),
        ("odd rows", 3, [(104, 480)]),
        ("transposed", 2, [(1928 + 96 * column, 8) for column in range(20)]),
    ],
)
def test_no_more_is_read_than_the_rows_need(
    files: Files, monkeypatch: pytest.MonkeyPatch, name: str, rows: int, wanted: list[tuple[int, int]]
) -> None:
    """And nothing stays taken but the rows themselves, where they lay not side by side."""
    offset, height, columns, row_stride, column_stride, expected = VIEWS[name]
    view = View("t", "f", "F32", 8 + 4 * offset, height, columns, row_stride, column_stride)
    asked: list[tuple[int, int]] = []
    read = files.read

    def watch(file: str, at: int, into: U8) -> None:
        asked.append((at, into.nbytes))
        read(file, at, into)

    monkeypatch.setattr(files, "read", watch)
    arena = Arena(1 << 16)
    assert_same_bits(read_rows(files, view, 0, rows, arena), np.ascontiguousarray(expected[:rows]))
    assert asked == wanted
    assert arena.mark() == -(-rows * columns * 4 // 64) * 64


def test_a_wide_transpose_is_read_in_several_steps(tmp_path: Path) -> None:
    """Columns of 4 MiB in all at a time: the last step has fewer."""
    x = np.arange(5 * (1 << 18), dtype=np.float64).reshape(5, 1 << 18)
    (tmp_path / "x").write_bytes(x.tobytes())
    opened = Files({"x": str(tmp_path / "x")})
    view = View("t", "x", "F64", 0, 1 << 18, 5, 1, 1 << 18)
    arena = Arena((1 << 18) * 5 * 8 + read_scratch(view, 1 << 18))
    assert_same_bits(read_rows(opened, view, 0, 1 << 18, arena), np.ascontiguousarray(x.T))
    opened.close()


def test_rows_with_their_largest_magnitude(files: Files) -> None:
    view = View("t", "f", "F32", 8 + 480 * 4, 20, 24, 24)
    arena = Arena(1 << 12)
    rows, amax = read_rows_amax(files, view, 3, 5, arena)
    assert_same_bits(rows, STACK[1, 3:5])
    assert (amax, arena.mark()) == (STACK[1, 4, 23], 192)
