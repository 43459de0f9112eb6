"""The last steps of a conversion: files get their final names, and those of an earlier conversion go."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.ending import Ending
from halfbyte.checkpoint.execute.journal import Finished, Journal, work_folder
from halfbyte.checkpoint.execute.manifest import manifest_of, read_manifest
from halfbyte.checkpoint.io.index import CONFIG, MANIFEST
from halfbyte.checkpoint.io.side_files import WORK
from halfbyte.checkpoint.plan.types import Plan
from halfbyte.errors import CheckpointError

REPLACED = "replaced"
"""Folder in the work folder for the manifest of a conversion that is being replaced."""


def close(
    plan: Plan | Ending,
    destination: Path,
    journal: Journal,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Give everything its final name: shards, side files, index, config, and the manifest last of all.

    Until this point no file stands under a final name. Each step can be repeated, so a crash in here is continued. An
    earlier conversion goes before the first shard gets its name. So a manifest is the earlier one's as long as a shard
    is in the work folder, and this one's if none is.
    """
    work, disk = work_folder(destination), journal.disk
    total = len(plan.shards) + len(plan.side_files) + len(plan.json_files) + 1
    done = itertools.count(1)
    if (destination / MANIFEST).exists() and any((work / shard.name).exists() for shard in plan.shards):
        disk.make_folders(work / REPLACED)
        disk.rename(destination / MANIFEST, work / REPLACED / MANIFEST)
    _remove_replaced(work, destination, disk)
    for shard in plan.shards:
        if (work / shard.name).exists():
            disk.rename(work / shard.name, destination / shard.name)
        elif not (destination / shard.name).is_file():
            raise CheckpointError(f"{destination / shard.name} was removed; the same command makes it again")
        report(next(done), total)
    disk.flush_folder(destination)
    disk.flush_folder(work)
    for name in plan.side_files:
        final = destination / name
        disk.make_folders(final.parent)
        disk.copy(plan.source / name, final, through=work / "side file")
        report(next(done), total)
    contents = dict(plan.json_files)
    config = contents.pop(CONFIG)
    for name, content in [*contents.items(), (CONFIG, config), (MANIFEST, manifest_of(plan, journal.finished))]:
        indent = 1 if name == MANIFEST else 2
        data = (json.dumps(content, indent=indent, ensure_ascii=False) + "\n").encode()
        disk.write(destination / name, data, through=work / name)
        report(next(done), total)
    disk.remove_tree(work)
    disk.flush_folder(destination)


def _remove_replaced(work: Path, destination: Path, disk: Disk) -> None:
    """Remove the files of an earlier conversion. Its manifest was set aside before and is removed last: if the process
    is killed in between, the next run knows what is left to remove.
    """
    old = read_manifest(work / REPLACED)
    if old is not None:
        disk.flush_folder(destination)
        _remove_files([*old["shards"], *_names(old.get("files"))], destination, disk)
        disk.remove_tree(work / REPLACED)
        disk.flush_folder(work)


def remove_begun(journal: Journal, destination: Path) -> None:
    """Remove files to which an unfinished conversion gave their final names before it was stopped.

    Where there is a manifest, its conversion is complete, and `close` removes it once the new one is.
    """
    _remove_replaced(journal.path.parent, destination, journal.disk)
    if not (destination / MANIFEST).exists():
        _remove_files(_names(journal.first.get("outputs")), destination, journal.disk)


def take_back(plan: Plan, destination: Path, journal: Journal, usable: dict[str, Finished]) -> None:
    """Make the journal one of another plan. Shards that it can use stay; all else of the old plan goes.

    Files that have their final names already are taken back first, config.json before all others. Until the journal is
    rewritten the old plan counts, and writes again what it misses.
    """
    work, disk = journal.path.parent, journal.disk
    _remove_replaced(work, destination, disk)
    if not (destination / MANIFEST).exists():
        _remove_config(destination, disk)
        for name in usable:
            if (destination / name).exists():
                disk.rename(destination / name, work / name)
        _remove_files(_names(journal.first.get("outputs")), destination, disk)
    journal.rewrite(plan, usable)
    for path in work.iterdir():
        if path.is_file() and path != journal.path and path.name not in usable:
            disk.remove(path)


def _names(listed: object) -> list[str]:
    """Names in a manifest or journal, which anybody may have written."""
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def _remove_config(destination: Path, disk: Disk) -> None:
    """Remove config.json, on the disk before anything else goes: without it, no half looks like a checkpoint."""
    if (destination / CONFIG).exists():
        disk.remove(destination / CONFIG)
        disk.flush_folder(destination)


def _remove_files(names: list[str], destination: Path, disk: Disk) -> None:
    """Remove the files that a conversion lists, and folders that they leave empty. On the disk when this returns."""
    _remove_config(destination, disk)
    touched = {destination: None}
    for name in names:
        path = destination / name
        if not _may_remove(name, destination):
            continue
        if path.is_symlink() or path.is_file():
            disk.remove(path)
            touched[path.parent] = None
        for folder in path.parents:
            if folder == destination or (folder.is_dir() and any(folder.iterdir())):
                break
            if folder.is_dir():
                disk.remove_folder(folder)
                touched[folder.parent] = None
    for folder in touched:
        if folder.is_dir():
            disk.flush_folder(folder)


def _may_remove(name: str, destination: Path) -> bool:
    """Whether it is the name of a file in the destination, wherever links lead, and outside the work folder."""
    home = destination.resolve()
    place = (home / name).parent.resolve() / Path(name).name
    return place.is_relative_to(home) and WORK not in place.relative_to(home).parts
