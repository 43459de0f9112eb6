"""The order in which tasks of several shards are handed out."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from halfbyte.checkpoint.execute.hand_out import HandOut, Line
from halfbyte.checkpoint.execute.tasks import Task
from halfbyte.checkpoint.execute.writer import ShardWriter


def lines(shards: dict[str, str], opened: list[str]) -> Iterator[Line]:
    """Shards by name with their tasks: s surveys, w writes."""
    for name, kinds in shards.items():
        opened.append(name)
        writer = cast(ShardWriter, SimpleNamespace(name=name))
        tasks = [Task(lambda arena: None, writer if kind == "w" else None, number) for number, kind in enumerate(kinds)]
        yield Line(writer, iter(tasks))


def start(shards: dict[str, str], at_once: int) -> tuple[HandOut, list[str], list[str]]:
    opened: list[str] = []
    whole: list[str] = []
    hand_out = HandOut(lines(shards, opened), at_once, lambda writer: whole.append(cast(Any, writer).name))
    return hand_out, opened, whole


def take(hand_out: HandOut) -> Task:
    task = hand_out.take()
    assert task is not None
    return task


def name(task: Task) -> str:
    return str(cast(Any, task.writer).name)


def test_each_task_goes_to_the_shard_with_the_fewest_running() -> None:
    hand_out, opened, _ = start({"a": "wwww", "b": "wwww", "c": "wwww", "d": "w"}, 3)
    tasks = [take(hand_out) for _ in range(5)]
    assert [name(task) for task in tasks] == ["a", "b", "c", "a", "b"]
    assert opened == ["a", "b", "c"]
    hand_out.finish(tasks[1])
    hand_out.finish(tasks[4])
    assert name(take(hand_out)) == "b"


def test_all_surveys_of_a_group_come_before_tasks_of_other_shards() -> None:
    """A task of b may wait for the group that a's tasks survey."""
    hand_out, _, _ = start({"a": "sssww", "b": "wwww"}, 2)
    tasks = [take(hand_out) for _ in range(6)]
    assert ["survey" if task.writer is None else name(task) for task in tasks] == [*["survey"] * 3, "a", "b", "b"]


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_a_shard_is_whole_when_all_its_tasks_are_done(at_once: int) -> None:
    hand_out, _, whole = start({"a": "ww", "b": "", "c": "sw"}, at_once)
    tasks = []
    while (task := hand_out.take()) is not None:
        tasks.append(task)
    assert len(tasks) == 4
    assert whole == ["b"]
    for task in tasks:
        hand_out.finish(task)
    assert sorted(whole) == ["a", "b", "c"]
    assert hand_out.take() is None
