"""Batches of windows side by side. Sums over them are taken in their order, so the number of threads changes no bit."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from halfbyte.backends.threads import thread_count

T = TypeVar("T")


TRIMMED = 8
"""Batches after which memory that threads have freed goes back to the system."""


class Workers:
    """Threads that each take one batch at a time; on a GPU the caller alone, because its kernels queue up anyway."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, "halfbyte-windows") if count > 1 else None

    def each(
        self, count: int, job: Callable[[int], T], then: Callable[[int, T], object] = lambda number, result: None
    ) -> None:
        """job(number) for every number below count, side by side; then(number, its result) in order, by the caller."""
        if self._pool is None:
            for number in range(count):
                then(number, job(number))
            return
        waiting: deque[tuple[int, Future[T]]] = deque()
        try:
            for number in range(count):
                waiting.append((number, self._pool.submit(job, number)))
                if len(waiting) > self.count:
                    first, future = waiting.popleft()
                    then(first, future.result())
            while waiting:
                first, future = waiting.popleft()
                then(first, future.result())
        finally:
            for _, future in waiting:
                future.cancel()
            for _, future in waiting:
                if not future.cancelled():
                    future.exception()

    def trimming(
        self, count: int, job: Callable[[int], T], then: Callable[[int, T], object] = lambda number, result: None
    ) -> None:
        """The same for jobs that run in many threads, whose allocator keeps what each has freed."""

        def counted(number: int, result: T) -> None:
            then(number, result)
            if number % TRIMMED == TRIMMED - 1:
                trim()

        self.each(count, job, counted)
        trim()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def trim() -> None:
    """Give memory that is free back to the system, where the C library can (glibc)."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def workers_for(device: torch.device, threads: int | None = None) -> Iterator[Workers]:
    """Workers for a device. On the CPU torch computes each operation with one thread while they exist: sums within an
    operation then have one order whatever the number of workers."""
    if device.type != "cpu":
        yield Workers(1)
        return
    before: Any = torch.get_num_threads()
    torch.set_num_threads(1)
    workers = Workers(thread_count(threads))
    try:
        yield workers
    finally:
        workers.close()
        torch.set_num_threads(before)
