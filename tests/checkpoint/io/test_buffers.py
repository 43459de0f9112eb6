"""Work memory: every byte of an arena can be taken, none beyond it."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.checkpoint.io.buffers import ALIGNMENT, Arena, page_memory
from halfbyte.errors import CheckpointError


def test_what_is_left() -> None:
    arena = Arena(200)
    assert arena.left == 200
    assert arena.take(1).ctypes.data % ALIGNMENT == 0
    assert (arena.left, arena.mark()) == (136, 64)
    assert arena.take(0).size == 0
    assert arena.mark() == 64
    arena.take(64)
    assert arena.mark() == 128
    assert arena.take(72).size == 72
    arena.release(64)
    assert arena.left == 136
    with pytest.raises(CheckpointError) as caught:
        arena.take(1137)
    assert str(caught.value) == "a work buffer of 1,201 bytes is needed and 200 were planned"
    assert arena.mark() == 64, "what was refused is not taken"
    arena.release()
    assert arena.left == 200


def test_a_part_is_an_arena_of_its_own_in_the_same_memory() -> None:
    memory = np.zeros(256, np.uint8)
    arena = Arena(256, memory)
    arena.take(3)
    part = arena.part(100)
    assert (part.left, arena.mark()) == (100, 192)
    part.take(100)[:] = 7
    assert memory[64:164].tolist() == [7] * 100
    assert not memory[:64].any()
    assert not memory[164:].any()
    with pytest.raises(CheckpointError, match=r"^a work buffer of 129 bytes is needed and 100 were planned$"):
        part.take(1)


@pytest.mark.parametrize(("size", "pages"), [(1, 1), (2 << 20, 1), ((2 << 20) + 1, 2), (3 << 21, 3)])
def test_memory_comes_in_large_pages(size: int, pages: int) -> None:
    memory = page_memory(size)
    assert (memory.size, bool(memory.any())) == (pages << 21, False)
    assert memory.dtype == np.uint8
    assert memory.ctypes.data % ALIGNMENT == 0
