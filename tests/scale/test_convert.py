"""A conversion on a real cluster of three nodes, with faults: the bytes are those of one machine, in the end at least.

All of it is one test, because a cluster takes seconds to start and the parts of a test may run in different processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from halfbyte.checkpoint import Outcome, run
from halfbyte.checkpoint.execute.destination import only_one
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.io.side_files import WORK
from halfbyte.errors import CheckpointError
from halfbyte.scale import convert
from halfbyte.scale.checks import checks_on
from halfbyte.scale.cluster import Cluster, Settings, connect
from halfbyte.verify import verify
from tests.checkpoint.execute.scenes import ONE, plan_of, small_source
from tests.checkpoint.toy import all_bytes, random, write_checkpoint
from tests.scale.faults import Folder, faulty, seen_by
from tests.scale.local_cluster import LocalCluster, local_cluster

ROOT = Path(__file__).parents[2]
SHARDS = 7


class Stage:
    """A source, what one machine makes of it, and a cluster that is to make the same."""

    def __init__(self, folder: Path, local: LocalCluster, cluster: Cluster, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.local, self.cluster, self.patch = folder, local, cluster, patch
        self.source = small_source(folder / "source", shards=SHARDS)
        self.plan = plan_of(self.source)
        run(self.plan, folder / "one machine", ONE)
        self.whole = all_bytes(folder / "one machine")

    def faults(self, name: str) -> Folder:
        """A folder of faults, which tasks look into from now on."""
        self.patch.setattr(convert, "write_part", faulty(self.folder / f"{name} faults"))
        return Folder(self.folder / f"{name} faults")

    def run(self, name: str) -> Outcome:
        return convert.run_on_cluster(self.plan, self.folder / name, self.cluster, ONE)

    def check(self, name: str) -> None:
        found = all_bytes(self.folder / name)
        different = sorted(file for file in {*found, *self.whole} if found.get(file) != self.whole.get(file))
        assert not different, f"other bytes in {different}"


def undisturbed(stage: Stage) -> None:
    outcome = stage.run("undisturbed")
    assert (outcome.shards_written, outcome.shards_found) == (SHARDS, 0)
    stage.check("undisturbed")
    assert stage.run("undisturbed").finished_before


def a_worker_is_killed_in_the_middle_of_a_shard(stage: Stage) -> None:
    faults = stage.faults("killed worker")
    faults.plant("kill worker", times=2)
    stage.run("killed worker")
    assert sum(note.startswith("kill worker") for note in faults.notes()) == 2
    stage.check("killed worker")


def a_task_raises_and_is_run_again(stage: Stage) -> None:
    stage.faults("raises").plant("raise", times=2)
    stage.run("raises")
    stage.check("raises")


def a_task_that_always_raises_stops_the_job(stage: Stage) -> None:
    faults = stage.faults("always")
    faults.plant("raise", writes=1, times=100)
    with pytest.raises(CheckpointError, match=r"a task failed 5 times: .*a task that raises.* same command continues"):
        stage.run("always")
    assert {path.name for path in (stage.folder / "always").iterdir()} == {WORK}
    stage.faults("healed")
    stage.run("always")
    stage.check("always")


def a_disk_fills_up(stage: Stage) -> None:
    stage.faults("full").plant("disk full", writes=1)
    with pytest.raises(CheckpointError, match=r"no space left for .*make room and run the same command again \(on "):
        stage.run("full")
    assert {path.name for path in (stage.folder / "full").iterdir()} == {WORK}
    outcome = stage.run("full")
    assert outcome.shards_found > 0
    assert outcome.shards_found + outcome.shards_written == SHARDS
    stage.check("full")


def a_driver_is_killed_and_another_one_goes_on(stage: Stage) -> None:
    """Its lock is stale, and so are the files of its tasks."""
    faults = stage.faults("killed driver")
    faults.plant("kill driver", writes=1)
    command = [sys.executable, "-m", "tests.scale.driver", stage.local.address]
    folders = [stage.source, stage.folder / "killed driver", faults.path]
    done = subprocess.run([*command, *map(str, folders)], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    work = stage.folder / "killed driver" / WORK
    assert (work / "rank-00000-of-00001.lock").exists()
    assert list(work.glob("*.try-*.part"))
    stage.run("killed driver")
    stage.check("killed driver")


def a_second_driver_is_refused(stage: Stage) -> None:
    with (
        only_one(stage.folder / "two", Disk()),
        pytest.raises(CheckpointError, match=r"another conversion into .* is running"),
    ):
        stage.run("two")
    stage.run("two")
    stage.check("two")


def a_node_is_removed(stage: Stage) -> None:
    faults = stage.faults("removed node")
    faults.plant("remove node", writes=1, times=SHARDS)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            stage.run("removed node")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    node = stage.local.removable[0]
    removed, until = False, time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < until:
        asked = faults.asked()
        if not removed and node in [at for at, _ in asked]:
            stage.local.remove(node)
            removed = True
        for _, name in asked if removed else ():
            faults.answer(name)
        time.sleep(0.02)
    assert removed
    assert not thread.is_alive()
    assert errors == []
    stage.check("removed node")


def tasks_go_where_the_files_are(stage: Stage) -> None:
    """Two shards without partners, each on the disk of another node."""
    tensors = {f"model.layers.0.mlp.{name}.weight": random(1, 32, 32) for name in ("down_proj", "o_proj")}
    source = write_checkpoint(stage.folder / "apart", tensors, {"num_hidden_layers": 1}, shards=2)
    plan = plan_of(source)
    first, second = (shard.name for shard in plan.shards)
    nodes = sorted(node.id for node in stage.cluster.nodes())
    faults = stage.faults("apart")
    stage.patch.setattr(convert, "see", seen_by({nodes[0]: frozenset({first}), nodes[1]: frozenset({second})}))
    convert.run_on_cluster(plan, stage.folder / "apart out", stage.cluster, ONE)
    assert faults.notes() == {f"wrote {first}": nodes[0], f"wrote {second}": nodes[1]}
    stage.patch.setattr(convert, "see", seen_by({nodes[0]: frozenset({first})}))
    with pytest.raises(CheckpointError, match=f"{second} is on no node that is alive and sees DST"):
        convert.run_on_cluster(plan, stage.folder / "half", stage.cluster, ONE)
    stage.patch.setattr(convert, "see", _blind)
    with pytest.raises(CheckpointError, match="none of 3 nodes sees the work folder in DST"):
        convert.run_on_cluster(plan, stage.folder / "blind", stage.cluster, ONE)


def _blind(source: Path, files: object, work: Path, token: str) -> object:
    from halfbyte.scale.tasks import Seen

    return Seen(False, frozenset())


def a_task_that_fits_no_node_is_refused(stage: Stage) -> None:
    greedy = Cluster(stage.cluster.ray, Settings(cpus=64, gpus=0.5))
    with pytest.raises(CheckpointError, match=r"each asks for CPU 64, GPU 0\.5; all nodes together have CPU 3, GPU 0"):
        convert.run_on_cluster(stage.plan, stage.folder / "greedy", greedy, ONE)
    assert not (stage.folder / "greedy").exists()


def verify_gives_the_same_report(stage: Stage) -> None:
    """A sound checkpoint, and one with a flipped bit in a code, in a kept tensor and in a manifest's hash."""
    folder = stage.folder / "one machine"
    assert verify(folder, stage.source, each=checks_on(stage.cluster)) == verify(folder, stage.source)
    damaged = stage.folder / "damaged"
    shutil.copytree(folder, damaged)
    for shard in sorted(damaged.glob("*.safetensors")):
        data = bytearray(shard.read_bytes())
        data[-5] ^= 0x10
        shard.write_bytes(data)
    found = verify(damaged, stage.source, each=checks_on(stage.cluster))
    assert found.as_json() == verify(damaged, stage.source).as_json()
    assert len([problem for problem in found.problems if problem.level == "error"]) > SHARDS


SCENES: list[Callable[[Stage], None]] = [
    undisturbed,
    a_worker_is_killed_in_the_middle_of_a_shard,
    a_task_raises_and_is_run_again,
    a_task_that_always_raises_stops_the_job,
    a_disk_fills_up,
    a_driver_is_killed_and_another_one_goes_on,
    a_second_driver_is_refused,
    verify_gives_the_same_report,
    tasks_go_where_the_files_are,
    a_task_that_fits_no_node_is_refused,
    a_node_is_removed,
]


@pytest.mark.filterwarnings("default")
def test_on_a_cluster(tmp_path: Path, subtests: pytest.Subtests) -> None:
    assert os.environ.get("RAY_ADDRESS") is None
    with local_cluster(3) as local, connect(Settings(local.address)) as cluster:
        with pytest.MonkeyPatch.context() as patch:
            stage = Stage(tmp_path, local, cluster, patch)
        for scene in SCENES:
            with subtests.test(scene.__name__), pytest.MonkeyPatch.context() as patch:
                stage.patch = patch
                scene(stage)
