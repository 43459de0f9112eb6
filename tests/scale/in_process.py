"""A stand-in for a cluster: tasks run in this process when they are waited for, and those in flight are counted."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from halfbyte.scale.cluster import Cluster, Node, Settings


class InProcess(Cluster):
    """Eight places. Arguments are pickled and read again, as they would be on their way to a node."""

    def __init__(self) -> None:
        super().__init__(None, Settings())
        self.flying: dict[int, tuple[Callable[..., Any], bytes]] = {}
        self.most = self.count = 0

    def nodes(self) -> list[Node]:
        return [Node("here", "here", {"CPU": 8.0})]

    def ask_all(self, question: Callable[..., Any], *arguments: Any) -> list[Node]:
        return [Node("here", "here", {"CPU": 8.0}, question(*arguments))]

    def submit(self, function: Callable[..., Any], *arguments: Any, node: str | None = None) -> int:
        self.count += 1
        self.flying[self.count] = function, pickle.dumps(arguments)
        self.most = max(self.most, len(self.flying))
        return self.count

    def wait(self, handles: Sequence[int]) -> list[int]:
        return [handles[-1]]

    def result(self, handle: int) -> Any:
        function, arguments = self.flying.pop(handle)
        return function(*pickle.loads(arguments))

    def cancel(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.flying.pop(handle)
