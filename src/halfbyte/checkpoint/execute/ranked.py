"""`run_rank`: the share of one rank. `finish_ranks`: what is left when all of them are done.

Ranks do not talk to each other; they meet in the work folder of a file system that all of them see. The last one that
ends gives the files their final names. If it cannot, because it was killed for example, `finish_ranks` does it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from halfbyte.checkpoint.execute import conversion
from halfbyte.checkpoint.execute.conversion import Outcome, Resources, prepare, write_shards
from halfbyte.checkpoint.execute.destination import (
    check_destination,
    examine,
    forget_lost,
    locked,
    only_one,
)
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.ending import Ending
from halfbyte.checkpoint.execute.journal import Journal, work_folder
from halfbyte.checkpoint.execute.locks import FileLock
from halfbyte.checkpoint.execute.manifest import read_manifest
from halfbyte.checkpoint.execute.pool import Event, Into
from halfbyte.checkpoint.execute.ranks import Rank, absorb, guarded, load_all, rank_journals, running_ranks, share_of
from halfbyte.checkpoint.execute.replacing import without_overwrite
from halfbyte.checkpoint.execute.target_device import placed
from halfbyte.checkpoint.execute.writer import disk_error
from halfbyte.checkpoint.plan.types import Plan
from halfbyte.errors import CheckpointError

LISTED = 3
"""Shards and ranks that an error names."""

Report = Callable[[Event], None]


def run_rank(
    plan: Plan,
    destination: Path,
    rank: Rank,
    resources: Resources | None = None,
    report: Report = lambda event: None,
) -> Outcome:
    """Write the shards of one rank, or continue; close the conversion if all other ranks are done too.

    The bytes are those of `run`, however many ranks there are.
    """
    resources = resources or Resources()
    plan = placed(plan, resources.device)
    prepared = prepare(plan, resources)
    check_destination(plan.source, destination)
    disk = Disk(resources.sync)
    shards = share_of(plan, rank)
    with _errors(destination):
        disk.make_folders(destination)
        with _begun(plan, destination, rank, disk) as journal:
            if journal is None:
                return Outcome(0, len(plan.shards), finished_before=True)
            found = sum(shard.name in journal.finished for shard in shards)
            total, acts = write_shards(plan, Into(work_folder(destination), journal, shards), prepared, report)
            acts.bad.refuse()
        complete, missing = _close_if_last(plan, destination, disk, report)
        report(Event("end", total, total))
    return Outcome(len(shards) - found, found, False, acts.on_cpu, complete, missing)


def finish_ranks(destination: Path, sync: bool = True, report: Report = lambda event: None) -> Outcome:
    """Give all files their final names, from what the ranks left. Raises if a rank is running or a shard missing."""
    disk = Disk(sync)
    if not destination.is_dir():
        raise CheckpointError(f"{destination} is not there; give the DST of `halfbyte convert --rank …`")
    work = work_folder(destination)
    with _errors(destination), only_one(destination, disk):
        journal, ending = load_all(work, disk), Ending.read(work)
        if not journal.first:
            manifest = read_manifest(destination)
            if manifest is None:
                raise CheckpointError(f"{destination} holds no conversion that ranks have begun")
            return Outcome(0, len(manifest["shards"]), finished_before=True)
        if ending is None or ending.fingerprint != journal.first.get("fingerprint"):
            raise CheckpointError(
                f"{destination} holds an unfinished conversion that was begun without --rank; run its command again"
            )
        missing = _missing(ending, journal, destination)
        if missing:
            raise CheckpointError(_what_is_missing(destination, missing, rank_journals(work, disk)))
        absorb(ending, journal)
        _finish(ending, destination, journal, report)
        return Outcome(0, len(ending.shards))


@contextmanager
def _errors(destination: Path) -> Iterator[None]:
    """Errors in words for those who run ranks."""
    try:
        with without_overwrite(destination):
            yield
    except OSError as error:
        raise disk_error(error, destination) from error


@contextmanager
def _begun(plan: Plan, destination: Path, rank: Rank, disk: Disk) -> Iterator[Journal | None]:
    """The journal of a rank, whose lock is held as long as the block lasts. None: all is finished already."""
    work = work_folder(destination)
    own = FileLock(work / f"{rank.name}.lock")
    with ExitStack() as held:
        held.callback(own.release)  # given up last: whoever finds it free finds the folder free as well
        while True:
            if read_manifest(destination) is not None and _examine(plan, destination, disk) is None:
                yield None  # nothing is left behind in a finished conversion
                return
            disk.make_folders(work)
            with guarded(work) as there:
                if not there:
                    continue
                held.enter_context(locked(destination, shared=True))
                _refuse_others(rank, running_ranks(work), destination)
                found = _examine(plan, destination, disk)
                if found is not None:
                    journal = _open_journal(plan, rank, own, found)
            break
        yield None if found is None else journal


def _open_journal(plan: Plan, rank: Rank, own: FileLock, found: Journal) -> Journal:
    """The journal of a rank, new or continued. `finished` has what others finished too."""
    work, disk = found.path.parent, found.disk
    if not own.take():
        raise CheckpointError(f"{rank} is running already in {work.parent}; start each rank once")
    journal = Journal.load(work / f"{rank.name}.jsonl", disk)
    if not journal.first:
        share = [shard.name for shard in share_of(plan, rank)]
        journal = Journal.start(journal.path, disk, plan, {"rank": [rank.number, rank.of], "share": share})
    ending = Ending.read(work)
    if ending is None or ending.fingerprint != plan.fingerprint:
        Ending.of(plan).write(work, disk)
    journal.finished = dict(found.finished)
    return journal


def _examine(plan: Plan, destination: Path, disk: Disk) -> Journal | None:
    """What was finished by anyone. None if the whole conversion is. Raises if it is one of other options."""
    found = examine(plan, destination, False, disk)
    if found.finished:
        return None
    if found.journal.first and not found.journal.continues(plan):
        raise CheckpointError(
            f"{destination} holds a conversion that was begun with other modules kept. Give every rank the same "
            "options. To change them, run the command once without --rank: it uses the shards that stay the same"
        )
    found.journal.finished = dict(found.usable)
    return found.journal


def _refuse_others(rank: Rank, running: list[Rank], destination: Path) -> None:
    if rank in running:
        raise CheckpointError(f"{rank} is running already in {destination}; start each rank once")
    for other in running:
        if other.of != rank.of:
            raise CheckpointError(
                f"{other} is running in {destination}, and this is {rank}; give every rank the same --world-size"
            )


def _close_if_last(plan: Plan, destination: Path, disk: Disk, report: Report) -> tuple[bool, int]:
    """Close the conversion if no rank is running and every shard is there. Whether it is closed; shards missing."""
    work = work_folder(destination)
    if not work.is_dir():
        return True, 0  # another one has closed it already
    with guarded(work) as there:
        if not there:
            return True, 0
        journal = load_all(work, disk)
        missing = _missing(plan, journal, destination)
        if missing or running_ranks(work):
            return False, len(missing)
        with locked(destination):
            absorb(plan, journal)
            _finish(plan, destination, journal, report)
    return True, 0


def _finish(plan: Plan | Ending, destination: Path, journal: Journal, report: Report) -> None:
    """Close. A rank that comes late may put its lock into the work folder while that is removed."""
    try:
        conversion.finish(plan, destination, journal, report)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY or read_manifest(destination) is None:
            raise
        journal.disk.remove_tree(work_folder(destination))
        journal.disk.flush_folder(destination)


def _missing(plan: Plan | Ending, journal: Journal, destination: Path) -> list[str]:
    manifest = read_manifest(destination)
    forget_lost(journal, destination, finals=manifest is None or manifest["fingerprint"] == plan.fingerprint)
    return [shard.name for shard in plan.shards if shard.name not in journal.finished]


def _what_is_missing(destination: Path, missing: list[str], journals: dict[Rank, Journal]) -> str:
    """Which shards are missing, and whose they are."""
    size = max((rank.of for rank in journals), default=0)
    begun = {rank: set(journal.first.get("share") or ()) for rank, journal in journals.items() if rank.of == size}
    late = [rank.number for rank, share in begun.items() if share & set(missing)]
    absent = [number for number in range(size) if Rank(number, size) not in begun]
    count = "1 shard is" if len(missing) == 1 else f"{len(missing)} shards are"
    parts = [f"{count} missing in {destination} ({_listed(missing)})"]
    if late:
        parts.append(f"not done: rank {_listed(late)} of {size}")
    if absent:
        parts.append(f"never begun: rank {_listed(absent)} of {size}")
    return "; ".join(parts) + ". Run these ranks again, or the same command without --rank"


def _listed(items: list[str] | list[int]) -> str:
    return ", ".join(map(str, items[:LISTED])) + (", …" if len(items) > LISTED else "")
