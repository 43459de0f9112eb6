"""`checks_on`: the checks of `verify`, computed by the nodes of a cluster. The report is that of one machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from halfbyte.scale.cluster import Cluster
from halfbyte.verify.parallel import InOrder

T = TypeVar("T")
R = TypeVar("R")

BATCH = 32
"""Tensors per task."""
_kept: dict[str, Any] = {}
"""In a worker process: the check that it was given last, by its handle. To read it takes longer than many checks."""


def checks_on(cluster: Cluster) -> InOrder:
    """Check tensors on the nodes of a cluster; the results come in order, and few tasks are handed in at once."""

    def each(check: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        handle = cluster.share(check)
        waiting: deque[Any] = deque()
        left = iter(items)
        try:
            while True:
                while len(waiting) < cluster.limit() and (batch := list(islice(left, BATCH))):
                    waiting.append(cluster.submit(check_batch, [handle], batch))
                if not waiting:
                    return
                yield from cluster.result(waiting[0])
                waiting.popleft()
        finally:
            cluster.cancel(list(waiting))

    return each


def check_batch(handle: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
    """On a node: the results of some items. The handle comes in a list, so that Ray does not read it for every task."""
    import ray

    name = handle[0].hex()
    if name not in _kept:
        _kept.clear()
        _kept[name] = ray.get(handle[0])
    return [_kept[name](item) for item in batch]
