"""What runs on the nodes of a cluster when it converts: one function writes a part, one says what a node sees."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from halfbyte.checkpoint.execute.bad_values import Bad
from halfbyte.checkpoint.execute.conversion import Resources, prepare, write_shards
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.journal import Finished
from halfbyte.checkpoint.execute.pool import Collected, Into
from halfbyte.checkpoint.execute.target_device import resolve_device
from halfbyte.checkpoint.execute.writer import disk_error
from halfbyte.checkpoint.plan.types import SourceFile
from halfbyte.errors import HalfbyteError
from halfbyte.scale.parts import Part

TAG = re.compile(r"(?P<shard>.+)\.try-[0-9a-f]{16}(\.part)?")
"""Names in the work folder while tasks write: an attempt never meets the file of another one."""


@dataclass(frozen=True)
class Written:
    """What a task gave: files in the work folder that only the driver gives their names to, or why there are none."""

    finished: Sequence[Finished] = ()
    tag: str = ""
    bad: Mapping[str, Bad] = field(default_factory=dict)
    on_cpu: int = 0
    error: str = ""
    """What stopped the task, if that would stop it again."""


@dataclass(frozen=True)
class Seen:
    """What a node sees."""

    work: bool
    """Whether it can write to the work folder of the driver."""
    files: frozenset[str]
    """Source files that are there, with the size and time that the plan has."""


def see(source: Path, files: Sequence[SourceFile], work: Path, token: str) -> Seen:
    """What this node sees. token: a file that the driver has put into the work folder."""
    there = set()
    for file in files:
        try:
            stat = os.stat(source / file.name)
        except OSError:
            continue
        if (stat.st_size, stat.st_mtime_ns) == (file.size, file.modified):
            there.add(file.name)
    return Seen((work / token).exists() and os.access(work, os.W_OK), frozenset(there))


def write_part(part: Part, work: Path, resources: Resources, sync: bool) -> Written:
    """Write the shards of a part under names of their own.

    An error of halfbyte is part of the answer, since it would come again. Any other one is raised, and Ray tries again.
    """
    tag = f".try-{os.urandom(8).hex()}"
    disk = Disk(sync)
    try:
        remove_attempts(work, part.names, disk)
        device = resolve_device(resources.device)
        prepared = prepare(part.plan, replace(resources, device=device))
        into = Into(work, Collected(disk), part.shards, tag)
        _, acts = write_shards(part.plan, into, prepared, lambda event: None)
    except HalfbyteError as error:
        return Written(error=f"{error} (on {socket.gethostname()})")
    except OSError as error:
        return Written(error=f"{disk_error(error, work)} (on {socket.gethostname()})")
    return Written(tuple(into.journal.finished.values()), tag, acts.bad.modules, acts.on_cpu)


def remove_attempts(work: Path, names: Sequence[str] | None, disk: Disk) -> None:
    """Remove what earlier attempts at these shards left; None: at any shard. Nobody waits for them any more."""
    for path in work.iterdir():
        found = TAG.fullmatch(path.name)
        if found and (names is None or found["shard"] in names):
            try:
                disk.remove(path)
            except FileNotFoundError:  # another attempt was quicker
                continue
