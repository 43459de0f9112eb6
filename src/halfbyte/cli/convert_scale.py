"""`halfbyte convert` on more than one machine: as one of several ranks, or on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from halfbyte.checkpoint import Event, Outcome, Plan, Resources, run
from halfbyte.checkpoint.execute.device.choice import Choice
from halfbyte.checkpoint.execute.launchers import resolve_rank
from halfbyte.checkpoint.execute.ranked import run_rank
from halfbyte.checkpoint.execute.ranks import Rank
from halfbyte.errors import InputError
from halfbyte.scale.cluster import Settings, connect
from halfbyte.verify.parallel import InOrder, in_order

RAY = "ray"
LOCAL = "local"

EngineOption = Annotated[
    str,
    typer.Option(
        "--engine", metavar="local|ray", help="local: this process. ray: the nodes of a Ray cluster (halfbyte[ray])."
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="auto|local|HOST:PORT",
        help="With --engine ray: which cluster. auto: the running one. local: one for this command, on this machine.",
    ),
]
MaxTasksOption = Annotated[
    int | None,
    typer.Option("--max-tasks", metavar="N", min=1, help="With --engine ray: tasks at once. Default: 2 per place."),
]
GpusOption = Annotated[
    float | None,
    typer.Option("--num-gpus-per-task", metavar="F", min=0, help="With --engine ray: GPUs of each task, such as 0.5."),
]
RankOption = Annotated[
    str | None,
    typer.Option(
        "--rank",
        metavar="R|auto",
        help="Write only the share of process R, counted from 0. auto: what torchrun, Kubernetes or Slurm says.",
    ),
]
WorldSizeOption = Annotated[
    int | None, typer.Option("--world-size", metavar="N", min=1, help="With --rank: the number of processes.")
]


@dataclass(frozen=True)
class Scale:
    """Where a conversion runs."""

    rank: Rank | None = None
    cluster: Settings | None = None

    def run(
        self,
        plan: Plan,
        destination: Path,
        resources: Resources,
        overwrite: bool,
        report: Callable[[Event], None],
    ) -> Outcome:
        if self.rank is not None:
            return run_rank(plan, destination, self.rank, resources, report)
        if self.cluster is None:
            return run(plan, destination, resources, overwrite, report)
        from halfbyte.scale.convert import run_on_cluster

        with connect(self.cluster) as cluster:
            return run_on_cluster(plan, destination, cluster, resources, overwrite, report)


def resolve_rank_options(rank: str | None, world_size: int | None, refused: dict[str, bool]) -> Rank | None:
    """The rank that the options mean. refused: options that cannot stand beside --rank, and whether they were given."""
    if rank is None:
        if world_size is not None:
            raise InputError("--world-size belongs to --rank R, or --rank auto")
        return None
    for option, given in refused.items():
        if given:
            raise InputError(f"{option} does not go with --rank: {REASONS[option]}")
    found, _ = resolve_rank(rank, world_size, os.environ)
    return found


REASONS = {
    "--overwrite": "several processes cannot replace a conversion. Delete DST first, or give another one",
    "--calibrate": "solving is one process's work. Run `halfbyte calibrate` first, then give --stats to every rank",
    "--engine ray": "a Ray cluster shares the work itself. Give one or the other",
    "--check-load": "only the last rank has a whole DST. Run `halfbyte verify DST --load` afterwards",
}


def resolve_cluster(
    engine: str,
    address: str | None,
    gpus: float | None,
    max_tasks: int | None,
    cpus: int = 1,
    memory: int = 0,
) -> Settings | None:
    """The cluster that the options mean; None: none."""
    if engine not in (LOCAL, RAY):
        raise InputError(f"unknown --engine {engine!r}; known: {LOCAL}, {RAY}")
    if engine == LOCAL:
        given = {"--address": address, "--num-gpus-per-task": gpus, "--max-tasks": max_tasks}
        for option, value in given.items():
            if value is not None:
                raise InputError(f"{option} belongs to --engine ray")
        return None
    return Settings(address or "auto", cpus, gpus or 0, memory, max_tasks)


def device_of_tasks(device: str, settings: Settings) -> Choice:
    """Where tasks compute: on the GPUs that Ray gives them, or on the CPU."""
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device {device} with --engine ray: Ray chooses the GPUs; use --num-gpus-per-task")
    if settings.gpus and device == "cpu":
        raise InputError("--device cpu does not go with --num-gpus-per-task")
    if device == "cuda" and not settings.gpus:
        raise InputError("--device cuda with --engine ray needs --num-gpus-per-task, such as 1 or 0.5")
    if settings.gpus:
        return Choice("cuda", f"{settings.gpus:g} GPUs per task")
    return Choice("cpu", "Ray tasks without GPUs")


@contextmanager
def checked_by(settings: Settings | None) -> Iterator[InOrder]:
    """Who checks the tensors of `halfbyte verify`: the threads of this process, or a cluster."""
    if settings is None:
        yield in_order
        return
    from halfbyte.scale.checks import checks_on

    with connect(settings) as cluster:
        yield checks_on(cluster)
