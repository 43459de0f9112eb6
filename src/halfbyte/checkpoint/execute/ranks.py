"""Ranks: processes that share one conversion. Which shards each writes, and its files in the work folder.

Every rank has a journal of its own and a lock of its own. A short lock of all of them guards the moments at which one
begins, ends, or asks who is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.ending import Ending
from halfbyte.checkpoint.execute.journal import JOURNAL, Journal
from halfbyte.checkpoint.execute.locks import FileLock, is_locked
from halfbyte.checkpoint.execute.pool import shard_bytes
from halfbyte.checkpoint.plan.types import Plan, Shard
from halfbyte.errors import CheckpointError, InputError

GUARD = "ranks.lock"
"""The short lock."""
WAIT = 120.0
"""Seconds to wait for it. A rank that closes holds it while side files are copied."""
NAMED = re.compile(r"rank-(\d{5,})-of-(\d{5,})\.(jsonl|lock)")


@dataclass(frozen=True, order=True)
class Rank:
    """One of several processes, counted from 0."""

    number: int
    of: int

    def __post_init__(self) -> None:
        if self.of < 1:
            raise InputError(f"--world-size {self.of}: it counts the processes, so it is 1 or more")
        if not 0 <= self.number < self.of:
            raise InputError(f"--rank {self.number}: ranks of {self.of} processes are 0 to {self.of - 1}")

    @property
    def name(self) -> str:
        return f"rank-{self.number:05}-of-{self.of:05}"

    def __str__(self) -> str:
        return f"rank {self.number} of {self.of}"


def share_of(plan: Plan, rank: Rank) -> tuple[Shard, ...]:
    """The shards that a rank writes, in the order of the plan. Every shard is in the share of exactly one rank.

    The largest shards are dealt out first, each to the rank that has the fewest bytes so far.
    """
    loads = [(0, number) for number in range(rank.of)]
    mine = set()
    for shard in sorted(plan.shards, key=lambda shard: (-shard_bytes(shard), shard.name)):
        load, number = min(loads)
        loads[number] = (load + shard_bytes(shard), number)
        if number == rank.number:
            mine.add(shard.name)
    return tuple(shard for shard in plan.shards if shard.name in mine)


@contextmanager
def guarded(work: Path) -> Iterator[bool]:
    """As long as the block lasts, no rank begins or ends. False: the work folder is gone, since another one closed."""
    lock = FileLock(work / GUARD)
    try:
        taken = lock.take(WAIT)
    except FileNotFoundError:
        yield False
        return
    if not taken:
        raise CheckpointError(f"another rank is beginning or closing in {work.parent}; run the same command again")
    try:
        yield True
    finally:
        lock.release()


def running_ranks(work: Path) -> list[Rank]:
    """The ranks whose processes are running, on any machine. Ask within `guarded`."""
    return sorted(rank for rank, path in _files(work, "lock") if is_locked(path))


def rank_journals(work: Path, disk: Disk) -> dict[Rank, Journal]:
    """The journals of all ranks that have begun."""
    loaded = ((rank, Journal.load(path, disk)) for rank, path in _files(work, "jsonl"))
    return {rank: journal for rank, journal in sorted(loaded) if journal.first}


def load_all(work: Path, disk: Disk) -> Journal:
    """The journal of a conversion, with the shards that ranks of the same conversion have finished."""
    journal = Journal.load(work / JOURNAL, disk)
    for found in rank_journals(work, disk).values():
        if not journal.first:
            journal.first = dict(found.first)
        if journal.first.get("fingerprint") == found.first.get("fingerprint"):
            journal.finished |= found.finished
    return journal


def absorb(plan: Plan | Ending, journal: Journal) -> None:
    """Write one journal in place of those of the ranks. On the disk when this returns."""
    work = journal.path.parent
    paths = [path for _, path in _files(work, "jsonl")]
    if not paths:
        return
    journal.rewrite(plan, journal.finished)
    for path in paths:
        journal.disk.remove(path)
    journal.disk.flush_folder(work)


def _files(work: Path, kind: str) -> list[tuple[Rank, Path]]:
    try:
        paths = list(work.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # none has begun, or another one has just closed the conversion
        return []
    found = ((NAMED.fullmatch(path.name), path) for path in paths)
    ranks = [(match, path) for match, path in found if match and match[3] == kind and int(match[1]) < int(match[2])]
    return [(Rank(int(match[1]), int(match[2])), path) for match, path in ranks]
