"""Many tasks, few of them handed in at any time, so that the driver's memory does not grow with their number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from halfbyte.errors import CheckpointError

LOSSES = 4
"""How often a task that was bound to a node is handed in again, because the node went away."""

Item = TypeVar("Item")


class Lost(Exception):
    """A task did not run to its end because its node is gone. It can run on another."""


class Scheduler(Protocol):
    """What hands out tasks: a cluster, or a stand-in for one."""

    def submit(self, function: Callable[..., Any], *arguments: Any, node: str | None = None) -> Any: ...
    def wait(self, handles: Sequence[Any]) -> list[Any]: ...
    def result(self, handle: Any) -> Any: ...
    def cancel(self, handles: Sequence[Any]) -> None: ...
    def limit(self) -> int: ...


@dataclass
class Flight(Generic[Item]):
    """A task that was handed in."""

    item: Item
    node: str | None
    losses: int = 0


class InFlight(Generic[Item]):
    """Runs one function on many items. Items are made as they are handed in, and forgotten when they are done."""

    def __init__(
        self,
        scheduler: Scheduler,
        function: Callable[..., Any],
        arguments: Callable[[Item], Sequence[Any]],
        nodes: Callable[[Item], Collection[str] | None] = lambda item: None,
    ) -> None:
        """arguments: of the function for an item. nodes: where an item can run; None: anywhere."""
        self._scheduler, self._function = scheduler, function
        self._arguments, self._nodes = arguments, nodes
        self._flying: dict[Any, Flight[Item]] = {}
        self._load: Counter[str | None] = Counter()
        self.stopped = False
        """After this is set nothing is handed in any more; what runs comes to its end."""

    def run(self, items: Iterable[Item]) -> Generator[tuple[Item, Any] | None, None, None]:
        """(item, result) of each as it is done, in any order; None now and then, while nothing is.

        A caller that stops early cancels what is left.
        """
        waiting = iter(items)
        more = True
        try:
            while True:
                limit = self._scheduler.limit()
                while more and not self.stopped and len(self._flying) < limit:
                    item = next(waiting, None)
                    more = item is not None
                    if item is not None:
                        self._submit(Flight(item, None))
                if not self._flying:
                    return
                done = self._scheduler.wait(list(self._flying))
                if not done:
                    yield None
                for handle in done:
                    yield from self._land(handle)
        finally:
            self._scheduler.cancel(list(self._flying))

    def _submit(self, flight: Flight[Item]) -> None:
        nodes = self._nodes(flight.item)
        flight.node = None if nodes is None else min(sorted(nodes), key=lambda node: self._load[node])
        handle = self._scheduler.submit(self._function, *self._arguments(flight.item), node=flight.node)
        self._load[flight.node] += 1
        self._flying[handle] = flight

    def _land(self, handle: Any) -> Iterator[tuple[Item, Any]]:
        flight = self._flying.pop(handle)
        self._load[flight.node] -= 1
        try:
            result = self._scheduler.result(handle)
        except Lost as lost:
            flight.losses += 1
            if flight.losses > LOSSES:
                raise CheckpointError(
                    f"a task was lost {flight.losses} times with its node: {lost}. What is finished is kept; the same "
                    "command continues from there"
                ) from lost
            if not self.stopped:
                self._submit(flight)
            return
        yield flight.item, result
