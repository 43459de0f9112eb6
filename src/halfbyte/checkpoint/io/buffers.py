"""Memory that is allocated once and reused: touching fresh pages costs more than computing what goes into them."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from halfbyte.codec.bits import U8
from halfbyte.errors import CheckpointError

HUGE_PAGE = 2 << 20

ALIGNMENT = 64
"""Bytes of a cache line, to which the kernels' loads are aligned."""


class Arena:
    """A stack of byte arrays in one allocation of fixed size. Pages that are never touched cost nothing."""

    def __init__(self, size: int, memory: U8 | None = None) -> None:
        """`memory`: aligned bytes to use, `size` of them, instead of an allocation."""
        if memory is None:
            fresh = np.empty(size + ALIGNMENT, np.uint8)
            skip = -fresh.ctypes.data % ALIGNMENT
            memory = fresh[skip : skip + size]
        self._memory: U8 = memory
        self._used = 0

    @property
    def left(self) -> int:
        """Bytes that can still be taken."""
        return self._memory.size - self._used

    def part(self, size: int) -> Arena:
        """An arena in the next `size` bytes of this one."""
        return Arena(size, self.take(size))

    def take(self, size: int) -> U8:
        """The next `size` bytes, uninitialised. They stay valid until the arena is released to an earlier mark."""
        start, stop = self._used, self._used + size
        if stop > self._memory.size:
            raise CheckpointError(f"a work buffer of {stop:,} bytes is needed and {self._memory.size:,} were planned")
        self._used = stop + -stop % ALIGNMENT
        return self._memory[start:stop]

    def mark(self) -> int:
        return self._used

    def release(self, mark: int = 0) -> None:
        """Give back all that was taken after the mark."""
        self._used = mark


def page_memory(size: int) -> U8:
    """Fresh pages, large ones if the system has them."""
    pages = mmap.mmap(-1, size + -size % HUGE_PAGE)
    with contextlib.suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)
