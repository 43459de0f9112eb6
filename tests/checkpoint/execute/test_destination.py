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
from typing import Any

import pytest

from halfbyte.checkpoint import run
from halfbyte.checkpoint.execute.destination import only_one
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.journal import JOURNAL
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
