"""One check for many tensors, on threads: the results come in the order of the tensors, as if one thread had worked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from halfbyte.backends.threads import thread_count

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 4
"""Results per thread that may wait for an earlier one, which bounds what is kept of them."""


class InOrder(Protocol):
    """check(item) for every item, in the order of the items, wherever that is computed."""

    def __call__(self, check: Callable[[T], R], items: Iterable[T]) -> Iterator[R]: ...


def in_order(check: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """check(item) for every item. Kernels and numpy release the interpreter, so threads work at the same time."""
    workers = thread_count()
    if workers == 1:
        yield from map(check, items)
        return
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="halfbyte-verify")
    try:
        for item in items:
            if len(waiting) >= AHEAD * workers:
                yield waiting.popleft().result()
            waiting.append(pool.submit(check, item))
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
