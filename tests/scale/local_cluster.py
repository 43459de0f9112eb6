"""A Ray cluster of several nodes on this machine, for tests: every node is a raylet of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CPUS = 1
STORE = 80_000_000
"""Bytes of each node's object store: parts of plans are small."""


class LocalCluster:
    """Nodes with one CPU each. The first one has the cluster's own services and cannot be removed."""

    def __init__(self, nodes: int) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        from ray.cluster_utils import Cluster

        head = {"num_cpus": CPUS, "include_dashboard": False, "object_store_memory": STORE}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self._others: dict[str, Any] = {}
        for _ in range(nodes - 1):
            self.add()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def removable(self) -> list[str]:
        """The nodes that can be removed."""
        return list(self._others)

    def add(self) -> None:
        node = self._cluster.add_node(num_cpus=CPUS, object_store_memory=STORE)
        self._others[node.node_id] = node

    def remove(self, node: str) -> None:
        """Take a node away, as if its power was cut."""
        self._cluster.remove_node(self._others.pop(node), allow_graceful=False)

    def shutdown(self) -> None:
        self._cluster.shutdown()


@contextmanager
def local_cluster(nodes: int) -> Iterator[LocalCluster]:
    """A cluster to which this process is connected, as long as the block lasts."""
    import ray

    cluster = LocalCluster(nodes)
    try:
        ray.init(
            cluster.address,
            logging_level=logging.ERROR,
            log_to_driver=False,
            configure_logging=False,
        )
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
