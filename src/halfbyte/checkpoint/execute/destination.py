"""The output directory before work: refused, begun, continued from its journal, or found finished."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.execute.closing import remove_begun, take_back
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.journal import JOURNAL, Finished, Journal, work_folder
from halfbyte.checkpoint.execute.manifest import read_manifest
from halfbyte.checkpoint.execute.ranks import GUARD, absorb, guarded, load_all, running_ranks
from halfbyte.checkpoint.execute.replacing import ReplaceError
from halfbyte.checkpoint.io.files import stat_of
from halfbyte.checkpoint.io.index import MANIFEST
from halfbyte.checkpoint.plan.types import Plan
from halfbyte.errors import CheckpointError


def check_destination(source: Path, destination: Path) -> None:
    """Raise if the destination is the source, lies inside it, contains it, or is not a directory."""
    here, there = _resolved(destination), _resolved(source)
    if here == there:
        raise CheckpointError(f"{destination} is the source itself; give another directory")
    if there in here.parents:
        raise CheckpointError(f"{destination} lies inside the source {source}; give a directory outside")
    if here in there.parents:
        raise CheckpointError(f"{destination} holds the source {source}; give a directory of its own")
    if destination.exists() and not destination.is_dir():
        raise CheckpointError(f"{destination} is a file; give a directory")


def _resolved(path: Path) -> Path:
    """The path without links."""
    try:
        return path.resolve()
    except (RuntimeError, OSError) as error:  # RuntimeError: links in a circle
        raise CheckpointError(f"{path} is no path that can be followed: {error}") from error


@contextmanager
def only_one(destination: Path, disk: Disk) -> Iterator[None]:
    """Lock the destination against a second conversion. The lock is on the folder and ends with the process."""
    disk.make_folders(destination)
    with locked(destination):
        _refuse_ranks(destination)
        yield


def _refuse_ranks(destination: Path) -> None:
    """Raise if ranks are working there, on whatever machine."""
    work = work_folder(destination)
    if not (work / GUARD).exists():
        return
    with guarded(work):
        running = running_ranks(work)
    if running:
        listed = ", ".join(map(str, running[:3])) + (", …" if len(running) > 3 else "")
        raise CheckpointError(f"another conversion into {destination} is running ({listed}); wait for it or stop it")


@contextmanager
def locked(folder: Path, shared: bool = False) -> Iterator[None]:
    """Lock a folder, alone or together with others that share it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"another conversion into {folder} is running; wait for it or stop it") from error
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be locked against a second conversion: {error.strerror}; give a directory on another "
                "file system"
            ) from error
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Found:
    """What a destination holds, as far as it matters to a plan."""

    journal: Journal
    """Of an unfinished conversion; without a first line if there is none."""
    usable: dict[str, Finished] = field(default_factory=dict)
    """Shards of it that the plan would write just so."""
    continued: bool = False
    """Whether work goes on from the journal."""
    finished: bool = False
    """The result of the same plan is there already."""


def examine(plan: Plan, destination: Path, overwrite: bool, disk: Disk) -> Found:
    """What the destination holds. Raises if it will be refused. Nothing is changed."""
    journal = load_all(work_folder(destination), disk)
    manifest = read_manifest(destination)
    if journal.first:
        found = _begun(plan, destination, journal, manifest, overwrite)
        if found is not None:
            _check_space(plan, destination, found.usable)
            return found
    if manifest is not None:
        if manifest["fingerprint"] == plan.fingerprint and not overwrite and _complete(plan, destination):
            _refuse_newer(plan, destination)
            return Found(journal, finished=True)
        if manifest["fingerprint"] == plan.fingerprint and not overwrite:
            raise ReplaceError(
                f"{destination} holds this very conversion, but a file of it is gone or was cut since",
                "; use --overwrite to make it again",
            )
        if not overwrite:
            raise ReplaceError(
                f"{destination} holds a finished conversion with other options or of another source",
                "; use --overwrite to replace it",
            )
    elif not journal.first and destination.is_dir():
        found_names = sorted(entry.name for entry in destination.iterdir() if entry != work_folder(destination))
        if found_names:
            listed = ", ".join(found_names[:3]) + (", …" if len(found_names) > 3 else "")
            raise CheckpointError(
                f"{destination} holds something else ({listed}), which halfbyte did not write; give an empty directory"
            )
    _check_space(plan, destination, {})
    return Found(journal)


def check_refusal(plan: Plan, destination: Path, overwrite: bool) -> Found:
    """What a run would find. Raises what a run would raise before it works. Nothing is changed."""
    check_destination(plan.source, destination)
    exists = _existing(destination)
    if not exists.is_dir():
        raise CheckpointError(f"{destination} cannot be written: {os.strerror(errno.ENOTDIR)}")
    if not os.access(exists, os.W_OK | os.X_OK):
        raise CheckpointError(f"{destination} cannot be written: {os.strerror(errno.EACCES)}")
    if destination.is_dir():
        with locked(destination):
            _refuse_ranks(destination)
            return examine(plan, destination, overwrite, Disk(sync=False))
    return examine(plan, destination, overwrite, Disk(sync=False))


def open_destination(plan: Plan, destination: Path, overwrite: bool, disk: Disk) -> Journal | None:
    """The journal to work with, new or continued. None if the same conversion is finished already."""
    found = examine(plan, destination, overwrite, disk)
    work, journal = work_folder(destination), found.journal
    if found.finished:
        if work.exists():  # it was stopped while it removed this folder
            disk.remove_tree(work)
            disk.flush_folder(destination)
        return None
    if found.continued:
        if journal.continues(plan):
            journal.finished = found.usable
            absorb(plan, journal)
        else:
            take_back(plan, destination, journal, found.usable)
        return journal
    if journal.first:
        remove_begun(journal, destination)
    if work.exists():
        disk.remove_tree(work)  # of another plan, or created by a run that was stopped before it had a journal
    disk.make_folders(work)
    return Journal.start(work / JOURNAL, disk, plan)


def _begun(
    plan: Plan, destination: Path, journal: Journal, manifest: dict[str, Any] | None, overwrite: bool
) -> Found | None:
    """How an unfinished conversion is continued. None if it is not: it is finished after all, or begun anew."""
    theirs = None if manifest is None else manifest["fingerprint"]
    if theirs == journal.first.get("fingerprint") and not journal.continues(plan):
        return None  # it was stopped after its last step
    try:
        journal.check(plan)
    except CheckpointError:
        if not overwrite:
            raise
        return None
    forget_lost(journal, destination, finals=theirs in (None, journal.first.get("fingerprint")))
    return Found(journal, journal.usable(plan), continued=True)


def _refuse_newer(plan: Plan, destination: Path) -> None:
    """Raise if a source file is newer than the finished conversion: headers do not show that weights changed."""
    finished = (destination / MANIFEST).stat().st_mtime_ns
    for name in (*(file.name for file in plan.files), *plan.side_files):
        if stat_of(plan.source / name).st_mtime_ns > finished:
            raise ReplaceError(
                f"{plan.source / name} changed since it was converted to {destination}",
                "; use --overwrite to convert it again",
            )


def _complete(plan: Plan, destination: Path) -> bool:
    paths = [destination / shard.name for shard in plan.shards]
    sizes = all(
        path.is_file() and path.stat().st_size == shard.size for path, shard in zip(paths, plan.shards, strict=True)
    )
    return sizes and all((destination / name).is_file() for name in (*plan.json_files, *plan.side_files))


def forget_lost(journal: Journal, destination: Path, finals: bool) -> None:
    """Drop shards from the journal that are missing or incomplete, so that they are written again.

    finals: whether files with final names are of this conversion, and not of one that it replaces.
    """
    for name, done in list(journal.finished.items()):
        places = (journal.path.parent / name, *((destination / name,) if finals else ()))
        if not any(place.is_file() and place.stat().st_size == done.size for place in places):
            del journal.finished[name]


def _check_space(plan: Plan, destination: Path, usable: dict[str, Finished]) -> None:
    needed = sum(shard.size for shard in plan.shards if shard.name not in usable)
    needed += sum(stat_of(plan.source / name).st_size for name in plan.side_files)
    work = work_folder(destination)
    if work.is_dir():  # what is written anew or removed gives its room back
        needed -= sum(_room_of(path) for path in work.iterdir() if path.name not in (*usable, JOURNAL))
    free = shutil.disk_usage(_existing(destination)).free
    if needed > free:
        raise CheckpointError(f"{destination} has {free:,} bytes free, but the output needs {needed:,} more")


def _room_of(path: Path) -> int:
    """Bytes that a file takes; 0 for a folder, and for one that another rank has given its next name meanwhile."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0
    return found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else 0


def _existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    return next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
