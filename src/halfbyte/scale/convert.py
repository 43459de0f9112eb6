"""`run_on_cluster`: a conversion whose shards are written by the nodes of a cluster.

The driver has the plan, the lock and the journal. Tasks get parts of the plan and write shards under names of their
own; the driver alone renames them and writes them down. So a task may die, run twice, or go on when nobody waits for it
any more: no other file is touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from halfbyte.checkpoint.execute.bad_values import Bad, refuse
from halfbyte.checkpoint.execute.conversion import Outcome, Resources, finish, sizes_for
from halfbyte.checkpoint.execute.destination import check_destination, only_one, open_destination
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.journal import Journal, work_folder
from halfbyte.checkpoint.execute.locks import FileLock
from halfbyte.checkpoint.execute.pool import Event, shard_bytes
from halfbyte.checkpoint.execute.ranks import Rank, guarded
from halfbyte.checkpoint.execute.target_device import CPU, placed
from halfbyte.checkpoint.execute.writer import disk_error
from halfbyte.checkpoint.plan.types import Plan
from halfbyte.errors import CheckpointError, UnsupportedError
from halfbyte.scale.cluster import Cluster, Node
from halfbyte.scale.in_flight import InFlight
from halfbyte.scale.parts import Part, Parts
from halfbyte.scale.tasks import Written, remove_attempts, see, write_part

TOKEN = "driver-{}.token"
"""A file by which a node shows that it sees the driver's work folder."""

Report = Callable[[Event], None]


def run_on_cluster(
    plan: Plan,
    destination: Path,
    cluster: Cluster,
    resources: Resources | None = None,
    overwrite: bool = False,
    report: Report = lambda event: None,
) -> Outcome:
    """Write the checkpoint that a plan describes on the nodes of a cluster, or continue one that was begun.

    The bytes are those of `run`. resources: of each task.
    """
    resources = resources or Resources(workers=1)
    if plan.calibrated is not None and resources.device != CPU:
        raise UnsupportedError(
            "--engine ray computes gptq and hessian on the CPU of its nodes; leave out --num-gpus-per-task, or use "
            "--rank on machines with GPUs"
        )
    plan = placed(plan, CPU)
    sizes_for(plan, resources)  # raises if a task has too little memory
    cluster.places()  # raises if no node can run one
    check_destination(plan.source, destination)
    disk = Disk(resources.sync)
    try:
        with only_one(destination, disk):
            journal = open_destination(plan, destination, overwrite, disk)
            if journal is None:
                return Outcome(0, len(plan.shards), finished_before=True)
            with _driving(work_folder(destination)):
                return _Driver(plan, destination.absolute(), cluster, journal, resources, report).run()
    except OSError as error:
        raise disk_error(error, destination) from error


@contextmanager
def _driving(work: Path) -> Iterator[None]:
    """Hold the lock of a single rank, which drivers and ranks on other machines see too."""
    rank = Rank(0, 1)
    lock = FileLock(work / f"{rank.name}.lock")
    with guarded(work):
        if not lock.take():
            raise CheckpointError(f"another conversion into {work.parent} is running; wait for it or stop it")
    try:
        yield
    finally:
        lock.release()


class _Driver:
    """One conversion on a cluster."""

    def __init__(
        self,
        plan: Plan,
        destination: Path,
        cluster: Cluster,
        journal: Journal,
        resources: Resources,
        report: Report,
    ) -> None:
        self.plan, self.destination, self.cluster, self.journal = plan, destination, cluster, journal
        self.resources, self.report = resources, report
        self.work, self.disk = work_folder(destination), journal.disk
        self.total = sum(map(shard_bytes, plan.shards))
        self.done = sum(shard_bytes(shard) for shard in plan.shards if shard.name in journal.finished)
        self.bad: dict[str, Bad] = {}
        self.on_cpu = 0
        self.parts = Parts(plan)

    def run(self) -> Outcome:
        found = len(self.journal.finished)
        remove_attempts(self.work, None, self.disk)
        self.report(Event("begin", self.done, self.total))
        left = [shard for shard in self.plan.shards if shard.name not in self.journal.finished]
        if left:
            where = Where(self._ask(), self.parts.plan, self.cluster)
            self._write(self.parts.cut(left, self.cluster.places()), where)
        refuse(self.bad)
        finish(self.plan, self.destination, self.journal, self.report)
        self.report(Event("end", self.total, self.total))
        return Outcome(len(self.plan.shards) - found, found, pieces_on_cpu=self.on_cpu)

    def _ask(self) -> list[Node]:
        """What every node sees of the files."""
        token = TOKEN.format(os.urandom(4).hex())
        (self.work / token).touch()
        try:
            return self.cluster.ask_all(see, self.parts.plan.source, self.plan.files, self.work, token)
        finally:
            (self.work / token).unlink()

    def _write(self, cut: Sequence[tuple[str, ...]], where: Where) -> None:
        resources = self.resources
        flights = InFlight(
            self.cluster,
            write_part,
            lambda part: (part, self.work, resources, resources.sync),
            where.nodes,
        )
        error = ""
        with closing(flights.run(self.parts.make(names) for names in cut)) as landing:
            for landed in landing:
                if landed is None:
                    self.report(Event("progress", self.done, self.total))
                    continue
                part, written = landed
                self._take(part, written)
                if written.error and not error:
                    error = written.error
                    flights.stopped = True  # what runs comes to its end, and is kept
        if error:
            raise CheckpointError(error)

    def _take(self, part: Part, written: Written) -> None:
        """Give the shards of a task their names in the work folder, and write them down."""
        self.bad |= written.bad
        self.on_cpu += written.on_cpu
        for done in written.finished:
            path = self.work / f"{done.name}{written.tag}"
            if not path.is_file() or path.stat().st_size != done.size:
                raise CheckpointError(
                    f"a node wrote {path.name}, but this machine does not see it as it was written; DST must be on a "
                    "file system that all nodes share"
                )
            self.disk.rename(path, self.work / done.name)
        self.disk.flush_folder(self.work)
        for done in written.finished:
            self.journal.add(done)
            self.done += sum(shard_bytes(shard) for shard in part.shards if shard.name == done.name)
            self.report(Event("shard", self.done, self.total, done.name))


class Where:
    """On which nodes a part can be written: those that see the work folder and hold the files that it reads."""

    def __init__(self, nodes: Sequence[Node], plan: Plan, cluster: Cluster) -> None:
        self._cluster, self._source = cluster, plan.source
        every = {file.name for file in plan.files}
        self._seen = {node.id: node.seen for node in nodes if node.seen.work}
        self._hosts = [node.host for node in nodes]
        if not self._seen:
            raise CheckpointError(
                f"none of {len(nodes)} nodes sees the work folder in DST; give a DST on a file system that they share"
            )
        self.everywhere = len(self._seen) == len(nodes) and all(seen.files >= every for seen in self._seen.values())
        """Whether all nodes see everything: then Ray chooses."""

    def nodes(self, part: Part) -> list[str] | None:
        """The nodes for a part; None: any."""
        if self.everywhere:
            return None
        holding = {node for node, seen in self._seen.items() if seen.files >= part.files}
        alive = {node.id for node in self._cluster.nodes()}
        if not holding & alive:
            missing = sorted(part.files - frozenset().union(*(seen.files for seen in self._seen.values())))
            what = f"{missing[0]} is" if missing else f"{', '.join(sorted(part.files)[:3])} are not together"
            raise CheckpointError(
                f"{what} on no node that is alive and sees DST, as {self._source} has it here (size and time count); "
                "copy it there, or give a SRC that all nodes share"
            )
        return sorted(holding & alive)
