"""The driver's memory with 60,000 tensors: it is that of the plan, whatever the number of tasks. `make test-scale`."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from halfbyte.checkpoint import Event, Options, make_plan
from halfbyte.scale import convert
from tests.checkpoint.execute.scenes import ONE
from tests.checkpoint.toy import write_checkpoint
from tests.scale.in_process import InProcess

LAYERS, EXPERTS, SHARDS = 20, 1000, 120
ALLOWED = 128 << 20
"""Bytes that it may grow by: the hashes of 180,000 output tensors, the manifest, a few parts, and the buffers of the
tasks, which run in this process here. Measured: 91 MB; all parts at once would be as large as the plan again."""


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
