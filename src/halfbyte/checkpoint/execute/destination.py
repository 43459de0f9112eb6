"""The output directory: checked before work, continued from its journal, finished when every shard is complete."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.journal import JOURNAL, Journal, work_folder
from halfbyte.checkpoint.execute.manifest import manifest_of, read_manifest
from halfbyte.checkpoint.io.index import CONFIG, MANIFEST
from halfbyte.checkpoint.io.side_files import WORK
from halfbyte.checkpoint.plan.types import Plan
from halfbyte.errors import CheckpointError

REPLACED = "replaced"
"""Folder in the work folder for the manifest of a conversion that is being replaced."""


def check_destination(source: Path, destination: Path) -> None:
    """Raise if the destination is the source, lies inside it, contains it, or is not a directory."""
    here, there = destination.resolve(), source.resolve()
    if here == there:
        raise CheckpointError(f"{destination} is the source itself; give another directory")
    if there in here.parents:
        raise CheckpointError(f"{destination} lies inside the source {source}; give a directory outside")
    if here in there.parents:
        raise CheckpointError(f"{destination} holds the source {source}; give a directory of its own")
    if destination.exists() and not destination.is_dir():
        raise CheckpointError(f"{destination} is a file; give a directory")


@contextmanager
def only_one(destination: Path) -> Iterator[None]:
    """Lock the destination against a second conversion. The lock is on the folder and ends with the process."""
    destination.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(destination, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise CheckpointError(f"another conversion into {destination} is running; wait for it or stop it") from error
    try:
        yield
    finally:
        os.close(descriptor)


def open_destination(plan: Plan, destination: Path, overwrite: bool, disk: Disk) -> Journal | None:
    """The journal to work with, new or continued. None if the same conversion is finished already."""
    work = work_folder(destination)
    journal_path = work / JOURNAL
    journal = Journal.load(journal_path, disk)
    if journal.first:
        try:
            journal.check(plan)
        except CheckpointError:
            if not overwrite:
                raise
            _remove_begun(journal, destination)
            shutil.rmtree(work)
        else:
            _forget_lost(journal, destination)
            _check_space(plan, destination, journal)
            return journal
    elif work.exists():
        shutil.rmtree(work)  # created by a run that was stopped before it had a journal
    manifest = read_manifest(destination)
    if manifest is not None:
        if manifest["fingerprint"] == plan.fingerprint and not overwrite and _complete(plan, destination):
            _refuse_newer(plan, destination)
            return None
        if manifest["fingerprint"] == plan.fingerprint and not overwrite:
            raise CheckpointError(
                f"{destination} holds this very conversion, but a file of it is gone or was cut since; use --overwrite "
                "to make it again"
            )
        if not overwrite:
            raise CheckpointError(
                f"{destination} holds a finished conversion with other options or of another source; use --overwrite "
                "to replace it"
            )
    elif any(destination.iterdir()):
        found = sorted(entry.name for entry in destination.iterdir())
        listed = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        raise CheckpointError(
            f"{destination} holds something else ({listed}), which halfbyte did not write; give an empty directory"
        )
    _check_space(plan, destination, None)
    work.mkdir()
    disk.folder(destination)
    return Journal.start(journal_path, disk, plan)


def _refuse_newer(plan: Plan, destination: Path) -> None:
    """Raise if a source file is newer than the finished conversion: headers do not show that weights changed."""
    finished = (destination / MANIFEST).stat().st_mtime_ns
    for name in (*(file.name for file in plan.files), *plan.side_files):
        if (plan.source / name).stat().st_mtime_ns > finished:
            raise CheckpointError(
                f"{plan.source / name} changed since it was converted to {destination}; use --overwrite to convert it "
                "again"
            )


def _complete(plan: Plan, destination: Path) -> bool:
    paths = [destination / shard.name for shard in plan.shards]
    sizes = all(
        path.is_file() and path.stat().st_size == shard.size for path, shard in zip(paths, plan.shards, strict=True)
    )
    return sizes and all((destination / name).is_file() for name in (*plan.json_files, *plan.side_files))


def _forget_lost(journal: Journal, destination: Path) -> None:
    """Drop shards from the journal that are missing or incomplete, so that they are written again."""
    for name, done in list(journal.finished.items()):
        places = (journal.path.parent / name, destination / name)
        if not any(place.is_file() and place.stat().st_size == done.size for place in places):
            del journal.finished[name]


def _check_space(plan: Plan, destination: Path, journal: Journal | None) -> None:
    done = set(journal.finished) if journal else set()
    needed = sum(shard.size for shard in plan.shards if shard.name not in done)
    needed += sum((plan.source / name).stat().st_size for name in plan.side_files)
    if journal is not None:
        needed -= sum(path.stat().st_blocks * 512 for path in journal.path.parent.glob("*.part"))
    free = shutil.disk_usage(destination).free
    if needed > free:
        raise CheckpointError(f"{destination} has {free:,} bytes free, but the output needs {needed:,} more")


def close(
    plan: Plan, destination: Path, journal: Journal, report: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Give everything its final name: shards, side files, index, config, and the manifest last of all.

    Until this point no file stands under a final name. Each step can be repeated, so a crash in here is continued.
    """
    work, disk = work_folder(destination), journal.disk
    total = len(plan.shards) + len(plan.side_files) + len(plan.json_files) + 1
    done = itertools.count(1)
    old = read_manifest(destination)
    if old is not None and old["fingerprint"] != plan.fingerprint:
        (work / REPLACED).mkdir(exist_ok=True)
        os.replace(destination / MANIFEST, work / REPLACED / MANIFEST)
    _remove_replaced(work, destination, disk)
    for shard in plan.shards:
        if (work / shard.name).exists():
            os.replace(work / shard.name, destination / shard.name)
        report(next(done), total)
    for name in plan.side_files:
        final = destination / name
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = work / "side file"
        disk.copy(plan.source / name, temporary)
        os.replace(temporary, final)
        report(next(done), total)
    contents = dict(plan.json_files)
    config = contents.pop(CONFIG)
    for name, content in [*contents.items(), (CONFIG, config), (MANIFEST, manifest_of(plan, journal.finished))]:
        indent = 1 if name == MANIFEST else 2
        disk.write(work / name, (json.dumps(content, indent=indent, ensure_ascii=False) + "\n").encode())
        os.replace(work / name, destination / name)
        disk.folder(destination)
        report(next(done), total)
    shutil.rmtree(work)
    disk.folder(destination)


def _remove_replaced(work: Path, destination: Path, disk: Disk) -> None:
    """Remove the files of an earlier conversion. Its manifest was set aside before and is removed last: if the process
    is killed in between, the next run knows what is left to remove.
    """
    old = read_manifest(work / REPLACED)
    if old is not None:
        disk.folder(work / REPLACED)
        disk.folder(destination)
        _remove_old(old, destination)
        disk.folder(destination)
        shutil.rmtree(work / REPLACED)


def _remove_begun(journal: Journal, destination: Path) -> None:
    """Remove files to which an unfinished conversion gave their final names before it was stopped.

    Where there is a manifest, its conversion is complete, and `close` removes it once the new one is.
    """
    _remove_replaced(journal.path.parent, destination, journal.disk)
    if not (destination / MANIFEST).exists():
        _remove_old({"files": journal.first.get("outputs", [])}, destination)


def _remove_old(old: dict[str, object], destination: Path) -> None:
    """Remove the files that a conversion lists, config.json first, so that no half of it looks like a checkpoint."""
    names = [CONFIG]
    shards, files = old.get("shards"), old.get("files")
    names += list(shards) if isinstance(shards, dict) else []
    names += list(files) if isinstance(files, list) else []
    for name in dict.fromkeys(str(name) for name in names):
        path = destination / name
        if Path(name).is_absolute() or ".." in Path(name).parts or WORK in Path(name).parts:
            continue
        path.unlink(missing_ok=True)
