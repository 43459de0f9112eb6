"""Conversions whose operations are recorded, and what must hold wherever one of them is cut short."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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

ONE = Resources(workers=1, max_memory=1 << 26, sync=False)
MANY = Resources(workers=4, max_memory=1 << 26, sync=False, chunk=1000)
INTO = "out"
"""The destination, in the folder that stands for a disk."""
IN_WORK = f"{INTO}/{WORK}/"
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where disks are made, thousands of them: in memory if that can be."""


@dataclass
class Scene:
    """One run of a plan on a disk that holds `before`, recorded."""

    plan: Plan
    before: Tree = field(default_factory=dict)
    overwrite: bool = False
    resources: Resources = ONE
    others: tuple[Tree, ...] = ()
    """Whole conversions that may stand under final names before this one does."""
    own: Tree = field(default_factory=dict)
    """Files of the user in the destination, which stay."""
    operations: list[Operation] = field(init=False)
    whole: Tree = field(init=False)
    """What a fresh run leaves, and the user's own files."""
    found: int = field(init=False)
    """Shards that were complete before."""

    def __post_init__(self) -> None:
        with self.disk() as fresh:
            self.run(fresh)
            self.whole = {**read_tree(fresh), **self.own}
        with self.disk(self.before) as root:
            recorder = Recorder(root)
            with on_disk(recorder):
                self.found = self.run(root, self.overwrite).shards_found
            self.operations = recorder.operations
            assert read_tree(root) == self.whole

    @contextmanager
    def disk(self, tree: Tree | None = None) -> Iterator[Path]:
        """A folder that holds the tree, for a while."""
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            root = Path(folder) / "disk"
            write_tree(tree or {}, root)
            yield root

    def run(self, root: Path, overwrite: bool = False) -> Outcome:
        return run(self.plan, root / INTO, self.resources, overwrite)

    def run_again(self, root: Path) -> Outcome:
        """The same command, or the one without --overwrite if there is nothing left to replace."""
        finished = finals(read_tree(root)).get(MANIFEST) == finals(self.whole)[MANIFEST]
        return self.run(root, self.overwrite and not finished)

    def killed(self, root: Path, at: int) -> list[Operation]:
        """Run until that operation, or to the end if there are fewer; what was carried out."""
        recorder = Recorder(root, kill_at=at)
        with on_disk(recorder):
            try:
                self.run_again(root)
            except Killed:
                assert recorder.killed
        return recorder.operations

    def left_by(self, last: Callable[[Operation], bool]) -> Tree:
        """What is on the disk if the process is killed right after that operation."""
        with self.disk(self.before) as root:
            recorder = Recorder(root, kill_after=last)
            with on_disk(recorder), pytest.raises(Killed):
                self.run(root, self.overwrite)
            return read_tree(root)

    def check_names(self, tree: Tree) -> None:
        """With config.json or a manifest there is a whole checkpoint, and nothing beside it."""
        there = finals(tree)
        if CONFIG in there or MANIFEST in there:
            wholes = [finals(whole) for whole in (self.whole, *self.others)]
            known = there in wholes or there in [_without_manifest(whole) for whole in wholes]
            assert known, f"half a checkpoint: {sorted(there)}"

    def check_finished(self, root: Path, promised: int) -> None:
        """The same command ends with the bytes of an undisturbed run and makes no shard again that counted as done."""
        outcome = self.run_again(root)
        found = read_tree(root)
        different = sorted(name for name in {*found, *self.whole} if found.get(name, 0) != self.whole.get(name, 0))
        assert not different, f"other bytes in {different}"
        again = promised - outcome.shards_found
        assert again <= 0, f"{again} shards that counted as done were made again"


@contextmanager
def on_disk(disk: Disk) -> Iterator[None]:
    """Conversions in here use that disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "Disk", lambda sync: disk)
        yield


def journal_lines(operations: Sequence[Operation]) -> int:
    """Shards that counted as done after these operations: lines of the journal that were written and flushed."""
    written = [i for i, operation in enumerate(operations) if operation.kind == "write" and _is_journal(operation)]
    flushed = [i for i, operation in enumerate(operations) if operation.kind == "flush" and _is_journal(operation)]
    return sum(1 for i in written if any(j > i for j in flushed))


def _is_journal(operation: Operation) -> bool:
    return operation.path == IN_WORK + JOURNAL


def finals(tree: Tree) -> Mapping[str, tuple[bytes, int]]:
    """The files under final names."""
    start = f"{INTO}/"
    return {
        path.removeprefix(start): found
        for path, found in tree.items()
        if found is not None and path.startswith(start) and not path.startswith(IN_WORK)
    }


def _without_manifest(files: Mapping[str, tuple[bytes, int]]) -> Mapping[str, tuple[bytes, int]]:
    return {name: found for name, found in files.items() if name != MANIFEST}


# Sources and plans


def small_source(folder: Path, shards: int = 3) -> Path:
    """Partners across shards, and files beside them: in a folder of a folder, one that only its owner may read."""
    source = write_checkpoint(folder, llama(layers=1, hidden=32, inner=48), {"num_hidden_layers": 1}, shards=shards)
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "b" / "notes.json").write_text('{"a": 1}')
    (source / "a" / "b" / "notes.json").chmod(0o600)
    return source


def plan_of(source: Path, keep: Sequence[str] = (), layout: str = "modelopt", activations: str | None = None) -> Plan:
    rules = Rules(keep=tuple(keep))
    return make_plan(source, Options(method="amax", layout=layout, activations=activations, rules=rules))


def change_weights(source: Path) -> None:
    """Other values under the same headers, in every shard."""
    for shard in source.glob("*.safetensors"):
        data = shard.read_bytes()
        shard.write_bytes(data[:-64] + data[-32:] + data[-64:-32])
        os.utime(shard, ns=(1, shard.stat().st_mtime_ns + 1))


# Scenes


def fresh(folder: Path) -> Scene:
    return Scene(plan_of(small_source(folder / "source")))


def many_workers(folder: Path) -> Scene:
    return Scene(plan_of(small_source(folder / "source")), resources=MANY)


def one_shard(folder: Path) -> Scene:
    """Without an index and hf_quant_config.json, config.json comes right after the shard."""
    source = small_source(folder / "source", shards=1)
    shutil.rmtree(source / "a")
    (source / "tokenizer.json").unlink()
    return Scene(plan_of(source, layout="compressed-tensors"))


def continued(folder: Path) -> Scene:
    """The same plan goes on after it was killed in the middle of a line of the journal."""
    first = fresh(folder)
    left = dict(first.left_by(lambda operation: operation.kind == "flush" and _is_journal(operation)))
    data, mode = left[IN_WORK + JOURNAL] or (b"", 0)
    left[IN_WORK + JOURNAL] = (data + data.splitlines()[-1][:700], mode)
    return Scene(first.plan, left, others=(first.whole,))


def replaced(folder: Path) -> Scene:
    """An earlier conversion with other options: some of its files have names that the new one does not use.

    A folder of it holds a file of the user, too.
    """
    source = small_source(folder / "source")
    (source / "c").mkdir()
    (source / "c" / "left.json").write_text("{}")
    own = {f"{INTO}/c": None, f"{INTO}/c/mine.txt": (b"mine", 0o644)}
    earlier = {**Scene(plan_of(source, activations="unit")).whole, **own}
    shutil.rmtree(source / "c")
    (source / "a" / "b" / "notes.json").rename(source / "notes.json")
    plan = plan_of(source, layout="compressed-tensors")
    return Scene(plan, earlier, overwrite=True, others=(earlier,), own=own)


def made_again(folder: Path) -> Scene:
    """The same conversion of a source whose weights changed: every file has the name and the size of an earlier one."""
    source = small_source(folder / "source")
    earlier = Scene(plan_of(source)).whole
    change_weights(source)
    return Scene(plan_of(source), earlier, overwrite=True, others=(earlier,))


def begun_anew(folder: Path) -> Scene:
    """--overwrite with other options, after a run that was killed while it gave files their names."""
    source = small_source(folder / "source")
    first = Scene(plan_of(source))
    left = first.left_by(lambda operation: operation.target == f"{INTO}/{CONFIG}")
    plan = plan_of(source, layout="compressed-tensors")
    return Scene(plan, left, overwrite=True, others=(first.whole,))


def _more_kept(folder: Path, last: Callable[[Operation], bool]) -> Scene:
    """More modules are kept than in a run that was killed after that operation; a file beside the shards is gone."""
    source = small_source(folder / "source")
    first = Scene(plan_of(source))
    left = first.left_by(last)
    (source / "tokenizer.json").unlink()
    return Scene(plan_of(source, ("mlp.down_proj",)), left, others=(first.whole,))


def more_kept_after_two_shards(folder: Path) -> Scene:
    return _more_kept(folder, lambda operation: "00002" in operation.path and operation.kind == "rename")


def more_kept_after_config(folder: Path) -> Scene:
    return _more_kept(folder, lambda operation: operation.target == f"{INTO}/{CONFIG}")


SCENES = (
    fresh,
    many_workers,
    one_shard,
    continued,
    replaced,
    made_again,
    begun_anew,
    more_kept_after_two_shards,
    more_kept_after_config,
)
