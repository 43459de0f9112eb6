"""Conversions that several processes share: the bytes of one process, whoever is killed, late, doubled or different."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halfbyte.checkpoint import Event, Options, Outcome, Plan, make_plan, run
from halfbyte.checkpoint.execute import ranked
from halfbyte.checkpoint.execute.destination import locked
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.ending import Ending
from halfbyte.checkpoint.execute.journal import JOURNAL, work_folder
from halfbyte.checkpoint.execute.locks import FileLock
from halfbyte.checkpoint.execute.pool import shard_bytes
from halfbyte.checkpoint.execute.ranked import finish_ranks, run_rank
from halfbyte.checkpoint.execute.ranks import Rank, share_of
from halfbyte.checkpoint.io.side_files import WORK
from halfbyte.errors import CheckpointError
from tests.checkpoint.execute import scenes
from tests.checkpoint.execute.recorder import Killed, Operation, Recorder
from tests.checkpoint.execute.scenes import INTO, ONE, change_weights, plan_of, small_source
from tests.checkpoint.toy import all_bytes, llama, write_checkpoint

SHARDS = 5


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_of(small_source(tmp_path / "source", shards=SHARDS))


@pytest.fixture
def whole(tmp_path: Path, plan: Plan) -> dict[str, bytes]:
    run(plan, tmp_path / "one process", ONE)
    return all_bytes(tmp_path / "one process")


def ranks(plan: Plan, folder: Path, world: int) -> list[Outcome]:
    return [run_rank(plan, folder, Rank(number, world), ONE) for number in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 9])
def test_one_after_the_other(tmp_path: Path, plan: Plan, whole: dict[str, bytes], world: int) -> None:
    outcomes = ranks(plan, tmp_path / "d", world)
    assert all_bytes(tmp_path / "d") == whole
    assert sum(outcome.shards_written for outcome in outcomes) == SHARDS
    closed = [outcome.complete for outcome in outcomes]
    assert closed == sorted(closed)
    assert closed[-1]
    assert finish_ranks(tmp_path / "d").finished_before


def work_alone(source: Path, folder: Path, number: int, world: int) -> None:
    run_rank(plan_of(source), folder, Rank(number, world), ONE)


def test_at_the_same_time(tmp_path: Path, plan: Plan, whole: dict[str, bytes]) -> None:
    """Real processes. Whichever is last has closed."""
    spawn = multiprocessing.get_context("spawn")
    started = [spawn.Process(target=work_alone, args=(plan.source, tmp_path / "d", n, 3)) for n in range(3)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0, 0, 0]
    assert all_bytes(tmp_path / "d") == whole


@contextmanager
def on_disk(disk: Disk) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranked, "Disk", lambda sync: disk)
        yield


def test_the_last_rank_is_killed_at_every_operation(tmp_path: Path, plan: Plan, whole: dict[str, bytes]) -> None:
    """Then the same rank again, or `finish`, or a run without ranks: all end with the same bytes."""
    total = 0
    for at in range(0, 1000):
        root = tmp_path / f"disk {at}"
        into = root / INTO
        run_rank(plan, into, Rank(0, 2), ONE)
        with on_disk(Recorder(root, kill_at=at)):
            try:
                run_rank(plan, into, Rank(1, 2), ONE)
            except Killed:
                total += 1
            else:
                break
        if at % 3 == 0:
            run(plan, into, ONE)
        else:
            if at % 3 == 1:
                with suppress(CheckpointError):  # of missing shards
                    finish_ranks(into, sync=False)
            run_rank(plan, into, Rank(1, 2), ONE)
        assert all_bytes(into) == whole, f"killed at operation {at}"
    assert total > 40


def test_finish_names_what_is_missing(tmp_path: Path, plan: Plan, whole: dict[str, bytes]) -> None:
    run_rank(plan, tmp_path / "d", Rank(1, 3), ONE)
    with pytest.raises(CheckpointError, match=r"\d shards are missing in .* never begun: rank 0, 2 of 3"):
        finish_ranks(tmp_path / "d")
    run_rank(plan, tmp_path / "d", Rank(0, 3), ONE)
    lost = share_of(plan, Rank(1, 3))[0]
    (work_folder(tmp_path / "d") / lost.name).unlink()
    with pytest.raises(CheckpointError, match=r"not done: rank 1 of 3; never begun: rank 2 of 3"):
        finish_ranks(tmp_path / "d")
    with FileLock(work_folder(tmp_path / "d") / "rank-00002-of-00003.lock"):
        with pytest.raises(CheckpointError, match=r"another conversion into .* is running \(rank 2 of 3\)"):
            finish_ranks(tmp_path / "d")
        with pytest.raises(CheckpointError, match=r"is running \(rank 2 of 3\)"):
            run(plan, tmp_path / "d", ONE)
    assert {path.name for path in (tmp_path / "d").iterdir()} == {WORK}
    run(plan, tmp_path / "d", ONE)
    assert all_bytes(tmp_path / "d") == whole


def test_what_finish_does_not_know(tmp_path: Path, plan: Plan) -> None:
    with pytest.raises(CheckpointError, match="is not there; give the DST of `halfbyte convert --rank"):
        finish_ranks(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no conversion that ranks have begun"):
        finish_ranks(tmp_path / "empty")
    root = tmp_path / "disk"
    root.mkdir()
    with scenes.on_disk(Recorder(root, kill_at=30)), pytest.raises(Killed):
        run(plan, root / INTO, ONE)
    with pytest.raises(CheckpointError, match="was begun without --rank; run its command again"):
        finish_ranks(root / INTO)


def test_a_rank_that_runs_twice_at_once_is_refused(tmp_path: Path, plan: Plan, whole: dict[str, bytes]) -> None:
    run_rank(plan, tmp_path / "d", Rank(0, 3), ONE)
    with FileLock(work_folder(tmp_path / "d") / "rank-00001-of-00003.lock"):
        with pytest.raises(CheckpointError, match=r"rank 1 of 3 is running already .*; start each rank once"):
            run_rank(plan, tmp_path / "d", Rank(1, 3), ONE)
        with pytest.raises(CheckpointError, match=r"rank 1 of 3 is running .* this is rank 1 of 2; .* --world-size"):
            run_rank(plan, tmp_path / "d", Rank(1, 2), ONE)
        run_rank(plan, tmp_path / "d", Rank(2, 3), ONE)
    assert run_rank(plan, tmp_path / "d", Rank(1, 2), ONE).shards_missing > 0  # another number of ranks goes on
    run_rank(plan, tmp_path / "d", Rank(0, 2), ONE)
    assert all_bytes(tmp_path / "d") == whole


def test_ranks_with_other_options_are_refused(tmp_path: Path, plan: Plan, whole: dict[str, bytes]) -> None:
    run_rank(plan, tmp_path / "d", Rank(0, 2), ONE)
    others = {
        "other options .*all of them need the same options": make_plan(plan.source, Options(method="sweep")),
        "begun with other modules kept. Give every rank the same": plan_of(plan.source, keep=("mlp.down_proj",)),
    }
    for message, other in others.items():
        with pytest.raises(CheckpointError, match=message):
            run_rank(other, tmp_path / "d", Rank(1, 2), ONE)
    run_rank(plan, tmp_path / "d", Rank(1, 2), ONE)
    assert all_bytes(tmp_path / "d") == whole
    with pytest.raises(CheckpointError, match=r"finished conversion with other options .*Ranks cannot replace"):
        run_rank(others.popitem()[1], tmp_path / "d", Rank(0, 2), ONE)


def test_a_run_without_ranks_takes_over_with_other_modules_kept(tmp_path: Path, plan: Plan) -> None:
    """After NaN in one share: the shards that stay the same are used."""
    other = plan_of(plan.source, keep=("self_attn.o_proj",))
    run_rank(plan, tmp_path / "d", Rank(0, 2), ONE)
    assert run(other, tmp_path / "d", ONE).shards_found > 0
    run(other, tmp_path / "fresh", ONE)
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "fresh")


def a_shard_counts(operation: Operation) -> bool:
    return operation.kind == "flush" and operation.path.endswith(JOURNAL)


def test_ranks_go_on_from_a_run_without(tmp_path: Path, plan: Plan, whole: dict[str, bytes]) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with scenes.on_disk(Recorder(root, kill_after=a_shard_counts)), pytest.raises(Killed):
        run(plan, root / INTO, ONE)
    outcomes = ranks(plan, root / INTO, 2)
    assert sum(outcome.shards_found for outcome in outcomes) > 0
    assert all_bytes(root / INTO) == whole


def test_a_source_that_changed_between_ranks(tmp_path: Path, plan: Plan) -> None:
    run_rank(plan, tmp_path / "d", Rank(0, 2), ONE)
    change_weights(plan.source)
    with pytest.raises(CheckpointError, match="changed since this conversion began") as caught:
        run_rank(plan_of(plan.source), tmp_path / "d", Rank(1, 2), ONE)
    says_what_ranks_can_do(str(caught.value), tmp_path / "d")


def says_what_ranks_can_do(text: str, destination: Path) -> None:
    assert "--overwrite" not in text
    assert f"To begin anew, stop every rank, delete {destination} and start them again" in text


@pytest.mark.parametrize("count", [1, 2])
def test_a_source_that_changes_while_ranks_convert_it(tmp_path: Path, plan: Plan, count: int) -> None:
    """Found when the rank has written a shard of it, or when the last one closes; said as `finish` says it too."""
    for number in range(count - 1):
        run_rank(plan, tmp_path / "d", Rank(number, count), ONE)
    change_weights(plan.source)
    with pytest.raises(CheckpointError, match="changed while it was converted") as caught:
        run_rank(plan, tmp_path / "d", Rank(count - 1, count), ONE)
    says_what_ranks_can_do(str(caught.value), tmp_path / "d")


def test_a_source_that_changed_before_the_ranks_are_finished(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(ranked, "_close_if_last", lambda *args: (False, 0))
        ranks(plan, tmp_path / "d", 2)
    change_weights(plan.source)
    with pytest.raises(CheckpointError, match="changed while it was converted") as caught:
        finish_ranks(tmp_path / "d", sync=False)
    says_what_ranks_can_do(str(caught.value), tmp_path / "d")


def test_what_is_kept_of_a_plan_closes_like_the_plan(tmp_path: Path, plan: Plan) -> None:
    disk = Disk(sync=False)
    Ending.of(plan).write(tmp_path, disk)
    kept = Ending.read(tmp_path)
    assert kept == Ending.of(plan)
    for field in dataclasses.fields(Ending):
        if field.name not in ("source", "shards"):
            assert getattr(kept, field.name) == getattr(plan, field.name), field.name
    (tmp_path / "ending.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"ending.json cannot be read: .*; run the convert command again"):
        Ending.read(tmp_path)


def begun_by(*ranks: tuple[int, int, list[str]]) -> dict[Rank, Any]:
    """Journals of ranks with their shares."""
    return {Rank(number, of): SimpleNamespace(first={"share": share}) for number, of, share in ranks}


@pytest.mark.parametrize(
    ("missing", "journals", "said"),
    [
        ("a", [], "1 shard is missing in d (a)"),
        ("abc", [], "3 shards are missing in d (a, b, c)"),
        ("abcd", [], "4 shards are missing in d (a, b, c, …)"),
        ("b", [(0, 2, ["a"]), (1, 2, ["b", "c"])], "1 shard is missing in d (b); not done: rank 1 of 2"),
        ("b", [(0, 2, ["a"])], "1 shard is missing in d (b); never begun: rank 1 of 2"),
        ("bd", [(0, 4, ["a", "d"]), (2, 4, None), (0, 2, ["b"])],
         "2 shards are missing in d (b, d); not done: rank 0 of 4; never begun: rank 1, 3 of 4"),
        ("b", [(0, 5, ["b"])], "1 shard is missing in d (b); not done: rank 0 of 5; never begun: rank 1, 2, 3, … of 5"),
    ],
)  # fmt: skip
def test_whose_shards_are_missing(missing: str, journals: list[tuple[int, int, list[str]]], said: str) -> None:
    """Ranks of the largest number that was begun; at most three of each are named."""
    found = ranked._what_is_missing(Path("d"), list(missing), begun_by(*journals))
    assert found == f"{said}. Run these ranks again, or the same command without --rank"


@pytest.mark.parametrize(("number", "closed", "fine"), [(39, True, True), (39, False, False), (5, True, False)])
def test_a_lock_that_comes_while_the_work_folder_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, closed: bool, fine: bool
) -> None:
    """ENOTEMPTY, with the manifest there: the folder goes with the lock, for good. All else is an error."""
    work, disk = tmp_path / "d" / WORK, Recorder(tmp_path)
    work.mkdir(parents=True)
    (work / "rank-00007-of-00009.lock").write_text("")

    def finish(*given: object) -> None:
        if closed:
            (tmp_path / "d" / "halfbyte.json").write_text('{"fingerprint": "x", "shards": {}}')
        raise OSError(number, "no")

    monkeypatch.setattr("halfbyte.checkpoint.execute.conversion.finish", finish)
    journal: Any = SimpleNamespace(disk=disk)
    plan: Any = None
    if fine:
        ranked._finish(plan, tmp_path / "d", journal, lambda event: None)
        kinds = [(one.kind, one.path) for one in disk.operations]
        assert kinds[-2:] == [("remove folder", f"d/{WORK}"), ("flush folder", "d")]
        assert not work.exists()
    else:
        with pytest.raises(OSError, match="no"):
            ranked._finish(plan, tmp_path / "d", journal, lambda event: None)
        assert work.exists()


def test_a_rank_that_finds_all_closed(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one did it, before this one asked or while it waited for the guard: nothing is missing."""
    disk, quiet = Disk(sync=False), lambda event: None
    assert ranked._close_if_last(plan, tmp_path / "none", disk, quiet) == (True, 0)
    (tmp_path / "d" / WORK).mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(ranked, "guarded", lambda work: nullcontext(False))
        assert ranked._close_if_last(plan, tmp_path / "d", disk, quiet) == (True, 0)
    assert ranked._close_if_last(plan, tmp_path / "d", disk, quiet) == (False, SHARDS)
    outcomes = ranks(plan, tmp_path / "d", 2)
    assert [outcome.complete for outcome in outcomes] == [False, True]
    assert [outcome.shards_missing for outcome in outcomes] == [len(share_of(plan, Rank(1, 2))), 0]
    assert [(outcome.finished_before, outcome.shards_found) for outcome in outcomes] == [(False, 0)] * 2


def test_where_ranks_may_not_write(tmp_path: Path, plan: Plan) -> None:
    """Nothing is made there."""
    inside = plan.source / "out"
    with pytest.raises(CheckpointError) as caught:
        run_rank(plan, inside, Rank(0, 2), ONE)
    assert str(caught.value) == f"{inside} lies inside the source {plan.source}; give a directory outside"
    assert not inside.exists()


def test_outcomes_of_ranks(tmp_path: Path, plan: Plan) -> None:
    one = run_rank(plan, tmp_path / "d", Rank(0, 1), ONE)
    assert one == Outcome(SHARDS, 0)
    assert run_rank(plan, tmp_path / "d", Rank(0, 1), ONE) == Outcome(0, SHARDS, finished_before=True)
    assert finish_ranks(tmp_path / "d") == Outcome(0, SHARDS, finished_before=True)


def test_what_is_flushed_when_ranks_begin_and_meet(tmp_path: Path, plan: Plan) -> None:
    """Its journal and the ending, and at the end one journal in place of those of the ranks."""
    disk = Recorder(tmp_path)
    with on_disk(disk):
        run_rank(plan, tmp_path / "d", Rank(0, 1), ONE)
    at, name = f"d/{WORK}", f"d/{WORK}/rank-00000-of-00001"
    kinds = [
        (one.kind, one.path, one.target) for one in disk.operations if one.kind not in ("write", "create", "flush")
    ]
    assert kinds[:8] == [
        ("make folder", "d", ""), ("flush folder", ".", ""), ("make folder", at, ""), ("flush folder", "d", ""),
        ("rename", f"{name}.new", f"{name}.jsonl"), ("flush folder", at, ""),
        ("rename", f"{at}/ending.json.new", f"{at}/ending.json"), ("flush folder", at, ""),
    ]  # fmt: skip
    met = kinds.index(("rename", f"{at}/journal.new", f"{at}/{JOURNAL}"))
    assert kinds[met + 1 : met + 4] == [
        ("flush folder", at, ""), ("remove", f"{name}.jsonl", ""), ("flush folder", at, ""),
    ]  # fmt: skip


def test_bad_values_of_a_share_are_named(tmp_path: Path) -> None:
    """By the rank that has them, and by no other; what is finished stays."""
    tensors = llama(layers=1)
    tensors["model.layers.0.mlp.down_proj.weight"][2, 3] = np.nan
    plan = plan_of(write_checkpoint(tmp_path / "s", tensors, {"num_hidden_layers": 1}, shards=3))
    bad = next(shard for shard in plan.shards if "model.layers.0.mlp.down_proj" in [one.module for one in shard.units])
    for number in range(3):
        if bad in share_of(plan, Rank(number, 3)):
            with pytest.raises(
                CheckpointError, match=r"^1 module has no usable scale:\n  model.layers.0.mlp.down_proj h"
            ):
                run_rank(plan, tmp_path / "d", Rank(number, 3), ONE)
        else:
            assert not run_rank(plan, tmp_path / "d", Rank(number, 3), ONE).complete
    with pytest.raises(CheckpointError, match=rf"1 shard is missing in .* \({bad.name}\); not done: rank \d of 3\."):
        finish_ranks(tmp_path / "d")


def test_what_a_rank_reports_and_finds_again(tmp_path: Path, plan: Plan) -> None:
    """Bytes of its own share; files that get their names if it is the last. What is there already is found."""
    first, last = Rank(0, 2), Rank(1, 2)
    sizes = {rank: sum(map(shard_bytes, share_of(plan, rank))) for rank in (first, last)}
    shares = {rank: len(share_of(plan, rank)) for rank in (first, last)}
    files = SHARDS + len(plan.side_files) + len(plan.json_files) + 1
    for rank, closes in ((first, 0), (first, 0), (last, files)):
        told: list[Event] = []
        again = rank is first and (tmp_path / "d").exists()
        outcome = run_rank(plan, tmp_path / "d", rank, ONE, told.append)
        assert (told[0].kind, told[0].done, told[0].total) == ("begin", sizes[rank] if again else 0, sizes[rank])
        assert told[-1] == Event("end", sizes[rank], sizes[rank])
        assert [event.done for event in told if event.kind == "close"] == list(range(1, closes + 1))
        written, found = (0, shares[rank]) if again else (shares[rank], 0)
        assert (outcome.shards_written, outcome.shards_found) == (written, found)


def test_ranks_that_are_finished_by_hand(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """One journal stands in place of theirs before the first file gets its name; all of it is flushed."""
    with monkeypatch.context() as patched:
        patched.setattr(ranked, "_close_if_last", lambda *args: (False, 0))
        ranks(plan, tmp_path / "d", 2)
    synced: list[bool] = []
    disk, told = Recorder(tmp_path), list[Event]()

    def noted(sync: bool) -> Disk:
        synced.append(sync)
        return disk

    monkeypatch.setattr(ranked, "Disk", noted)
    assert finish_ranks(tmp_path / "d", report=told.append) == Outcome(0, SHARDS)
    assert synced == [True]
    names = [one.target for one in disk.operations if one.kind == "rename"]
    assert names[0] == f"d/{WORK}/{JOURNAL}"
    assert names[1:] == [f"d/{name}" for name in (*(s.name for s in plan.shards), *plan.side_files)] + [
        f"d/{name}" for name in (*(name for name in plan.json_files if name != "config.json"), "config.json")
    ] + ["d/halfbyte.json"]
    assert {event.kind for event in told} == {"close"}


def test_a_rank_begins_beside_others_and_not_beside_a_run(tmp_path: Path, plan: Plan) -> None:
    """Also where another plan left its ending."""
    into = tmp_path / "d"
    other = plan_of(plan.source, layout="compressed-tensors")
    work_folder(into).mkdir(parents=True)
    Ending.of(other).write(work_folder(into), Disk(sync=False))
    with locked(into), pytest.raises(CheckpointError, match=r"another conversion into .* is running"):
        run_rank(plan, into, Rank(0, 2), ONE)
    with locked(into, shared=True):
        assert run_rank(plan, into, Rank(0, 2), ONE).shards_written == len(share_of(plan, Rank(0, 2)))
    assert Ending.read(work_folder(into)) == Ending.of(plan)
