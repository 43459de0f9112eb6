"""The journal of an unfinished conversion: what it converts, and which of its shards are complete."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.ending import Ending
from halfbyte.checkpoint.execute.hashes import TREE
from halfbyte.checkpoint.execute.replacing import ReplaceError
from halfbyte.checkpoint.io.side_files import WORK
from halfbyte.checkpoint.plan.types import VERSION, Plan

JOURNAL = "journal.jsonl"


@dataclass(frozen=True)
class Finished:
    """A shard that is complete and flushed to disk."""

    name: str
    size: int
    tensors: dict[str, str] = field(default_factory=dict)
    """Output tensor → hash of its bytes."""
    changed_blocks: dict[str, int] = field(default_factory=dict)
    """Module → MXFP4 blocks outside the window of its NVFP4 tensor scale, which were coded anew."""
    plan: str = ""
    """The shard's fingerprint: another plan with the same one uses it as it is."""


class Journal:
    """A file of JSON lines in the work folder: first what is converted, then one line per complete shard."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path, self.disk = path, disk
        self.finished: dict[str, Finished] = {}
        self.first: dict[str, Any] = {}
        self._length = 0
        """Bytes of complete lines."""
        self._torn = False
        """Whether a crash left bytes after them."""
        self._lock = threading.Lock()

    @classmethod
    def load(cls, path: Path, disk: Disk) -> Journal:
        """Read a journal; without one, `first` is empty. A last line that was cut by a crash does not count."""
        journal = cls(path, disk)
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):  # none, or one that was just closed
            return journal
        for line in data.split(b"\n")[:-1]:
            try:
                record = json.loads(line.decode())
                if not journal.first:
                    journal.first = dict(record)
                elif journal.first.get("version") == VERSION:
                    done = Finished(**record)
                    journal.finished[done.name] = done
            except (ValueError, TypeError):
                break
            journal._length += len(line) + 1
        journal._torn = len(data) > journal._length
        return journal

    @classmethod
    def start(cls, path: Path, disk: Disk, plan: Plan, about: Mapping[str, Any] | None = None) -> Journal:
        """A new journal, written to disk before any work begins. about: further entries of its first line."""
        journal = cls(path, disk)
        journal.rewrite(plan, {}, about)
        return journal

    def rewrite(
        self, plan: Plan | Ending, finished: dict[str, Finished], about: Mapping[str, Any] | None = None
    ) -> None:
        """Begin anew with a plan and shards that are complete already. The old journal counts until this one does."""
        self.first = {
            "version": VERSION,
            "hash": TREE,
            "fingerprint": plan.fingerprint,
            "choices": dict(plan.choices),
            "files": [asdict(file) for file in plan.files],
            "outputs": sorted([*(shard.name for shard in plan.shards), *plan.json_files, *plan.side_files]),
            **(about or {}),
        }
        self.finished = dict(finished)
        records = [self.first, *(asdict(done) for done in self.finished.values())]
        lines = "".join(json.dumps(record) + "\n" for record in records).encode()
        self.disk.write(self.path, lines, through=self.path.with_suffix(".new"))
        self._length, self._torn = len(lines), False

    def add(self, done: Finished) -> None:
        """Record a shard; it counts once the line is on disk. Several threads may call this."""
        line = (json.dumps(asdict(done)) + "\n").encode()
        with self._lock:
            file = self.disk.reopen(self.path)
            try:
                if self._torn:  # what is left of one line must not become a part of another
                    self.disk.resize(file, self._length)
                    self.disk.flush(file)
                    self._torn = False
                self.disk.write_at(file, line, self._length)
                self.disk.flush(file)
            finally:
                self.disk.close(file)
            self._length += len(line)
            self.finished[done.name] = done

    def check(self, plan: Plan) -> None:
        """Raise unless the plan can go on from what the journal began; the error says what is different.

        Other modules may be kept: shards that are the same in both plans are used then.
        """
        files = {file["name"]: file for file in self.first.get("files", [])}
        for now in plan.files:
            before = files.get(now.name)
            if before is None or before != asdict(now):
                raise ReplaceError(
                    f"{plan.source / now.name} changed since this conversion began; what was written is of the old "
                    "file",
                    ". Use --overwrite to begin anew",
                )
        choices = self.first.get("choices", {})
        changed = [
            f"{key} was {choices.get(key)!r}, now {value!r}"
            for key, value in plan.choices.items()
            if choices.get(key) != value
        ]
        if self.first.get("version") != VERSION or self.first.get("hash") != TREE:
            changed.append("another version of halfbyte wrote it")
        if changed:
            raise ReplaceError(
                f"{self.path.parent.parent} holds an unfinished conversion with other options ({'; '.join(changed)})",
                ". Give the same options to continue, or --overwrite to begin anew",
            )

    def continues(self, plan: Plan) -> bool:
        """Whether the journal is of this very plan."""
        return self.first.get("fingerprint") == plan.fingerprint

    def usable(self, plan: Plan) -> dict[str, Finished]:
        """The complete shards that the plan would write just so."""
        if self.continues(plan):
            return dict(self.finished)
        shards = {shard.name: shard for shard in plan.shards}
        return {
            name: done
            for name, done in self.finished.items()
            if name in shards and done.plan == plan.shard_fingerprint(shards[name])
        }


def work_folder(destination: Path) -> Path:
    """The folder that holds all files until they are complete."""
    return destination / WORK
