"""Tasks in flight, with a stand-in for the cluster: how many there are at once, and what becomes of lost ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from halfbyte.errors import CheckpointError
from halfbyte.scale.in_flight import InFlight, Lost


class Stand:
    """Runs a task when somebody waits for it, the newest first. Loses those whose node is in `dead`."""

    def __init__(self, at_once: int = 3, dead: Sequence[str] = ()) -> None:
        self.at_once, self.dead = at_once, set(dead)
        self.flying: dict[int, tuple[Callable[..., Any], tuple[Any, ...], str | None]] = {}
        self.most = self.count = 0
        self.cancelled: list[int] = []
        self.nodes: list[str | None] = []

    def submit(self, function: Callable[..., Any], *arguments: Any, node: str | None = None) -> int:
        self.count += 1
        self.flying[self.count] = function, arguments, node
        self.nodes.append(node)
        self.most = max(self.most, len(self.flying))
        return self.count

    def wait(self, handles: Sequence[int]) -> list[int]:
        assert set(handles) == set(self.flying)
        return [max(handles)] if self.count % 4 else [max(handles), *sorted(handles)[:1]][: len(handles)]

    def result(self, handle: int) -> Any:
        function, arguments, node = self.flying.pop(handle)
        if node in self.dead:
            raise Lost(f"{node} is gone")
        return function(*arguments)

    def cancel(self, handles: Sequence[int]) -> None:
        self.cancelled += handles

    def limit(self) -> int:
        return self.at_once


def double(x: int) -> int:
    return 2 * x


def flights(stand: Stand, **options: Any) -> InFlight[int]:
    return InFlight(stand, double, lambda item: (item,), **options)


@pytest.mark.parametrize("at_once", [1, 3, 50])
def test_every_item_once_and_few_at_a_time(at_once: int) -> None:
    stand, made = Stand(at_once), [0]

    def items() -> Iterator[int]:
        for item in range(100):
            made[0] += 1
            assert made[0] - len(done) <= at_once + 1, "made before there was room for it"
            yield item

    done: list[int] = []
    for landed in flights(stand).run(items()):
        assert landed is not None
        item, result = landed
        assert result == 2 * item
        done.append(item)
    assert sorted(done) == list(range(100))
    assert stand.most == min(at_once, 100)


def test_nothing_is_handed_in_after_a_stop() -> None:
    stand = Stand()
    flying = flights(stand)
    done = []
    for landed in flying.run(range(100)):
        assert landed is not None
        done.append(landed[0])
        flying.stopped = True
    assert len(done) == 3
    assert stand.count == 3
    assert stand.cancelled == []


def test_a_caller_that_stops_cancels_the_rest() -> None:
    stand = Stand()
    running = flights(stand).run(range(100))
    next(running)
    running.close()
    assert len(stand.cancelled) == 2


def test_items_bound_to_nodes_are_spread() -> None:
    stand = Stand(at_once=6)
    assert len(list(flights(stand, nodes=lambda item: ["a", "b", "c"]).run(range(6)))) == 6
    assert sorted(map(str, stand.nodes)) == ["a", "a", "b", "b", "c", "c"]


def test_an_item_whose_node_is_gone_goes_to_another() -> None:
    stand = Stand(at_once=1, dead=["a"])
    tried: list[int] = []

    def nodes(item: int) -> list[str]:
        tried.append(item)
        return ["a"] if len(tried) < 3 else ["b"]

    assert list(flights(stand, nodes=nodes).run([7])) == [(7, 14)]
    assert stand.nodes == ["a", "a", "b"]


def test_an_item_that_is_always_lost_is_an_error() -> None:
    stand = Stand(at_once=1, dead=["a"])
    with pytest.raises(CheckpointError, match=r"a task was lost 5 times with its node: a is gone.*same command"):
        list(flights(stand, nodes=lambda item: ["a"]).run([7]))
