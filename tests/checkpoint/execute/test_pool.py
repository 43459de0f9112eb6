"""Workers that fail, and the others beside them: the first error is what the caller gets, soon, and nothing stays."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfbyte.checkpoint import Options, Plan, Resources, make_plan, run
from halfbyte.checkpoint.execute.journal import JOURNAL
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
