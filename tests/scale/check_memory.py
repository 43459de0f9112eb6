"""The driver's memory with 60,000 tensors: it is that of the plan, whatever the number of tasks. `make test-scale`."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from halfbyte.checkpoint import Event, Options, make_plan
from halfbyte.scale import convert
from halfbyte.scale.cluster import Cluster, Node, Settings
from halfbyte.scale.tasks import Seen, Written, write_part
from tests.checkpoint.execute.scenes import ONE
from tests.checkpoint.toy import write_checkpoint

LAYERS, EXPERTS, SHARDS = 20, 1000, 120
ALLOWED = 128 << 20
"""Bytes that it may grow by: the hashes of 180,000 output tensors, the manifest, a few parts, and the buffers of the
tasks, which run in this process here. Measured: 91 MB; all parts at once would be as large as the plan again."""


class InProcess(Cluster):
    """A cluster of this process: tasks run as they are waited for, and what is in flight is counted."""

    def __init__(self) -> None:
        super().__init__(None, Settings())
        self.flying: dict[int, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        self.most = self.count = 0

    def nodes(self) -> list[Node]:
        return [Node("here", "here", {"CPU": 8.0})]

    def ask_all(self, question: Callable[..., Any], *arguments: Any) -> list[Node]:
        found: Seen = question(*arguments)
        return [Node("here", "here", {"CPU": 8.0}, found)]

    def submit(self, function: Callable[..., Any], *arguments: Any, node: str | None = None) -> int:
        self.count += 1
        self.flying[self.count] = function, arguments
        self.most = max(self.most, len(self.flying))
        return self.count

    def wait(self, handles: Sequence[int]) -> list[int]:
        return [handles[0]]

    def result(self, handle: int) -> Written:
        function, arguments = self.flying.pop(handle)
        assert function is write_part
        written: Written = function(*arguments)
        return written

    def cancel(self, handles: Sequence[int]) -> None:
        assert not handles


def resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_the_driver_stays_flat(tmp_path: Path) -> None:
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": np.ones((16, 16), ml_dtypes.bfloat16)
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    config = {"model_type": "qwen3_moe", "num_hidden_layers": LAYERS, "architectures": ["Qwen3MoeForCausalLM"]}
    source = write_checkpoint(tmp_path / "source", tensors, config, shards=SHARDS)
    del tensors
    plan = make_plan(source, Options(method="amax"))
    assert sum(len(shard.units) for shard in plan.shards) == 3 * LAYERS * EXPERTS
    cluster = InProcess()
    before, largest, ended = resident(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            with open("/proc/self/statm") as file:
                largest[0] = max(largest[0], int(file.read().split()[1]) * 4096)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun, shards = time.monotonic(), []

    def report(event: Event) -> None:
        if event.kind == "shard":
            shards.append(event.shard)

    try:
        convert.run_on_cluster(plan, tmp_path / "d", cluster, ONE, report=report)
    finally:
        ended.set()
        watcher.join()
    grown = largest[0] - before
    seconds = time.monotonic() - begun
    print(f"{len(shards)} shards, {cluster.most} tasks in flight, +{grown / 1e6:.0f} MB, {seconds:.0f} s")
    assert len(shards) == SHARDS
    assert cluster.most <= 16
    assert cluster.count >= 32
    assert grown < ALLOWED
