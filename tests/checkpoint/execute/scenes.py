"""Conversions whose operations are recorded, and what must hold wherever one of them is cut short."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from halfbyte.checkpoint import Options, Outcome, Plan, Resources, Rules, make_plan, run
from halfbyte.checkpoint.execute import conversion
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.journal import JOURNAL
from halfbyte.checkpoint.io.index import CONFIG, MANIFEST
from halfbyte.checkpoint.io.side_files import WORK
from tests.checkpoint.execute.power_cut import Tree, read_tree, write_tree
from tests.checkpoint.execute.recorder import Killed, Operation, Recorder
from tests.checkpoint.toy import llama, write_checkpoint

RESOURCES = Resources(workers=1, max_memory=1 << 26, sync=False)
MANY = Resources(workers=4, max_memory=1 << 26, sync=False, chunk=1000)
INTO = "out"
"""The destination, in the folder that stands for a disk."""


@contextmanager
def on_disk(disk: Disk) -> Iterator[None]:
    """Conversions in here use that disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "Disk", lambda sync: disk)
        yield


def small_source(folder: Path, shards: int = 3) -> Path:
    """Partners across shards, and files beside them: in a folder of a folder, one that only its owner may read."""
    source = write_checkpoint(folder, llama(layers=1, hidden=32, inner=48), {"num_hidden_layers": 1}, shards=shards)
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "b" / "notes.json").write_text('{"a": 1}')
    (source / "a" / "b" / "notes.json").chmod(0o600)
    return source


def plan_of(source: Path, keep: Sequence[str] = (), layout: str = "modelopt", activations: str | None = None) -> Plan:
    return make_plan(
        source, Options(method="amax", layout=layout, activations=activations, rules=Rules(keep=tuple(keep)))
    )


def change_weights(source: Path) -> None:
    """Other values under the same headers, in every shard."""
    for shard in source.glob("*.safetensors"):
        data = shard.read_bytes()
        shard.write_bytes(data[:-64] + data[-32:] + data[-64:-32])
        os.utime(shard, ns=(1, shard.stat().st_mtime_ns + 1))


@dataclass
class Scene:
    """One run of a plan on a disk that holds `before`, recorded."""

    plan: Plan
    folder: Path
    """For disks that the tests make."""
    before: Tree = field(default_factory=dict)
    overwrite: bool = False
    resources: Resources = RESOURCES
    others: tuple[Tree, ...] = ()
    """Whole conversions that may stand under final names before this one does."""
    operations: list[Operation] = field(default_factory=list)
    whole: Tree = field(default_factory=dict)
    """What a fresh run leaves."""
    outcome: Outcome | None = None

    def __post_init__(self) -> None:
        with self.disk() as fresh:
            self.run(fresh)
            self.whole = read_tree(fresh)
        with self.disk(self.before) as root:
            recorder = Recorder(root)
            with on_disk(recorder):
                self.outcome = run(self.plan, root / INTO, self.resources, self.overwrite)
            self.operations = recorder.operations
            assert read_tree(root) == self.whole

    @contextmanager
    def disk(self, tree: Tree | None = None) -> Iterator[Path]:
        """A folder that holds the tree, for a while."""
        root = self.folder / "disk"
        write_tree(tree or {}, root)
        try:
            yield root
        finally:
            shutil.rmtree(root)

    def run(self, root: Path, overwrite: bool = False) -> Outcome:
        return run(self.plan, root / INTO, self.resources, overwrite)

    def kill(self, root: Path, at: int) -> bool:
        """Run on a disk until that operation; False if it ended before."""
        recorder = Recorder(root, kill_at=at)
        with on_disk(recorder):
            try:
                run(self.plan, root / INTO, self.resources, self.overwrite)
            except Killed:
                return True
        return False

    def promised(self, cut: int) -> int:
        """Shards that must not be made again if the power goes after that many operations."""
        assert self.outcome is not None
        lines = [operation for operation in self.operations[:cut] if is_journal_line(operation)]
        return self.outcome.shards_found + len(lines)

    def check_names(self, tree: Tree) -> None:
        """With config.json or a manifest there is a whole checkpoint, and nothing beside it."""
        there = finals(tree)
        if CONFIG in there or MANIFEST in there:
            wholes = [finals(whole) for whole in (self.whole, *self.others)]
            known = there in wholes or there in [_without_manifest(whole) for whole in wholes]
            assert known, f"half a checkpoint: {sorted(there)}"

    def check_rerun(self, tree: Tree, promised: int) -> None:
        """The same command ends with the bytes of an undisturbed run and makes no shard again that counted as done."""
        with self.disk(tree) as root:
            finished = finals(tree).get(MANIFEST) == finals(self.whole)[MANIFEST]
            outcome = self.run(root, self.overwrite and not finished)
            found = read_tree(root)
        different = sorted(name for name in {*found, *self.whole} if found.get(name, 0) != self.whole.get(name, 0))
        assert not different, f"other bytes in {different}"
        again = promised - outcome.shards_found
        assert again <= 0, f"{again} shards that counted as done were made again"


def is_journal_line(operation: Operation) -> bool:
    """Whether it makes a line of the journal count."""
    return operation.kind == "flush" and operation.path.endswith(f"/{JOURNAL}") and operation.size == 0


def finals(tree: Tree) -> Mapping[str, tuple[bytes, int]]:
    """The files under final names."""
    start = f"{INTO}/"
    return {
        path.removeprefix(start): found
        for path, found in tree.items()
        if found is not None and path.startswith(start) and not path.startswith(start + WORK)
    }


def _without_manifest(files: Mapping[str, tuple[bytes, int]]) -> Mapping[str, tuple[bytes, int]]:
    return {name: found for name, found in files.items() if name != MANIFEST}
