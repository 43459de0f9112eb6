"""What a destination holds before a run: room, names in old manifests, locks, leftovers."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halfbyte.checkpoint import run
from halfbyte.checkpoint.execute.destination import (
    _room_of,
    check_destination,
    check_refusal,
    examine,
    forget_lost,
    locked,
    only_one,
    open_destination,
)
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.journal import JOURNAL, Finished, Journal
from halfbyte.checkpoint.execute.locks import FileLock, is_locked
from halfbyte.checkpoint.execute.ranks import GUARD, Rank
from halfbyte.checkpoint.io.index import MANIFEST
from halfbyte.errors import CheckpointError
from tests.checkpoint.execute.power_cut import read_tree
from tests.checkpoint.execute.recorder import Operation
from tests.checkpoint.execute.scenes import IN_WORK, INTO, ONE, fresh, plan_of, small_source
from tests.checkpoint.toy import all_bytes


def last_write(shard: str) -> Callable[[Operation], bool]:
    """The flush of a shard, after which it is written and not yet done."""
    return lambda operation: operation.kind == "flush" and shard in operation.path


@pytest.mark.parametrize("missing", [0, 1])
def test_room_that_unfinished_files_give_back_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    """A run that goes on needs no room twice: what is there of a shard is written anew, in the same place."""
    scene = fresh(tmp_path)
    left = scene.left_by(last_write("00002"))
    with scene.disk(left) as root:
        work = root / IN_WORK
        found = [shard for shard in scene.plan.shards if (work / shard.name).exists()]
        needed = sum(shard.size for shard in scene.plan.shards if shard not in found)
        needed += sum((scene.plan.source / name).stat().st_size for name in scene.plan.side_files)
        parts = [path.stat().st_blocks * 512 for path in work.glob("*.part")]
        assert len(found) == 1
        assert sum(parts) > 0
        free = needed - sum(parts) - missing
        usage = shutil.disk_usage(root)._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        if missing:
            with pytest.raises(CheckpointError, match=f"has {free:,} bytes free, but the output needs {free + 1:,}"):
                scene.run(root)
            assert read_tree(root) == left
        else:
            scene.check_finished(root, promised=1)


def test_a_file_that_another_rank_names_while_room_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is listed, and gone when it is asked for its size."""
    scene, listed = fresh(tmp_path), Path.iterdir
    with scene.disk(scene.left_by(last_write("00002"))) as root, monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", lambda folder: iter([*listed(folder), folder / "model-00009.safetensors.part"]))
        found = examine(scene.plan, root / INTO, False, Disk(sync=False))
    assert found.continued
    assert len(found.usable) == 1


def test_names_in_an_old_manifest_are_not_followed_out(tmp_path: Path) -> None:
    """Nor into the work folder, where the shards of the new conversion wait; nor behind a link."""
    source = small_source(tmp_path / "source")
    into, outside = tmp_path / "d", tmp_path / "outside"
    run(plan_of(source, activations="unit"), into, ONE)
    outside.mkdir()
    (outside / "precious.txt").write_text("x")
    (into / "linked").symlink_to(outside)
    (into / "inner").symlink_to(into / ".halfbyte")
    (into / "folder").mkdir()
    plan = plan_of(source, layout="compressed-tensors")
    manifest = json.loads((into / MANIFEST).read_text())
    manifest["files"] += [
        str(outside / "precious.txt"),
        "../outside/precious.txt",
        "linked/precious.txt",
        "folder/../../outside/precious.txt",
        f".halfbyte/{JOURNAL}",
        *(f"inner/{shard.name}" for shard in plan.shards),
        *(f"folder/../.halfbyte/{shard.name}" for shard in plan.shards),
        *(f".halfbyte/{shard.name}" for shard in plan.shards),
        "./.halfbyte/halfbyte.json",
        "folder",
        "",
        ".",
        7,
    ]
    manifest["shards"][f".halfbyte/{plan.shards[0].name}"] = {}
    (into / MANIFEST).write_text(json.dumps(manifest))
    run(plan, into, ONE, overwrite=True)
    run(plan, tmp_path / "fresh", ONE)
    assert (outside / "precious.txt").read_text() == "x"
    assert (into / "folder").is_dir()
    (into / "linked").unlink()
    (into / "inner").unlink()
    assert all_bytes(into) == all_bytes(tmp_path / "fresh")


@pytest.mark.parametrize("content", ["{", "[]", '{"fingerprint": "x", "shards": []}', '{"fingerprint": "x"}'])
def test_a_manifest_that_halfbyte_did_not_write(tmp_path: Path, content: str) -> None:
    source = small_source(tmp_path / "source")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / MANIFEST).write_text(content)
    with pytest.raises(CheckpointError):
        run(plan_of(source), tmp_path / "d", ONE, overwrite=True)
    assert (tmp_path / "d" / MANIFEST).read_text() == content


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    """However it ends: no file is left that would refuse the next run."""
    holder = (
        "import sys, time; from pathlib import Path; from halfbyte.checkpoint.execute.destination import only_one;"
        "from halfbyte.checkpoint.execute.disk import Disk\n"
        "with only_one(Path(sys.argv[1]), Disk()): print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", holder, tmp_path / "d"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with (
            pytest.raises(CheckpointError, match=r"another conversion into .* is running"),
            only_one(tmp_path / "d", Disk()),
        ):
            pass
        process.kill()
        process.wait()
    with only_one(tmp_path / "d", Disk()):
        pass
    assert list((tmp_path / "d").iterdir()) == []


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match="cannot be locked against a second conversion: No locks available"):
        run(plan_of(small_source(tmp_path / "source")), tmp_path / "d", ONE)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_work_folder_that_a_finished_conversion_left_goes(tmp_path: Path) -> None:
    plan = plan_of(small_source(tmp_path / "source"))
    run(plan, tmp_path / "d", ONE)
    before = all_bytes(tmp_path / "d")
    (tmp_path / "d" / ".halfbyte" / "replaced").mkdir(parents=True)
    (tmp_path / "d" / ".halfbyte" / "side file").write_text("x")
    assert run(plan, tmp_path / "d", ONE).finished_before
    assert all_bytes(tmp_path / "d") == before
    assert not (tmp_path / "d" / ".halfbyte").exists()


@pytest.mark.parametrize(
    "last", ["journal.jsonl", f"{INTO}/model-00003-of-00003.safetensors"], ids=["waiting", "named"]
)
def test_a_finished_shard_that_was_cut_is_made_again(tmp_path: Path, last: str) -> None:
    """By hand, say: a run that is killed leaves no such thing."""
    scene = fresh(tmp_path)
    left = dict(
        scene.left_by(
            lambda operation: operation.target == last or (last in operation.path and operation.kind == "flush")
        )
    )
    done = next(
        path for path, found in left.items() if found is not None and path.endswith("00001-of-00003.safetensors")
    )
    data, mode = left[done] or (b"", 0)
    left[done] = data[:-1], mode
    with scene.disk(left) as root:
        scene.check_finished(root, promised=0)


def test_a_shard_that_is_removed_before_the_last_steps(tmp_path: Path) -> None:
    """It is not missed by a manifest that lists it: the run ends with an error, and the next one makes it again."""
    scene = fresh(tmp_path)
    with scene.disk() as root:

        def report(event: Any) -> None:
            if event.kind == "close" and event.done == 1:
                (root / IN_WORK / scene.plan.shards[1].name).unlink()

        with pytest.raises(CheckpointError, match=r"00002-of-00003.safetensors was removed; the same command makes it"):
            run(scene.plan, root / INTO, ONE, report=report)
        scene.check_names(read_tree(root))
        scene.check_finished(root, promised=2)


def said(action: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


def test_where_a_destination_may_not_be(tmp_path: Path) -> None:
    source = tmp_path / "a" / "s"
    source.mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for there, why in (
        (source, "is the source itself; give another directory"),
        (source / "x" / "y", f"lies inside the source {source}; give a directory outside"),
        (tmp_path / "a", f"holds the source {source}; give a directory of its own"),
        (tmp_path, f"holds the source {source}; give a directory of its own"),
        (tmp_path / "file", "is a file; give a directory"),
    ):
        assert said(lambda there=there: check_destination(source, there)) == f"{there} {why}"  # type: ignore[misc]
    check_destination(source, tmp_path / "a" / "s2")
    check_destination(source, tmp_path / "b")


def test_what_a_destination_may_hold(tmp_path: Path) -> None:
    """At most three names of what else is there are listed. An empty folder, or one with our work alone, will do."""
    plan, into, disk = plan_of(small_source(tmp_path / "s")), tmp_path / "d", Disk(sync=False)
    into.mkdir()
    found = examine(plan, into, False, disk)
    assert (found.usable, found.continued, found.finished, found.journal.first) == ({}, False, False, {})
    (into / ".halfbyte").mkdir()
    assert not examine(plan, into, False, disk).continued
    for number, listed in ((1, "1"), (3, "1, 2, 3"), (4, "1, 2, 3, …")):
        for name in range(1, number + 1):
            (into / str(name)).write_text("")
        assert said(lambda: examine(plan, into, True, disk)) == (
            f"{into} holds something else ({listed}), which halfbyte did not write; give an empty directory"
        )
    assert said(lambda: check_refusal(plan, into, False)).startswith(f"{into} holds something else (1, 2, 3, …)")


def test_a_finished_conversion(tmp_path: Path) -> None:
    source, into, disk = small_source(tmp_path / "s"), tmp_path / "d", Disk(sync=False)
    plan, other = plan_of(source), plan_of(source, keep=("mlp.down_proj",))
    run(plan, into, ONE)
    assert examine(plan, into, False, disk).finished
    assert not examine(plan, into, True, disk).finished
    assert open_destination(plan, into, False, disk) is None
    assert said(lambda: examine(other, into, False, disk)) == (
        f"{into} holds a finished conversion with other options or of another source; use --overwrite to replace it"
    )
    assert not examine(other, into, True, disk).finished
    moved = (source / "tokenizer.json").stat()
    newer = (into / MANIFEST).stat().st_mtime_ns
    os.utime(source / "tokenizer.json", ns=(newer, newer))
    assert examine(plan, into, False, disk).finished, "as old as the conversion is old enough"
    os.utime(source / "tokenizer.json", ns=(newer, newer + 1))
    assert said(lambda: examine(plan, into, False, disk)) == (
        f"{source / 'tokenizer.json'} changed since it was converted to {into}; use --overwrite to convert it again"
    )
    os.utime(source / "tokenizer.json", ns=(moved.st_atime_ns, moved.st_mtime_ns))
    cut = f"{into} holds this very conversion, but a file of it is gone or was cut since; use --overwrite to make it "
    cut += "again"
    shard = into / plan.shards[1].name
    data = shard.read_bytes()
    for damage, repair in (
        (lambda: shard.write_bytes(data[:-1]), lambda: shard.write_bytes(data)),
        (shard.unlink, lambda: shard.write_bytes(data)),
        ((into / "tokenizer.json").unlink, lambda: shutil.copy(source / "tokenizer.json", into)),
        ((into / "config.json").unlink, lambda: None),
    ):
        damage()
        assert said(lambda: examine(plan, into, False, disk)) == cut
        repair()


def test_room_for_the_output_and_side_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, into = plan_of(small_source(tmp_path / "s")), tmp_path / "deep" / "d"
    needed = plan.output_bytes + sum((plan.source / name).stat().st_size for name in plan.side_files)
    asked: list[Path] = []

    def usage(path: Path) -> Any:
        asked.append(path)
        return SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    free = needed
    check_refusal(plan, into, False)
    assert asked == [tmp_path], "the nearest folder that is there"
    free = needed - 1
    assert said(lambda: check_refusal(plan, into, False)) == (
        f"{into} has {free:,} bytes free, but the output needs {needed:,} more"
    )


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(small_source(tmp_path / "s"))
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "d"
    assert said(lambda: check_refusal(plan, below, False)) == f"{below} cannot be written: Not a directory"
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK | os.X_OK)
    assert said(lambda: check_refusal(plan, tmp_path / "d", False)) == (
        f"{tmp_path / 'd'} cannot be written: Permission denied"
    )


def test_ranks_that_are_running_refuse_a_plain_run(tmp_path: Path) -> None:
    into, disk = tmp_path / "d", Disk(sync=False)
    work = into / ".halfbyte"
    work.mkdir(parents=True)
    held = [FileLock(work / f"{Rank(number, 9).name}.lock") for number in range(4)]
    (work / GUARD).write_text("")
    with only_one(into, disk):
        pass
    for count, listed in ((1, "rank 0 of 9"), (3, "rank 0 of 9, rank 1 of 9, rank 2 of 9")):
        for lock in held[:count]:
            assert is_locked(lock.path) or lock.take()
        message = f"another conversion into {into} is running ({listed}); wait for it or stop it"
        assert said(lambda: only_one(into, disk).__enter__()) == message
    assert held[3].take()
    assert f"({listed}, …)" in said(lambda: only_one(into, disk).__enter__())
    for lock in held:
        lock.release()


def test_locks_of_folders(tmp_path: Path) -> None:
    """Alone, or together with others that share it."""
    running = f"another conversion into {tmp_path} is running; wait for it or stop it"
    with locked(tmp_path):
        for shared in (False, True):
            assert said(lambda shared=shared: locked(tmp_path, shared).__enter__()) == running  # type: ignore[misc]
    with locked(tmp_path, shared=True), locked(tmp_path, shared=True):
        assert said(lambda: locked(tmp_path).__enter__()) == running
    with locked(tmp_path):
        pass


def test_shards_that_were_lost(tmp_path: Path) -> None:
    """A shard counts in the work folder; under its final name only if that is of this conversion; and only whole."""
    work = tmp_path / ".halfbyte"
    work.mkdir()
    for place, names in ((work, "ab"), (tmp_path, "bcd")):
        for name in names:
            (place / name).write_bytes(bytes(4 if name == "d" else 5))
    for finals, left in ((True, "abc"), (False, "ab")):
        journal = Journal(work / JOURNAL, Disk(sync=False))
        journal.finished = {name: Finished(name, 5) for name in "abcde"}
        forget_lost(journal, tmp_path, finals)
        assert "".join(journal.finished) == left


def test_the_room_of_a_name(tmp_path: Path) -> None:
    """None of a folder, of what is gone, and of a file without bytes."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "full").write_bytes(bytes(5000))
    assert [_room_of(tmp_path / name) for name in ("folder", "gone", "empty")] == [0, 0, 0]
    assert _room_of(tmp_path / "full") == (tmp_path / "full").stat().st_blocks * 512 >= 5000


def test_a_dry_run_hears_of_ranks(tmp_path: Path) -> None:
    plan, into = plan_of(small_source(tmp_path / "s")), tmp_path / "d"
    (into / ".halfbyte").mkdir(parents=True)
    (into / ".halfbyte" / GUARD).write_text("")
    with FileLock(into / ".halfbyte" / f"{Rank(1, 2).name}.lock"):
        assert said(lambda: check_refusal(plan, into, False)) == (
            f"another conversion into {into} is running (rank 1 of 2); wait for it or stop it"
        )
    assert check_refusal(plan, into, False).journal.first == {}


def test_a_dry_run_where_something_is_begun_changes_nothing(tmp_path: Path) -> None:
    scene = fresh(tmp_path)
    left = scene.left_by(last_write("00002"))
    with scene.disk(left) as root:
        found = check_refusal(scene.plan, root / INTO, False)
        assert (found.continued, len(found.usable)) == (True, 1)
        assert read_tree(root) == left
        with locked(root / INTO):
            assert "is running; wait for it" in said(lambda: check_refusal(scene.plan, root / INTO, False))
