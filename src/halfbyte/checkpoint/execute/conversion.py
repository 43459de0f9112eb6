"""`run` executes a Plan in bounded memory. No file gets its final name before it is complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from halfbyte.backends.threads import thread_count
from halfbyte.checkpoint.execute.calibrated import Calibrator, SolvedCodes
from halfbyte.checkpoint.execute.closing import close
from halfbyte.checkpoint.execute.destination import check_destination, only_one, open_destination
from halfbyte.checkpoint.execute.device.cards import CardSolver
from halfbyte.checkpoint.execute.device.protocol import STAGED
from halfbyte.checkpoint.execute.device.sizes import DevicePlan, Limits, most_lanes, plan_devices, worker_memory
from halfbyte.checkpoint.execute.device.work import DeviceWork
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.ending import Ending
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.journal import Journal, work_folder
from halfbyte.checkpoint.execute.pieces import SLACK, Sizes, largest_piece, widened_bytes
from halfbyte.checkpoint.execute.pool import Event, Into, Pool, check_unchanged
from halfbyte.checkpoint.execute.solving import HostSolver, Solver, share_memory
from halfbyte.checkpoint.execute.target_device import CPU, numbers_of, open_cards, open_devices, placed
from halfbyte.checkpoint.execute.tasks import Tasks
from halfbyte.checkpoint.execute.unit import UnitWork
from halfbyte.checkpoint.execute.writer import disk_error
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.plan.types import Plan
from halfbyte.errors import InputError
from halfbyte.subnormals import subnormals_kept

CHUNK = 32 << 20
"""Source bytes per piece: enough to make the fixed cost of a call negligible."""

PARTS = (4, 8, 16)
"""A piece has at most one of so many parts of a worker's memory; the first that leaves room for what is made of it."""

DEFAULT_MEMORY = 2 << 30


@dataclass(frozen=True)
class Resources:
    """What a run may use. Nothing here changes an output byte."""

    workers: int | None = None
    """None: HALFBYTE_THREADS, or the processors there are."""
    max_memory: int | None = None
    """Bytes for buffers and for factors of statistics. None: 2 GiB for buffers, and what factors need besides."""
    device: str = "cpu"
    """cpu, cuda (all that are visible), cuda:0, cuda:0,2."""
    device_reason: str = ""
    """Why that one, if nobody asked for it; for people."""
    max_gpu_memory: int | None = None
    """Bytes per device; None: a quarter of what is free, at most 8 GiB."""
    sync: bool = True
    """Whether each shard is flushed to disk before it counts as done. Without that, a power cut may lose shards."""
    chunk: int = CHUNK


@dataclass(frozen=True)
class Outcome:
    """What a run did."""

    shards_written: int
    shards_found: int
    """Shards that were complete when the run began."""
    finished_before: bool = False
    """The destination held the result of the same plan already."""
    pieces_on_cpu: int = 0
    """Pieces that were computed on the CPU because no GPU had memory left for them."""
    complete: bool = field(default=True, repr=False)
    """Whether the destination is. Otherwise other ranks have work to do, or are about to close it."""
    shards_missing: int = field(default=0, repr=False)
    """Shards that other ranks have to write."""


def sizes_for(plan: Plan, resources: Resources, devices: int | None = None) -> tuple[Sizes, int]:
    """How to cut the work so that it fits the memory, and how many workers to use.

    devices: how many were opened; None: as many as the resources ask for.
    """
    memory, _ = shared_memory(plan, resources)
    devices = cards_of(resources) if devices is None else devices
    for workers in range(thread_count(resources.workers), 0, -1):
        arena = worker_memory(memory, workers, most_lanes(workers, devices))
        sizes, needed = _cut(plan, resources.chunk, arena)
        if needed <= sizes.arena:
            return sizes, workers
    limit = resources.max_memory or memory
    left = f", and {memory:,} are left beside the factors of statistics" if plan.calibrated is not None else ""
    if devices:
        left += f", and GPUs read files through {devices * STAGED:,} of their own"
    text = f"--max-memory {limit:,} is too little: a piece of the largest tensor needs {needed:,} bytes{left}"
    while needed > sizes.arena:
        limit += 2 * (needed - sizes.arena)
        memory, _ = shared_memory(plan, replace(resources, max_memory=limit))
        sizes, needed = _cut(plan, resources.chunk, worker_memory(memory, 1, devices))
    raise InputError(f"{text}; {limit:,} are enough")


def _cut(plan: Plan, most: int, arena: int) -> tuple[Sizes, int]:
    """Sizes for one worker's memory, and what is needed of it."""
    for part in PARTS:
        chunk = max(1, min(most, arena // part))
        needed = max((largest_piece(unit, chunk) for unit in plan.units), default=0) + SLACK
        if plan.calibrated is not None:
            needed += max((widened_bytes(unit, chunk) for unit in plan.units), default=0)
        if needed <= arena:
            break
    return Sizes(chunk, arena), needed


def shared_memory(plan: Plan, resources: Resources) -> tuple[int, int]:
    """Bytes of memory for the buffers of workers and lanes, and for factors of statistics."""
    return share_memory(plan, resources.max_memory, DEFAULT_MEMORY, cards_of(resources))


def cards_of(resources: Resources) -> int:
    """How many GPUs are asked for. All that are visible count as one until they are known by their numbers."""
    return len(numbers_of(resources.device)) or (0 if resources.device == CPU else 1)


def staged_memory(resources: Resources, workers: int) -> int:
    """Bytes of the pinned buffers through which GPUs read files, at most."""
    return most_lanes(workers, cards_of(resources)) * STAGED


@dataclass(frozen=True)
class Prepared:
    """What computes the shards of a plan, and how the work is cut."""

    engine: Engine
    devices: DevicePlan | None
    sizes: Sizes
    workers: int
    solver: Solver | None = None


def prepare(plan: Plan, resources: Resources) -> Prepared:
    """Open the devices, and cut the work so that it fits them. Nothing is written."""
    engine = Engine(plan.format, plan.contract, plan.method, plan.repairs)
    buffers, factors = shared_memory(plan, resources)
    found = open_devices(resources.device, plan, engine)
    sizes, workers = sizes_for(plan, resources, len(found))
    limits = Limits(buffers, resources.max_gpu_memory, resources.chunk)
    devices = plan_devices(found, engine, plan.units, workers, limits) if found else None
    solver: Solver | None = None
    if plan.calibrated is not None:
        cards = open_cards(resources.device, plan, engine)
        solver = HostSolver(plan.calibrated, engine, factors)
        if cards:
            solver = CardSolver(plan, engine, cards, resources.max_gpu_memory)
    return Prepared(engine, devices, sizes if devices is None else devices.sizes, workers, solver)


def run(
    plan: Plan,
    destination: Path,
    resources: Resources | None = None,
    overwrite: bool = False,
    report: Callable[[Event], None] = lambda event: None,
) -> Outcome:
    """Write the checkpoint that a plan describes, or continue one that was begun.

    On any error, and when interrupted, finished shards stay in the work folder and nothing stands under a final name.
    """
    resources = resources or Resources()
    plan = placed(plan, resources.device)
    prepared = prepare(plan, resources)
    check_destination(plan.source, destination)
    disk = Disk(resources.sync)
    try:
        with only_one(destination, disk):
            journal = open_destination(plan, destination, overwrite, disk)
            if journal is None:
                return Outcome(0, len(plan.shards), finished_before=True)
            found = len(journal.finished)
            total, acts = write_shards(plan, Into(work_folder(destination), journal, plan.shards), prepared, report)
            acts.bad.refuse()
            finish(plan, destination, journal, report)
            report(Event("end", total, total))
            return Outcome(len(plan.shards) - found, found, pieces_on_cpu=acts.on_cpu)
    except OSError as error:
        raise disk_error(error, destination) from error


def _codes(plan: Plan, prepared: Prepared) -> Calibrator | SolvedCodes | None:
    """Where the codes of a plan come from, if not from its weights alone."""
    if plan.solved is not None:
        return SolvedCodes(plan.solved, prepared.engine)
    if plan.calibrated is None or prepared.solver is None:
        return None
    return Calibrator(plan.calibrated, prepared.engine, prepared.solver, plan.smoothing)


def write_shards(plan: Plan, into: Into, prepared: Prepared, report: Callable[[Event], None]) -> tuple[int, UnitWork]:
    """Write the shards that the journal does not list. The source bytes of all of them, and who computed them."""
    engine, devices = prepared.engine, prepared.devices
    files = Files({file.name: str(plan.source / file.name) for file in plan.files})
    acts = UnitWork(files, engine, _codes(plan, prepared)) if devices is None else DeviceWork(files, engine, devices)
    acts.workers = prepared.workers
    try:
        pool = Pool(plan, Tasks(plan, acts, prepared.sizes), into, report)
        report(Event("begin", pool.done, pool.total))
        with subnormals_kept():
            pool.work(prepared.workers)
    finally:
        files.close()
        if prepared.solver is not None:
            prepared.solver.close()
        if devices is not None:
            devices.lanes.close()
    return pool.total, acts


def finish(plan: Plan | Ending, destination: Path, journal: Journal, report: Callable[[Event], None]) -> None:
    """Give all files their final names, once every shard is complete."""
    check_unchanged(plan)
    close(plan, destination, journal, lambda done, total: report(Event("close", done, total)))
