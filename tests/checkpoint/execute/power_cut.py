"""What a disk may hold after a power cut: a model that replays recorded operations and drops what was not flushed.

The assumptions, which hold for ext4, XFS and Btrfs and are weaker than what each of them gives:
- A file's bytes, size and mode are safe once the file is flushed. Bytes written since may be lost, zero or there,
  512 bytes at a time; the size may be the old one, the new one, or between them.
- A name that is made or removed is safe once its folder is flushed. A rename within a folder happens wholly or not at
  all; after one to another folder, a file may have both names until both folders are flushed, but never none. Changes
  that were not flushed happen or not in any combination. Two changes of the same name happen in their order, and a
  folder goes after what it holds.
- Flushing a file says nothing about its name, and flushing a folder says nothing about the bytes of its files.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.checkpoint.execute.recorder import Operation

SECTOR = 512
EVERY = 3
"""With up to this many unflushed changes of names, all combinations are tried."""

Tree = Mapping[str, tuple[bytes, int] | None]
"""Path → bytes and mode of a file, or None for a folder."""
Name = tuple[int, str]
"""A name in a folder: the folder's number, and the name."""

ROOT = 0


def read_tree(root: Path) -> dict[str, tuple[bytes, int] | None]:
    return {
        str(path.relative_to(root)): None if path.is_dir() else (path.read_bytes(), path.stat().st_mode & 0o7777)
        for path in sorted(root.rglob("*"))
    }


def write_tree(tree: Tree, root: Path) -> None:
    root.mkdir()
    for name in sorted(tree):
        found = tree[name]
        if found is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(found[0])
            (root / name).chmod(found[1])


@dataclass
class File:
    """Its flushed state, and what was done to it since."""

    data: bytes = b""
    mode: int = 0o644
    since: list[Operation] = field(default_factory=list)

    def flush(self) -> None:
        self.data, self.mode = self._whole()
        self.since = []

    def _whole(self) -> tuple[bytes, int]:
        data, mode = bytearray(self.data), self.mode
        for operation in self.since:
            if operation.kind == "set mode":
                mode = operation.size
            elif operation.kind == "resize":
                data = data[: operation.size].ljust(operation.size, b"\0")
            else:
                end = operation.offset + len(operation.data)
                data = data.ljust(end, b"\0")
                data[operation.offset : end] = operation.data
        return bytes(data), mode

    def outcomes(self) -> list[tuple[bytes, int]]:
        """As it was flushed, as it was written, with zeros for all new bytes, cut in the middle, torn by sectors."""
        if not self.since:
            return [(self.data, self.mode)] * 5
        whole, mode = self._whole()
        old = self.data.ljust(len(whole), b"\0")[: len(whole)]
        shortest = min(len(self.data), len(whole))
        cut = whole[: (shortest + len(whole)) // 2]
        chosen = random.Random(len(whole))
        torn = b"".join(
            (whole if chosen.random() < 0.5 else old)[start : start + SECTOR] for start in range(0, len(whole), SECTOR)
        )
        return [(self.data, self.mode), (whole, mode), (old, mode), (cut, self.mode), (torn, mode)]


@dataclass(frozen=True)
class Change:
    """One change of names that happens wholly or not at all."""

    names: Mapping[Name, int | None]
    """What each name stands for afterwards: a file or a folder by its number, or nothing."""
    emptied: int | None = None
    """The folder that it removes: what happened in there happened before."""
    moved_to: Name | None = None
    """The other name of a file that loses this one."""

    def follows(self, earlier: Change) -> bool:
        return any(name in (*self.names, self.moved_to) or name[0] == self.emptied for name in earlier.names)


class SimulatedDisk:
    """Holds a tree that is flushed, and takes operations."""

    def __init__(self, tree: Tree) -> None:
        self.files: dict[int, File] = {}
        self.flushed: dict[Name, int] = {}
        self.pending: list[Change] = []
        self._live: dict[Name, int] = {}
        self._handles: dict[int, int] = {}
        self._numbers = itertools.count(ROOT + 1)
        for path in sorted(tree):
            number, found = next(self._numbers), tree[path]
            if found is not None:
                self.files[number] = File(*found)
            self._live[self._name(path)] = number
        self.flushed = dict(self._live)

    def _folder(self, path: str) -> int:
        return ROOT if path in (".", "") else self._live[self._name(path)]

    def _name(self, path: str) -> Name:
        parent, _, name = path.rpartition("/")
        return self._folder(parent), name

    def apply(self, operation: Operation) -> None:
        match operation.kind:
            case "create" | "reopen":
                self._open(operation)
            case "write" | "resize" | "set mode":
                self.files[self._handles[operation.handle]].since.append(operation)
            case "flush":
                self.files[self._handles[operation.handle]].flush()
            case "rename":
                old, new = self._name(operation.path), self._name(operation.target)
                number = self._live[old]
                if old[0] == new[0]:
                    self._change(Change({old: None, new: number}))
                else:
                    self._change(Change({new: number}))
                    self._change(Change({old: None}, moved_to=new))
            case "remove":
                self._change(Change({self._name(operation.path): None}))
            case "make folder":
                self._change(Change({self._name(operation.path): next(self._numbers)}))
            case "remove folder":
                self._change(Change({self._name(operation.path): None}, emptied=self._folder(operation.path)))
            case "flush folder":
                self._flush_folder(self._folder(operation.path))

    def _open(self, operation: Operation) -> None:
        name = self._name(operation.path)
        if name not in self._live:
            number = next(self._numbers)
            self.files[number] = File()
            self._change(Change({name: number}))
        elif operation.kind == "create":
            self.files[self._live[name]].since.append(Operation("resize", operation.path, size=0))
        self._handles[operation.handle] = self._live[name]

    def _change(self, change: Change) -> None:
        self.pending.append(change)
        _carry_out([change], self._live)

    def _flush_folder(self, folder: int) -> None:
        wanted = {i for i, change in enumerate(self.pending) if any(name[0] == folder for name in change.names)}
        safe = self._with_earlier(wanted)
        _carry_out([self.pending[i] for i in sorted(safe)], self.flushed)
        self.pending = [change for i, change in enumerate(self.pending) if i not in safe]

    def _with_earlier(self, wanted: Iterable[int]) -> frozenset[int]:
        """These changes and those that happened before them if they happened."""
        closed = set(wanted)
        for i in range(len(self.pending) - 1, -1, -1):
            if i in closed:
                closed |= {j for j in range(i) if self.pending[i].follows(self.pending[j])}
        return frozenset(closed)

    def _combinations(self) -> set[frozenset[int]]:
        """Sets of unflushed changes that may have happened: all such sets, or a choice if there are many."""
        every = range(len(self.pending))
        if len(every) <= EVERY:
            sets: Iterable[Iterable[int]] = itertools.chain.from_iterable(
                itertools.combinations(every, count) for count in range(len(every) + 1)
            )
        else:
            chosen = random.Random(len(every))
            sets = [
                *(range(count) for count in range(len(every) + 1)),
                *([i] for i in every),
                *(
                    [i for i in every if not self.pending[i].follows(self.pending[gone]) and i != gone]
                    for gone in every
                ),
                *([i for i in every if chosen.random() < 0.5] for _ in range(8)),
            ]
        return {self._with_earlier(wanted) for wanted in sets}

    def outcomes(self) -> Iterator[Tree]:
        """What may be found when the power is back. Some trees come more than once."""
        contents = {number: file.outcomes() for number, file in self.files.items()}
        for happened in self._combinations():
            names = dict(self.flushed)
            _carry_out([self.pending[i] for i in sorted(happened)], names)
            reached = list(_walk(names))
            dirty = any(number in self.files and self.files[number].since for _, number in reached)
            for variant in range(5 if dirty else 1):
                yield {path: contents[number][variant] if number in self.files else None for path, number in reached}


def _carry_out(changes: Iterable[Change], names: dict[Name, int]) -> None:
    for change in changes:
        for name, number in change.names.items():
            if number is None:
                names.pop(name, None)
            else:
                names[name] = number


def _walk(names: Mapping[Name, int]) -> Iterator[tuple[str, int]]:
    """Paths that can be reached from the root."""
    within: dict[int, list[tuple[str, int]]] = {}
    for (folder, name), number in names.items():
        within.setdefault(folder, []).append((name, number))
    waiting = [("", ROOT)]
    while waiting:
        above, folder = waiting.pop()
        for name, number in within.get(folder, []):
            yield above + name, number
            waiting.append((f"{above}{name}/", number))
