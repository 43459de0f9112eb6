"""Decoding of rows: exact values of small matrices, whichever rows are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from halfbyte.checkpoint.execute.scalars import scalar_of
from halfbyte.checkpoint.io import decode as module
from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.io.decode import (
    E4M3_PAIRS,
    E4M3_VALUES,
    INT4_PAIRS,
    RowScales,
    Scales,
    decode_rows,
    decoding_memory,
    fp8_amax,
    read_row_scales,
    read_scales,
    slab_rows,
)
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.io.views import Kind, SourceMatrix, View, read_rows
from halfbyte.errors import CheckpointError
from halfbyte.testing import assert_same_bits

Array = npt.NDArray[Any]


class Made:
    """A file that grows by arrays, and views into it."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, b""
        self.files = Files({"f": str(path)})

    def view(self, array: Array, dtype: str) -> View:
        offset = len(self.data)
        self.data += array.tobytes()
        self.path.write_bytes(self.data)
        rows, columns = array.shape
        return View("t", "f", dtype, offset, rows, columns, columns)

    def decode(self, source: SourceMatrix, start: int, stop: int) -> Array:
        arena = Arena(1 << 20)
        raw = read_rows(self.files, source.weight, start, stop, arena)
        return decode_rows(source, raw, start, read_scales(self.files, source), arena, self.files)

    def scales(self, source: SourceMatrix, start: int, stop: int) -> RowScales:
        found = read_scales(self.files, source)
        return read_row_scales(self.files, source, start, stop, found, Arena(1 << 16))


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    found = Made(tmp_path / "f")
    yield found
    found.files.close()


def test_tables_of_two_values() -> None:
    assert INT4_PAIRS.view(np.float32).reshape(256, 2)[[0x00, 0x8F, 0xF8, 0x91]].tolist() == [
        [-8, -8], [7, 0], [0, 7], [-7, 1]
    ]  # fmt: skip
    every = np.arange(1 << 16, dtype=np.uint16)
    pairs = E4M3_VALUES[every.view(np.uint8)].reshape(-1, 2)
    assert_same_bits(E4M3_PAIRS.view(np.float32).reshape(-1, 2), pairs, any_nan=True)
    with np.errstate(invalid="ignore"):
        wanted = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert_same_bits(E4M3_VALUES, wanted, any_nan=True)


FP8 = np.arange(5 * 34, dtype=np.uint8).reshape(5, 34) % 0x7F
"""Small E4M3 bytes, no NaN."""
GRIDS: dict[str, tuple[tuple[int, int], int, int]] = {
    # rows and columns of scales, how many of each share one
    "one": ((1, 1), 5, 34),
    "per row": ((5, 1), 1, 34),
    "per column": ((1, 34), 5, 1),
    "per element": ((5, 34), 1, 1),
    "blocks of 16 columns": ((5, 3), 1, 16),
    "wide blocks": ((1, 2), 5, 32),
}


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("slab", [1 << 17, 70, 1])
def test_fp8(made: Made, monkeypatch: pytest.MonkeyPatch, name: str, slab: int) -> None:
    monkeypatch.setattr(module, "SLAB", slab)
    shape, tall, wide = GRIDS[name]
    grid = np.arange(1, 1 + shape[0] * shape[1], dtype=np.float32).reshape(shape)
    source = SourceMatrix("fp8", 5, 34, made.view(FP8, "F8_E4M3"), made.view(grid, "F32"))
    wanted = E4M3_VALUES[FP8] * np.repeat(np.repeat(grid, tall, axis=0), wide, axis=1)[:5, :34]
    for start, stop in ((0, 5), (1, 2), (2, 5), (4, 5)):
        assert_same_bits(made.decode(source, start, stop), wanted[start:stop])
        scales = read_scales(made.files, source)
        amax = fp8_amax(source, FP8[start:stop], start, scales)
        assert (amax, type(amax)) == (np.abs(wanted[start:stop]).max(), np.float32)
        rows = made.scales(source, start, stop)
        assert (rows.tall, rows.wide, rows.first, rows.stored) == (tall, wide, start % tall, None)
        assert rows.array.tolist() == grid[start // tall : (stop - 1) // tall + 1].tolist()


@pytest.mark.parametrize("grid", [[[2, 3]], [[2], [5]], [[2, 3], [5, 7]], [[2]]])
def test_fp8_of_two_columns(made: Made, grid: list[list[int]]) -> None:
    """The amax too: the largest code has not the largest scale."""
    codes = np.array([[0x38, 0x30], [0x28, 0x20]], np.uint8)  # 1, a half, a quarter, an eighth
    scales = np.array(grid, np.float32)
    source = SourceMatrix("fp8", 2, 2, made.view(codes, "F8_E4M3"), made.view(scales, "F32"))
    wanted = np.array([[1, 0.5], [0.25, 0.125]]) * np.broadcast_to(scales, (2, 2))
    assert made.decode(source, 0, 2).tolist() == wanted.tolist()
    for start, stop in ((0, 2), (0, 1), (1, 2)):
        amax = fp8_amax(source, codes[start:stop], start, read_scales(made.files, source))
        assert amax == wanted[start:stop].max()


def test_a_scale_at_the_end_of_a_file(made: Made) -> None:
    """Nothing is read behind it."""
    scales = made.view(np.full((3, 2), 0x38, np.uint8), "F8_E4M3")
    codes, word = made.view(np.full((3, 16), 0x72, np.uint8), "U8"), made.view(np.array([[0.25]], np.float32), "F32")
    source = SourceMatrix("nvfp4", 3, 32, codes, scales, global_scale=word, input_scale=word)
    assert read_scales(made.files, source).stored == 0.25
    unit: Any = SimpleNamespace(input_scale=None, module="m")
    for role, wanted in (("multiplier", 0.25), ("divisor", 4), ("input_multiplier", 0.25), ("input_divisor", 4)):
        output: Any = SimpleNamespace(part=SimpleNamespace(role=role))
        assert scalar_of(made.files, unit, output, source, None).tolist() == [wanted]


def test_a_scale_that_is_not_stored(made: Made) -> None:
    source = SourceMatrix("nvfp4", 3, 32, made.view(np.ones((3, 16), np.uint8), "U8"))
    unit: Any = SimpleNamespace(input_scale=None, module="a.b")
    for role in ("multiplier", "input_divisor"):
        output: Any = SimpleNamespace(part=SimpleNamespace(role=role))
        with pytest.raises(CheckpointError, match=r"^a\.b has no stored scale where one is needed$"):
            scalar_of(made.files, unit, output, source, None)


def test_fp8_of_tall_blocks(made: Made) -> None:
    """Rows 15 and 16 lie in different blocks; the last block is partial."""
    codes = np.full((40, 3), 0x38, np.uint8)  # 1.0 each; an odd width has no pairs
    grid = np.array([[2], [3], [5]], np.float32)
    source = SourceMatrix("fp8", 40, 3, made.view(codes, "F8_E4M3"), made.view(grid, "F32"))
    wanted = np.repeat([2, 3, 5], 16)[:40]
    for start, stop in ((0, 40), (15, 17), (31, 32), (16, 33), (32, 40)):
        assert made.decode(source, start, stop)[:, 1].tolist() == wanted[start:stop].tolist()
        rows = made.scales(source, start, stop)
        assert (rows.tall, rows.wide, rows.first) == (16, 3, start % 16)
        assert rows.array.tolist() == grid[start // 16 : (stop - 1) // 16 + 1].tolist()


def test_signs_nan_and_inf_of_fp8(made: Made) -> None:
    codes = np.array([[0x80, 0xB8, 0x38, 0x7E]], np.uint8)
    grid = np.array([[1]], np.float32)
    source = SourceMatrix("fp8", 1, 4, made.view(codes, "F8_E4M3"), made.view(grid, "F32"))
    assert_same_bits(made.decode(source, 0, 1), np.array([[-0.0, -1, 1, 448]], np.float32))
    assert fp8_amax(source, codes | np.uint8(0x80), 0, Scales(grid)) == 448
    assert np.isnan(fp8_amax(source, codes | np.uint8(0x7F), 0, Scales(grid)))
    assert fp8_amax(source, codes, 0, Scales(np.array([[3e38]], np.float32))) == np.inf
    assert fp8_amax(source, codes, 0, Scales(-grid)) == 448


@pytest.mark.parametrize("dtype", ["F8_E8M0", "U8", "BF16", "F32"])
def test_scales_of_fp8_are_widened(made: Made, dtype: str) -> None:
    raw = np.array([[127, 128, 120]], np.uint8)
    powers = np.array([[1, 2, 2**-7]], np.float32)
    given = raw if dtype in ("F8_E8M0", "U8") else powers.astype(ml_dtypes.bfloat16 if dtype == "BF16" else np.float32)
    source = SourceMatrix("fp8", 1, 3, made.view(FP8[:1, :3], "F8_E4M3"), made.view(given, dtype))
    found = read_scales(made.files, source)
    assert found.stored is None
    assert found.grid is not None
    assert_same_bits(found.grid, powers)


@pytest.mark.parametrize("slab", [1 << 17, 8])
def test_int4(made: Made, monkeypatch: pytest.MonkeyPatch, slab: int) -> None:
    monkeypatch.setattr(module, "SLAB", slab)
    codes = np.random.default_rng(0).integers(0, 256, (5, 4), dtype=np.uint8)
    scales = np.arange(1, 11, dtype=np.float32).reshape(5, 2).astype(ml_dtypes.bfloat16)
    source = SourceMatrix("int4", 5, 8, made.view(codes, "U8"), made.view(scales, "BF16"))
    values = np.stack([codes & 15, codes >> 4], axis=-1).reshape(5, 8).astype(np.float32) - 8
    wanted = values * np.repeat(scales.astype(np.float32), 4, axis=1)
    assert read_scales(made.files, source) == Scales()
    for start, stop in ((0, 5), (1, 3), (4, 5)):
        assert_same_bits(made.decode(source, start, stop), wanted[start:stop])
        rows = made.scales(source, start, stop)
        assert (rows.tall, rows.wide, rows.first, rows.stored) == (1, 4, 0, None)
        assert_same_bits(rows.array, scales[start:stop].astype(np.float32))


@pytest.mark.parametrize("divides", [False, True])
def test_nvfp4(made: Made, divides: bool) -> None:
    codes = np.full((3, 16), 0x72, np.uint8)  # 1 and 6
    scales = np.array([[0x38, 0x40], [0x30, 0x38], [0x38, 0x38]], np.uint8)  # 1, 2, 0.5
    word = made.view(np.array([[0.25]], np.float32), "F32")
    source = SourceMatrix(
        "nvfp4", 3, 32, made.view(codes, "U8"), made.view(scales, "F8_E4M3"), global_scale=word, divides=divides
    )
    found = read_scales(made.files, source)
    assert (found.grid, found.stored) == (None, np.float32(0.25))
    assert type(found.stored) is np.float32
    rows = made.scales(source, 1, 3)
    assert (rows.array.tolist(), rows.tall, rows.wide, rows.first) == (scales[1:].tolist(), 1, 1, 0)
    assert rows.stored == 0.25
    factor = 4 if divides else 0.25
    assert made.decode(source, 0, 2)[:, 14:18].tolist() == [
        [1 * factor, 6 * factor, 2 * factor, 12 * factor], [0.5 * factor, 3 * factor, 1 * factor, 6 * factor]
    ]  # fmt: skip


def test_mxfp4(made: Made) -> None:
    codes, scales = np.full((2, 16), 0x72, np.uint8), np.array([[127], [129]], np.uint8)
    source = SourceMatrix("mxfp4", 2, 32, made.view(codes, "U8"), made.view(scales, "F8_E8M0"))
    assert made.decode(source, 1, 2).tolist() == [[4, 24] * 16]
    assert made.scales(source, 1, 2).stored is None


def test_floats_stay_as_they_are(made: Made) -> None:
    x = np.ones((2, 3), np.float16)
    source = SourceMatrix("float", 2, 3, made.view(x, "F16"))
    assert_same_bits(made.decode(source, 1, 2), x[1:])


@pytest.mark.parametrize("kind", ["int4", "mxfp4", "nvfp4", "fp8"])
def test_without_scales(made: Made, kind: Kind) -> None:
    source = SourceMatrix(kind, 1, 32, made.view(np.ones((1, 32), np.uint8), "U8"))
    with pytest.raises(CheckpointError) as caught:
        made.decode(source, 0, 1)
    assert str(caught.value) == ("t: no scales were read" if kind == "fp8" else "t has no scales")
    assert read_scales(made.files, source) == Scales()


def test_rows_per_step_and_their_memory(made: Made) -> None:
    assert [slab_rows(n) for n in (0, 1, 2048, 2049, 2050, 1 << 16, (1 << 16) + 1, 1 << 17, 1 << 20)] == [
        64, 64, 64, 63, 63, 2, 1, 1, 1
    ]  # fmt: skip
    view = made.view(np.ones((1, 4), np.uint8), "U8")
    memory = {
        kind: [decoding_memory(SourceMatrix(kind, 100, 4096, view), rows) for rows in (1, 32, 100)]
        for kind in ("float", "fp8", "int4", "mxfp4", "nvfp4")
    }
    plain = [4096 * 4, 32 * 4096 * 4, 100 * 4096 * 4]
    stepped = [4096 * 19, 32 * 4096 * 19, 100 * 4096 * 4 + 32 * 4096 * 15]
    assert memory == {"float": [0, 0, 0], "fp8": stepped, "int4": stepped, "mxfp4": plain, "nvfp4": plain}
