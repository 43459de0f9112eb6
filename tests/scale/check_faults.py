"""Twenty random fault schedules on a real cluster: `make test-scale`.

A schedule is drawn from its seed: which faults, how many, at which write. Whatever happens, a run ends well or with a
message that says how to go on; and after enough runs the bytes are those of one machine.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfbyte.checkpoint import run
from tests.checkpoint.execute.scenes import ONE, plan_of, small_source
from tests.checkpoint.toy import all_bytes
from tests.scale.faults import KINDS, Folder
from tests.scale.local_cluster import LocalCluster, local_cluster

ROOT = Path(__file__).parents[2]
SEEDS = range(20)
SHARDS = 9
NODES = 3
RUNS = 12
"""More than any schedule needs: each fault stops at most one run."""
CLEAR = re.compile(
    r"no space left for .*make room and run the same command again"
    r"|a task (failed|was lost) \d+ times.*the same command continues from there"
    r"|another conversion into .* is running"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(NODES) as found:
        yield found


def drawn(seed: int, faults: Folder) -> list[str]:
    """Plant the faults of a schedule."""
    chance = random.Random(seed)
    kinds = [chance.choice(KINDS) for _ in range(chance.randint(1, 5))]
    for number, kind in enumerate(kinds):
        faults.plant(f"{number} {kind}", writes=chance.randint(1, 4))
    return kinds


def drive(cluster: LocalCluster, source: Path, destination: Path, faults: Folder) -> tuple[int, str]:
    """One driver in a process of its own: its exit status and its last line. Nodes are removed when a task says so."""
    command = [
        sys.executable,
        "-m",
        "tests.scale.driver",
        cluster.address,
        *map(str, (source, destination, faults.path)),
    ]
    said = faults.path / "said"
    with said.open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=log)
    try:
        until = time.monotonic() + 180
        while process.poll() is None:
            assert time.monotonic() < until, "the driver hangs"
            for node, name in faults.asked():
                if node in cluster.removable:
                    cluster.remove(node)
                    faults.note(f"removed {node}")
                    cluster.add()
                faults.answer(name)
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    lines = said.read_text().strip().splitlines()
    return process.returncode, lines[-1] if lines else ""


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_schedule(tmp_path: Path, cluster: LocalCluster, seed: int) -> None:
    source = small_source(tmp_path / "source", shards=SHARDS)
    run(plan_of(source), tmp_path / "one machine", ONE)
    faults = Folder(tmp_path / "faults")
    kinds = drawn(seed, faults)
    for _ in range(RUNS):
        status, said = drive(cluster, source, tmp_path / "d", faults)
        if status == 0:
            break
        assert status == -signal.SIGKILL or CLEAR.search(said), f"{kinds}: {said}"
        time.sleep(0.2)
    else:
        pytest.fail(f"{kinds}: not done after {RUNS} runs: {said}")
    happened = [name for name in faults.notes() if name.startswith((*KINDS, "removed"))]
    print(f"seed {seed}: {', '.join(kinds)}; happened: {', '.join(sorted(happened))}")
    assert happened, "a schedule without a fault"
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "one machine"), kinds
