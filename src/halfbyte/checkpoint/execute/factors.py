"""What is made of statistics, kept for all who share an input, and the memory that it takes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

KEPT = 4
"""Things that are kept when nobody uses them."""


@dataclass(frozen=True)
class Need:
    """Bytes of memory."""

    making: int
    """While a thing is made, with what it is made from."""
    held: int
    """As long as it is kept."""


@dataclass(eq=False)
class _Entry(Generic[T]):
    held: int
    users: int = 1
    value: T | None = None
    failed: bool = False


class Kept(Generic[T]):
    """Things by keys, in so many bytes. Whoever needs memory for one waits for it; what nobody uses goes first.

    A thing that needs more than there is gets it when it is alone.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.used = 0
        self.most_used = 0
        self._entries: OrderedDict[Hashable, _Entry[T]] = OrderedDict()
        self._change = threading.Condition()

    @contextmanager
    def borrow(self, key: Hashable, need: Need, make: Callable[[], T]) -> Iterator[T]:
        """The thing of a key. It is not forgotten while the block lasts. Who holds one must not ask for another."""
        entry, value = self._take(key, need, make)
        try:
            yield value
        finally:
            with self._change:
                entry.users -= 1
                self._forget(lambda: self._idle() > KEPT)
                self._change.notify_all()

    def _take(self, key: Hashable, need: Need, make: Callable[[], T]) -> tuple[_Entry[T], T]:
        with self._change:
            while True:
                found = self._entries.get(key)
                if found is not None:
                    found.users += 1
                    self._entries.move_to_end(key)
                    while found.value is None and not found.failed:
                        self._change.wait()
                    if found.value is not None:
                        return found, found.value
                    continue  # whoever made it failed: so will this, with an error of its own
                if self._has_room(need.making):
                    break
                self._change.wait()
            entry: _Entry[T] = _Entry(need.held)
            self._entries[key] = entry
            self._count(need.making)
        try:
            value = make()
        except BaseException:
            with self._change:
                entry.failed = True
                del self._entries[key]
                self._count(-need.making)
                self._change.notify_all()
            raise
        with self._change:
            entry.value = value
            self._count(need.held - need.making)
            self._change.notify_all()
        return entry, value

    def _count(self, size: int) -> None:
        self.used += size
        self.most_used = max(self.most_used, self.used)

    def _has_room(self, size: int) -> bool:
        self._forget(lambda: self.used + size > self.memory)
        return self.used + size <= self.memory or not self._entries

    def _idle(self) -> int:
        return sum(entry.users == 0 for entry in self._entries.values())

    def _forget(self, more: Callable[[], bool]) -> None:
        """Forget what nobody uses, the longest unused first, as long as that is asked for."""
        for key, entry in list(self._entries.items()):
            if not more():
                return
            if entry.users == 0:
                del self._entries[key]
                self._count(-entry.held)

    def clear(self) -> None:
        """Forget everything that nobody uses."""
        with self._change:
            self._forget(lambda: True)


Store = Kept[Any]
