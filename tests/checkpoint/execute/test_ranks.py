"""Which shards each rank writes, and what is read from the files of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halfbyte.checkpoint.execute import ranks
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.journal import JOURNAL, Finished, Journal
from halfbyte.checkpoint.execute.locks import FileLock, is_locked
from halfbyte.checkpoint.execute.pool import shard_bytes
from halfbyte.checkpoint.execute.ranks import (
    Rank,
    absorb,
    guarded,
    load_all,
    rank_journals,
    running_ranks,
    share_of,
)
from halfbyte.errors import CheckpointError, InputError
from tests.checkpoint.execute.scenes import plan_of, small_source


@pytest.mark.parametrize("world", [1, 2, 3, 7, 20])
def test_every_shard_is_in_one_share(tmp_path: Path, world: int) -> None:
    plan = plan_of(small_source(tmp_path, shards=7))
    shares = [share_of(plan, Rank(number, world)) for number in range(world)]
    assert sorted(shard.name for share in shares for shard in share) == sorted(shard.name for shard in plan.shards)
    loads = [sum(map(shard_bytes, share)) for share in shares]
    largest = max(map(shard_bytes, plan.shards))
    assert max(loads) - min(loads) <= largest


def test_the_largest_shards_are_dealt_out_first(tmp_path: Path) -> None:
    plan = plan_of(small_source(tmp_path, shards=7))
    shares = [share_of(plan, Rank(number, 3)) for number in range(3)]
    three = sorted(plan.shards, key=lambda shard: (-shard_bytes(shard), shard.name))[:3]
    assert [shard in share for shard, share in zip(three, shares, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("number", "world", "message"),
    [(4, 4, "--rank 4: ranks of 4 processes are 0 to 3"), (-1, 2, "--rank -1"), (0, 0, "--world-size 0: it counts")],
)
def test_a_rank_out_of_range(number: int, world: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Rank(number, world)


def test_journals_of_one_conversion_are_read_together(tmp_path: Path) -> None:
    plan = plan_of(small_source(tmp_path / "source"))
    other = plan_of(plan.source, keep=("mlp.down_proj",))
    work, disk = tmp_path / "work", Disk(sync=False)
    work.mkdir()
    for number, its in enumerate((plan, other, plan)):
        journal = Journal.start(work / f"{Rank(number, 3).name}.jsonl", disk, its, {"rank": [number, 3]})
        journal.add(Finished(f"shard {number}", 1))
    (work / "rank-00009-of-00003.jsonl").write_text("no rank")
    journal = load_all(work, disk)
    assert journal.path == work / JOURNAL
    assert set(journal.finished) == {"shard 0", "shard 2"}
    absorb(plan, journal)
    assert not list(work.glob("rank-0000[0-2]*"))
    again = load_all(work, disk)
    assert again.continues(plan)
    assert again.finished == journal.finished
    assert "rank" not in again.first


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / f"{Rank(2, 4).name}.lock"
    program = (
        "import sys, time; from pathlib import Path; from halfbyte.checkpoint.execute.locks import FileLock;"
        "lock = FileLock(Path(sys.argv[1])); print(lock.take(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert running_ranks(tmp_path) == [Rank(2, 4)]
        process.kill()
    assert path.exists()
    assert running_ranks(tmp_path) == []
    lock = FileLock(path)
    assert lock.take()
    assert running_ranks(tmp_path) == [Rank(2, 4)]
    assert not FileLock(path).take(seconds=0.1)
    lock.release()
    assert not is_locked(path)


def test_a_lock_on_a_file_that_was_removed_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = FileLock(path), FileLock(path)
    assert first.take()
    path.unlink()
    assert second.take()
    second.release()
    first.release()


def test_names_of_ranks() -> None:
    assert (Rank(3, 12).name, str(Rank(3, 12))) == ("rank-00003-of-00012", "rank 3 of 12")
    assert Rank(0, 1) < Rank(0, 2) < Rank(1, 2)
    for number, world, message in (
        (1, 1, "--rank 1: ranks of 1 processes are 0 to 0"),
        (-1, 2, "--rank -1: ranks of 2 processes are 0 to 1"),
        (0, 0, "--world-size 0: it counts the processes, so it is 1 or more"),
    ):
        with pytest.raises(InputError) as caught:
            Rank(number, world)
        assert str(caught.value) == message


def sized(*sizes: int) -> Any:
    """A plan of shards of these sizes, a to z."""
    return SimpleNamespace(
        shards=tuple(
            SimpleNamespace(
                name=chr(97 + i), copies=(SimpleNamespace(output=SimpleNamespace(bytes=size - 1)),),
                units=(SimpleNamespace(source_bytes=1),),
            )
            for i, size in enumerate(sizes)
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ((5, 4, 3, 3, 3), ["ad", "bce"]),  # 5; 4; 4+3; 5+3; 7+3
        ((3, 3, 3, 5, 4), ["bd", "ace"]),  # in the order of the plan, not of the sizes
        ((1, 1, 1, 1), ["ac", "bd"]),
        ((9, 1, 1, 1), ["a", "bcd"]),
        ((7,), ["a", ""]),
    ],
)
def test_how_shards_are_dealt_out(sizes: tuple[int, ...], shares: list[str]) -> None:
    """The largest first, by name among equals, each to the rank with the fewest bytes, the first of equals."""
    plan = sized(*sizes)
    assert ["".join(shard.name for shard in share_of(plan, Rank(n, 2))) for n in range(2)] == shares
    assert share_of(plan, Rank(0, 1)) == plan.shards


def test_a_guard_that_is_held_or_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ranks.WAIT, ranks.GUARD) == (120.0, "ranks.lock")
    with guarded(tmp_path / "gone") as there:
        assert not there
    with guarded(tmp_path) as there:
        assert there
        assert is_locked(tmp_path / ranks.GUARD)
        monkeypatch.setattr(ranks, "WAIT", 0.0)
        with pytest.raises(CheckpointError) as caught, guarded(tmp_path):
            pass
        assert str(caught.value) == (
            f"another rank is beginning or closing in {tmp_path.parent}; run the same command again"
        )
    assert not is_locked(tmp_path / ranks.GUARD)


def test_files_of_ranks_by_name(tmp_path: Path) -> None:
    """Numbers of at least five digits, below the count, of the kind that is asked for."""
    disk = Disk(sync=False)
    assert running_ranks(tmp_path / "none") == []
    line = json.dumps({"version": 1, "fingerprint": "x"}) + "\n"
    for name in (
        "rank-00002-of-00003.jsonl", "rank-00000-of-00003.jsonl", "rank-123456-of-200000.jsonl", "rank-3-of-4.jsonl",
        "rank-00003-of-00003.jsonl", "rank-00001-of-00003.lock", "a-rank-00001-of-00003.jsonl",
    ):  # fmt: skip
        (tmp_path / name).write_text(line)
    (tmp_path / "rank-00001-of-00003.jsonl").write_text("")
    assert list(rank_journals(tmp_path, disk)) == [Rank(0, 3), Rank(2, 3), Rank(123456, 200000)]
    held = [FileLock(tmp_path / f"{Rank(number, 3).name}.lock") for number in (2, 0)]
    for lock in held:
        assert lock.take()
    assert running_ranks(tmp_path) == [Rank(0, 3), Rank(2, 3)]
    for lock in held:
        lock.release()
