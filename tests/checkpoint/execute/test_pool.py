"""Workers that fail, and the others beside them: the first error is what the caller gets, soon, and nothing stays."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfbyte.checkpoint import Event, Options, Plan, Resources, make_plan, run
from halfbyte.checkpoint.execute.journal import JOURNAL
from halfbyte.checkpoint.execute.pool import Pool
from halfbyte.checkpoint.execute.unit import UnitWork
from halfbyte.checkpoint.execute.writer import ShardWriter
from halfbyte.errors import CheckpointError
from tests.checkpoint.toy import all_bytes, llama, write_checkpoint

SHARDS, WORKERS = 6, 4
FOUR = Resources(workers=WORKERS, max_memory=1 << 26, sync=False)
Whole = Callable[..., None]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    source = write_checkpoint(tmp_path / "s", llama(layers=6), {"num_hidden_layers": 6}, shards=SHARDS)
    return make_plan(source, Options(method="amax"))


def run_with(plan: Plan, into: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch) -> BaseException | None:
    """The error of a run in which `whole(number, usual, arguments)` takes the place of a job. It must end."""
    usual, numbers, lock = UnitWork.whole, itertools.count(), threading.Lock()
    found: list[BaseException] = []

    def replaced(*arguments: Any) -> None:
        with lock:
            number = next(numbers)
        whole(number, usual, arguments)

    def caller() -> None:
        try:
            run(plan, into, FOUR)
        except BaseException as error:
            found.append(error)

    before, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(UnitWork, "whole", replaced)
        thread = threading.Thread(target=caller, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "a run does not end"
        assert set(threading.enumerate()) == before, "a thread goes on working"
    assert len(os.listdir("/proc/self/fd")) == files, "a file stays open"
    return found[0] if found else None


def writer_of(arguments: tuple[Any, ...]) -> ShardWriter:
    writer = arguments[4]
    assert isinstance(writer, ShardWriter)
    return writer


def test_one_error_ends_all(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon: each of the others ends what it has begun."""
    begun: list[int] = []

    def whole(number: int, usual: Whole, arguments: tuple[Any, ...]) -> None:
        begun.append(number)
        if number == 2:
            raise CheckpointError("mine")
        time.sleep(0.02)
        usual(*arguments)

    error = run_with(plan, tmp_path / "d", whole, monkeypatch)
    assert str(error) == "mine"
    assert len(begun) <= 3 + 2 * WORKERS < len(plan.units)
    run(plan, tmp_path / "d", FOUR)
    run(plan, tmp_path / "whole", FOUR)
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "whole")


def test_the_first_error_counts(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that follow from it."""

    def whole(number: int, usual: Whole, arguments: tuple[Any, ...]) -> None:
        if number == WORKERS - 1:
            raise CheckpointError("first")
        assert writer_of(arguments).stop.wait(30)
        raise CheckpointError(f"later, of {number}")

    assert str(run_with(plan, tmp_path / "d", whole, monkeypatch)) == "first"


def test_who_waits_for_a_scale_hears_of_an_error(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that should find it has failed; partners in other shards would wait for ever."""

    def whole(number: int, usual: Whole, arguments: tuple[Any, ...]) -> None:
        if arguments[2]:  # members: it makes the scale
            time.sleep(0.3)
            raise CheckpointError("mine")
        usual(*arguments)

    assert str(run_with(plan, tmp_path / "d", whole, monkeypatch)) == "mine"


def test_a_shard_with_a_failed_part_does_not_count(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[str] = []

    def whole(number: int, usual: Whole, arguments: tuple[Any, ...]) -> None:
        usual(*arguments)
        if number == 20:
            failed.append(writer_of(arguments).shard.name)
            raise CheckpointError("mine")

    assert str(run_with(plan, tmp_path / "d", whole, monkeypatch)) == "mine"
    journal = (tmp_path / "d" / ".halfbyte" / JOURNAL).read_text().splitlines()[1:]
    assert not any(failed[0] in line for line in journal)


def test_a_run_that_ends_well_leaves_nothing_open(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with(plan, tmp_path / "d", lambda number, usual, arguments: usual(*arguments), monkeypatch) is None
    assert (tmp_path / "d" / "config.json").exists()


def test_what_is_done_is_told_meanwhile(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a worker computes, and while a shard is flushed; and what nobody was there to hear, at the end."""
    usual, seen = UnitWork.whole, threading.Event()
    told: list[Event] = []

    def slow(*given: Any) -> None:
        assert seen.wait(30)
        usual(*given)

    def report(event: Event) -> None:
        told.append(event)
        if event.kind == "progress":
            seen.set()

    monkeypatch.setattr(UnitWork, "whole", slow)
    run(plan, tmp_path / "a", FOUR, report=report)
    monkeypatch.undo()
    finish, closed = ShardWriter.finish, threading.Event()

    def slow_finish(self: ShardWriter, fingerprint: str) -> Any:
        assert closed.wait(30)
        return finish(self, fingerprint)

    def all_is_computed(event: Event) -> None:
        if event.kind == "progress" and event.done == event.total:
            closed.set()

    monkeypatch.setattr(ShardWriter, "finish", slow_finish)
    run(plan, tmp_path / "b", FOUR, report=all_is_computed)
    monkeypatch.undo()
    told.clear()
    monkeypatch.setattr(Pool, "_wait_for", lambda pool, threads: [thread.join() for thread in threads])
    run(plan, tmp_path / "c", FOUR, report=told.append)
    assert sorted(event.shard for event in told if event.kind == "shard") == sorted(s.name for s in plan.shards)
    (last,) = [event for event in told if event.kind == "progress"]
    assert last.done == last.total == told[0].total


def test_a_shard_that_was_given_up_leaves_no_file(tmp_path: Path) -> None:
    """The others are kept. What is made again needs no room of it."""
    tensors = llama(layers=2)
    tensors["model.layers.0.mlp.down_proj.weight"][3, 4] = np.nan
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors, shards=SHARDS), Options(method="amax"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match="down_proj holds NaN"):
        run(plan, tmp_path / "d", FOUR)
    assert len(os.listdir("/proc/self/fd")) == before
    bad = next(s.name for s in plan.shards if "model.layers.0.mlp.down_proj" in [unit.module for unit in s.units])
    left = {path.name for path in (tmp_path / "d" / ".halfbyte").iterdir()}
    assert left == {JOURNAL, *(shard.name for shard in plan.shards)} - {bad}


def test_a_caller_that_stops_ends_the_workers(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """They finish what they have begun, and no more; nothing keeps the program from its end."""
    begun: list[bool] = []
    usual, finish = UnitWork.whole, ShardWriter.finish

    def slow(*given: Any) -> None:
        begun.append(threading.current_thread().daemon)
        time.sleep(0.02)
        usual(*given)

    def noted(self: ShardWriter, fingerprint: str) -> Any:
        begun.append(threading.current_thread().daemon)
        return finish(self, fingerprint)

    def report(event: Event) -> None:
        if event.kind == "progress":
            raise KeyboardInterrupt

    monkeypatch.setattr(UnitWork, "whole", slow)
    monkeypatch.setattr(ShardWriter, "finish", noted)
    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path / "d", FOUR, report=report)
    assert len(begun) < len(plan.units)
    run(plan, tmp_path / "e", FOUR)
    assert set(begun) == {True}, "a second Ctrl-C ends it at once"
