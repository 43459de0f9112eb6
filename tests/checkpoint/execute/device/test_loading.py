"""Slots of pinned memory: how many there are, and when one is used again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from halfbyte.checkpoint.execute.device.loading import Slot, slots_in
from halfbyte.checkpoint.execute.pieces import SLACK
from halfbyte.checkpoint.io.buffers import Arena

EACH = 100 + SLACK


@pytest.mark.parametrize(
    ("pinned", "count"),
    [(0, 1), (EACH, 1), (2 * EACH - 1, 1), (2 * EACH, 2), (3 * EACH - 1, 2), (3 * EACH, 3), (9 * EACH, 3)],
)
def test_as_many_slots_as_are_pinned(pinned: int, count: int) -> None:
    slots = slots_in(Arena(4 * EACH), 100, pinned)
    assert [slot.arena.left for slot in slots] == [100] * count


def test_what_was_taken_before_is_pinned_too() -> None:
    arena = Arena(4 * EACH)
    arena.take(64)
    assert len(slots_in(arena, 100, 64 + 2 * EACH)) == 2
    arena.release(64)
    assert len(slots_in(arena, 100, 63 + 2 * EACH)) == 1


def test_a_slot_is_free_when_the_device_has_copied_it() -> None:
    waits: list[str] = []
    event: Any = SimpleNamespace(wait=lambda: waits.append("waited"))
    slot = Slot(Arena(100))
    slot.arena.take(100)
    assert slot.clear().left == 100
    assert waits == []
    slot.arena.take(100)
    slot.copied = event
    assert slot.clear().left == 100
    assert slot.clear() is slot.arena
    assert waits == ["waited"], "once for each copy"
