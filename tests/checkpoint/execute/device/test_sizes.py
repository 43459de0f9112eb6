"""What a conversion takes of a lane and of pinned memory, in bytes counted by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from halfbyte.checkpoint.execute.device import sizes
from halfbyte.checkpoint.execute.device.protocol import STAGED
from halfbyte.checkpoint.execute.device.sizes import (
    Limits,
    most_lanes,
    output_bytes,
    piece_need,
    plan_devices,
    rows_need,
    staged_bytes,
    whole_need,
    worker_memory,
)
from halfbyte.checkpoint.execute.pieces import SLACK, Piece, largest_piece
from tests.checkpoint.execute.test_pieces import stand_in

ENGINE: Any = SimpleNamespace(widths=lambda columns: (columns // 2, columns // 16))
PER_ROW = 128 + 32 + 4
"""A row of 64 columns in two bytes each, its codes and its scales."""
ROUNDED = 6 * 512


@pytest.mark.parametrize(
    ("kind", "scale_columns", "more"), [("float", 0, 0), ("fp8", 0, 7 * 64 * 4), ("nvfp4", 4, 7 * 64 * 4 + 8 * 4 * 4)]
)
def test_rows_in_a_lane(kind: str, scale_columns: int, more: int) -> None:
    unit = stand_in(kind=kind, scale_columns=scale_columns)
    assert rows_need(ENGINE, unit.sources[0], 7) == 7 * PER_ROW + more + ROUNDED
    assert piece_need(ENGINE, unit, 7 * 128) == 7 * PER_ROW + more + ROUNDED


def test_units_that_are_held_as_a_whole() -> None:
    mine, other, small = stand_in(rows=10), stand_in(rows=20), stand_in(rows=1)
    for unit, name in ((mine, "a"), (other, "b"), (small, "c")):
        unit.module = name
    two_pieces = 13 * PER_ROW + 3 * ROUNDED  # of 5 and 5 and 3 rows
    assert whole_need(ENGINE, [mine], [mine], 5 * 128) == two_pieces
    assert whole_need(ENGINE, [mine], [mine, other, small], 5 * 128) == two_pieces + 23 * PER_ROW + 5 * ROUNDED


def test_pinned_bytes() -> None:
    unit = stand_in(kind="nvfp4", scale_columns=4)
    assert output_bytes(ENGINE, unit, Piece(0, 0, 2, 9)) == 7 * 36 + 4096
    assert staged_bytes(ENGINE, unit, 7 * 128) == 7 * 128 + 8 * 4 * 8 + 7 * 36 + 4096 + SLACK
    assert staged_bytes(ENGINE, stand_in(), 7 * 128) == 7 * 128 + 7 * 36 + 4096 + SLACK


def planned(monkeypatch: pytest.MonkeyPatch, lane: int, memory: int, chunk: int, *units: Any, workers: int = 1) -> Any:
    monkeypatch.setattr(sizes, "lane_sizes", lambda devices, workers, limit: (1, lane))
    monkeypatch.setattr(sizes, "Lanes", lambda devices, count, size: SimpleNamespace(size=size, count=count))
    return plan_devices([], ENGINE, units, workers, Limits(-(-memory * 10 // 9), None, chunk))


def test_pieces_are_as_large_as_lane_and_memory_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = stand_in(rows=4096)
    chunk = 1 << 18
    lane, memory = piece_need(ENGINE, unit, chunk), largest_piece(unit, chunk) + 2 * SLACK
    assert planned(monkeypatch, lane, memory, chunk, unit).sizes.chunk == chunk
    assert planned(monkeypatch, lane - 1, memory, chunk, unit).sizes.chunk == chunk // 2
    assert planned(monkeypatch, lane, memory - 1, chunk, unit).sizes.chunk == chunk // 2
    assert planned(monkeypatch, lane, 3 * memory, chunk, unit, workers=3).sizes.chunk == chunk
    assert planned(monkeypatch, 1, memory, chunk, unit).sizes.chunk == 1 << 16
    assert planned(monkeypatch, 1, memory, 1 << 12, unit).sizes.chunk == 1 << 12
    assert planned(monkeypatch, 1 << 40, 1 << 40, 1 << 30, unit).sizes.chunk == 16 << 20
    copied = stand_in("gather", rows=4096)
    assert planned(monkeypatch, 1, memory, chunk, copied).sizes.chunk == chunk, "it takes nothing of a lane"


def test_an_arena_has_room_for_the_largest_piece_and_what_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    unit, chunk = stand_in(rows=4096), 1 << 18
    found = planned(monkeypatch, 1 << 40, 1 << 40, chunk, unit)
    pinned = staged_bytes(ENGINE, unit, chunk) + SLACK
    assert found.sizes.arena == max(largest_piece(unit, chunk) + SLACK, pinned, chunk) + SLACK
    assert found.pinned == pinned
    empty = planned(monkeypatch, 1 << 40, 1 << 40, chunk)
    assert (empty.sizes.arena, empty.pinned) == (chunk + SLACK, SLACK)
    small = planned(monkeypatch, 1 << 40, 1 << 12, chunk, unit)
    assert (small.sizes.arena, small.pinned) == (1 << 12, 1 << 12)


def test_without_units_a_small_chunk_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = planned(monkeypatch, 1 << 40, 1 << 40, 1 << 12)
    assert (empty.sizes.chunk, empty.sizes.arena, empty.pinned) == (1 << 12, 2 * SLACK, SLACK)


def test_lanes_that_workers_ask_for() -> None:
    """Each device has as many."""
    counts = {(1, 0): 0, (8, 0): 0, (1, 1): 1, (8, 1): 8, (1, 2): 2, (3, 2): 4, (4, 2): 4, (5, 3): 6}
    assert {given: most_lanes(*given) for given in counts} == counts


@pytest.mark.parametrize(
    ("memory", "workers", "lanes", "each"),
    [(1000, 1, 0, 900), (1000, 3, 0, 300), (1009, 1, 0, 908), (10 * STAGED, 2, 2, 4 * STAGED * 9 // 10)],
)
def test_what_a_worker_gets_of_the_memory(memory: int, workers: int, lanes: int, each: int) -> None:
    assert worker_memory(memory, workers, lanes) == each


def test_every_device_has_its_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pinned memory is that of all lanes together, and the rest is shared by the workers."""
    monkeypatch.setattr(sizes, "lane_sizes", lambda devices, workers, limit: (2, 1 << 40))
    monkeypatch.setattr(sizes, "Lanes", lambda devices, count, size: SimpleNamespace(size=size, count=count))
    devices: Any = ["a", "b", "c"]
    found = plan_devices(devices, ENGINE, [], 4, Limits(6 * STAGED + 40 * SLACK, None, 1 << 30))
    assert found.sizes.arena == 9 * SLACK
