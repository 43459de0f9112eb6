"""The journal: lines that a crash tore, several threads, another version."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from halfbyte.checkpoint import Plan
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.journal import Finished, Journal
from halfbyte.errors import CheckpointError
from tests.checkpoint.execute.recorder import Recorder
from tests.checkpoint.execute.scenes import plan_of, small_source


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """With two shards."""
    started = Journal.start(tmp_path / "journal.jsonl", Disk(sync=False), plan_of(small_source(tmp_path / "source")))
    for name in ("one", "two"):
        started.add(Finished(name, 5, {"x": "0123"}))
    return started


def shards(path: Path) -> list[str]:
    return list(Journal.load(path, Disk(sync=False)).finished)


def test_cut_anywhere(journal: Journal) -> None:
    """A line counts when its last byte is there, and one that was cut is no part of the next."""
    data = journal.path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for size in sorted(
        {*range(0, len(data), 7), *(end + more for end in ends for more in (-1, 0, 1))} - {len(data) + 1}
    ):
        journal.path.write_bytes(data[:size])
        loaded = Journal.load(journal.path, Disk(sync=False))
        whole = sum(1 for end in ends if end <= size)
        assert (bool(loaded.first), len(loaded.finished)) == (whole > 0, max(0, whole - 1))
        if whole:
            loaded.add(Finished("three", 5))
            assert shards(journal.path) == [*["one", "two"][: whole - 1], "three"]


@pytest.mark.parametrize(
    "torn", [b"\0" * 40, b"\0" * 39 + b"\n", b"[]\n", b"7\n", b'{"name": 1}\n', b"\xff\xfe\n", b"\n"]
)
def test_what_else_a_crash_may_leave(journal: Journal, torn: bytes) -> None:
    """Zeros where the size came to the disk before the bytes; whatever was there before."""
    before = journal.path.read_bytes()
    journal.path.write_bytes(before + torn)
    loaded = Journal.load(journal.path, Disk(sync=False))
    assert list(loaded.finished) == ["one", "two"]
    loaded.add(Finished("three", 5))
    assert shards(journal.path) == ["one", "two", "three"]


def test_a_torn_line_is_gone_from_the_disk_before_the_next_is_written(journal: Journal) -> None:
    """Else sectors of both could make a line that no one wrote."""
    with journal.path.open("ab") as file:
        file.write(b'{"name": "thr')
    recorder = Recorder(journal.path.parent)
    loaded = Journal.load(journal.path, recorder)
    loaded.add(Finished("three", 5))
    loaded.add(Finished("four", 5))
    kinds = [operation.kind for operation in recorder.operations]
    assert kinds == ["reopen", "resize", "flush", "write", "flush", "reopen", "write", "flush"]


def test_several_threads(tmp_path: Path, journal: Journal) -> None:
    class Slow(Disk):
        """Others run while one writes."""

        def write_at(self, file: int, data: bytes | memoryview, offset: int) -> None:
            threading.Event().wait(0.002)
            super().write_at(file, data, offset)

    journal.disk = Slow(sync=False)
    names = [f"shard {i}" for i in range(16)]
    threads = [threading.Thread(target=journal.add, args=(Finished(name, 5),)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(shards(journal.path)) == sorted(["one", "two", *names])


def test_of_another_version(journal: Journal, tmp_path: Path) -> None:
    """Its lines may look otherwise. The error says what it is."""
    first, *lines = journal.path.read_text().splitlines()
    other = json.dumps({**json.loads(first), "version": 99})
    journal.path.write_text("\n".join([other, *(line.replace("size", "length") for line in lines), ""]))
    with pytest.raises(CheckpointError, match="another version of halfbyte wrote it"):
        Journal.load(journal.path, Disk()).check(plan_of(tmp_path / "source"))


@pytest.mark.parametrize("hash", [None, "sha256, first 32 hex digits, of each tensor's bytes"])
def test_a_journal_with_other_hashes_is_not_continued(journal: Journal, tmp_path: Path, hash: str | None) -> None:
    """A manifest names one hash for all of its tensors."""
    journal.first["hash"] = hash
    with pytest.raises(CheckpointError, match="another version of halfbyte wrote it"):
        journal.check(plan_of(tmp_path / "source"))


def test_the_first_line(journal: Journal, tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "source")
    first = {
        "version": 1,
        "hash": "sha256, first 32 hex digits, of the sha256 of every 16384 bytes of each tensor",
        "fingerprint": plan.fingerprint,
        "choices": plan.choices,
        "files": [asdict(file) for file in plan.files],
        "outputs": sorted([*(shard.name for shard in plan.shards), *plan.json_files, *plan.side_files]),
    }
    lines = [json.loads(line) for line in journal.path.read_text().splitlines()]
    done = {"size": 5, "tensors": {"x": "0123"}, "changed_blocks": {}, "plan": ""}
    assert lines == [first, {"name": "one", **done}, {"name": "two", **done}]
    assert journal.first == first
    assert journal.continues(plan)
    started = Journal.start(tmp_path / "other.jsonl", journal.disk, plan, {"rank": [0, 1]})
    assert started.first == first | {"rank": [0, 1]}
    assert not (tmp_path / "other.new").exists()


def test_a_journal_that_is_not_there(tmp_path: Path) -> None:
    loaded = Journal.load(tmp_path / "none", Disk(sync=False))
    assert (loaded.first, loaded.finished) == ({}, {})


def test_what_makes_a_plan_another(tmp_path: Path) -> None:
    """Options by name, files by name, size, time and header; the error says which."""
    plan = plan_of(small_source(tmp_path / "source"))
    (tmp_path / "d" / "w").mkdir(parents=True)
    journal = Journal.start(tmp_path / "d" / "w" / "j", Disk(sync=False), plan)
    journal.check(plan)

    def said(other: Plan) -> str:
        with pytest.raises(CheckpointError) as caught:
            journal.check(other)
        return str(caught.value)

    options = "holds an unfinished conversion with other options ({}). Give the same options to continue, or "
    options += "--overwrite to begin anew"
    one = replace(plan, layout="other")
    assert said(one) == f"{tmp_path / 'd'} " + options.format("layout was 'modelopt', now 'other'")
    two = replace(one, activations="x")
    changes = f"layout was 'modelopt', now 'other'; activations was {plan.activations!r}, now 'x'"
    assert said(two) == f"{tmp_path / 'd'} " + options.format(changes)
    journal.first["version"] = 0
    assert said(plan) == f"{tmp_path / 'd'} " + options.format("another version of halfbyte wrote it")
    journal.first["version"] = 1
    for change in ({"size": 1}, {"modified": 1}, {"header": "x"}, {"name": "new"}):
        last = replace(plan.files[-1], **change)
        other = replace(plan, files=(*plan.files[:-1], last))
        assert said(other) == (
            f"{plan.source / last.name} changed since this conversion began; what was written is of the old file. Use "
            "--overwrite to begin anew"
        )
    journal.check(replace(plan, kept={}))


def test_shards_that_another_plan_uses(tmp_path: Path) -> None:
    source = small_source(tmp_path / "source")
    plan, other = plan_of(source), plan_of(source, keep=("mlp.down_proj",))
    journal = Journal.start(tmp_path / "j", Disk(sync=False), plan)
    for shard in plan.shards:
        journal.add(Finished(shard.name, 1, plan=plan.shard_fingerprint(shard)))
    journal.add(Finished("of no plan", 1))
    assert journal.usable(plan) == journal.finished
    same = [
        one.name
        for one, two in zip(plan.shards, other.shards, strict=True)
        if plan.shard_fingerprint(one) == other.shard_fingerprint(two)
    ]
    assert list(journal.usable(other)) == same
    assert len(same) < len(plan.shards)


def test_a_line_is_all_that_is_written(tmp_path: Path) -> None:
    """Nothing is cut where nothing is torn: neither behind a new first line nor behind one that was read."""
    plan, recorder = plan_of(small_source(tmp_path / "source")), Recorder(tmp_path)
    started = Journal.start(tmp_path / "journal.jsonl", recorder, plan)
    started.add(Finished("one", 5))
    Journal.load(started.path, recorder).add(Finished("two", 5))
    kinds = [operation.kind for operation in recorder.operations]
    added = ["reopen", "write", "flush"]
    assert kinds == ["create", "write", "flush", "rename", "flush folder", *added, *added]
    assert shards(started.path) == ["one", "two"]


def test_no_descriptor_stays_open_if_a_line_cannot_be_written(journal: Journal) -> None:
    class Full(Disk):
        def write_at(self, file: int, data: bytes | memoryview, offset: int) -> None:
            raise OSError(28, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    journal.disk = Full(sync=False)
    with pytest.raises(OSError, match="No space left"):
        journal.add(Finished("three", 5))
    assert list(journal.finished) == ["one", "two"]
    assert len(os.listdir("/proc/self/fd")) == before
