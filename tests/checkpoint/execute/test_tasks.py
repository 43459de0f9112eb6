"""How a plan is cut into tasks: who works together, who surveys, what counts as progress, and what is forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from halfbyte.checkpoint.execute.pieces import Sizes
from halfbyte.checkpoint.execute.tasks import Job, Task, Tasks, jobs_of
from tests.checkpoint.execute.test_pieces import stand_in

ARENA: Any = None
"""Nobody asks for it here."""


def unit(module: str, group: int, action: str = "quantize", rows: int = 10) -> Any:
    made = stand_in(action, rows=rows)
    made.module, made.group, made.source_bytes = module, group, 128 * (rows + 3)
    return made


def shard(name: str, *units: Any, copies: tuple[Any, ...] = ()) -> Any:
    return SimpleNamespace(name=name, units=units, copies=copies, stop=None)


def copied(name: str, size: int) -> Any:
    return SimpleNamespace(file="f", offset=1000, output=SimpleNamespace(bytes=size, part=SimpleNamespace(name=name)))


def test_partners_are_one_job_at_the_place_of_the_first() -> None:
    """Weights that only move share nothing, whatever group they stand in; nor do those of no group."""
    units = [unit("a", 1), unit("b", -1), unit("c", 0), unit("d", 1), unit("e", 0, "relayout"), unit("f", -1)]
    jobs = jobs_of(shard("s", *units, unit("g", 0, "cast")))
    assert [("".join(one.module for one in job.units), job.group) for job in jobs] == [
        ("ad", 1), ("b", -1), ("cg", 0), ("e", -1), ("f", -1)
    ]  # fmt: skip
    assert Job() == Job([], -1)


class Acts:
    """Notes what tasks ask for."""

    def __init__(self, holds: bool) -> None:
        self.held, self.log = holds, list[tuple[object, ...]]()
        self.files = SimpleNamespace(read=self.read)

    def read(self, file: str, offset: int, into: Any) -> None:
        self.log.append(("read", offset, into.nbytes))

    def holds(self, units: Any, members: Any, sizes: Sizes) -> bool:
        return self.held

    def whole(self, units: Any, members: Any, group: Any, writer: Any, chunk: int, arena: Any) -> None:
        of = "" if group is None else group.modules
        names = ["".join(one.module for one in part) for part in (units, members)]
        self.log.append(("whole", *names, of, writer, chunk))

    def survey(self, unit: Any, piece: Any, group: Any, arena: Any) -> None:
        self.log.append(("survey", unit.module, piece.start))

    def settle(self, units: Any, group: Any, chunk: int, arena: Any) -> None:
        self.log.append(("settle", "".join(one.module for one in units), chunk))

    def write(self, unit: Any, piece: Any, raw: Any, group: Any, writer: Any, arena: Any) -> None:
        assert raw is None
        self.log.append(("write", unit.module, piece.start, None if group is None else group.modules))

    def forget(self, unit: Any) -> None:
        self.log.append(("forget", unit.module))


def tasks_of(acts: Any, *shards: Any, chunk: int = 5 * 128) -> list[list[Task]]:
    """The tasks of each shard, which are its own writers here."""
    units = [one for part in shards for one in part.units]
    groups = tuple(tuple(one.module for one in units if one.group == group) for group in (0, 1))
    plan: Any = SimpleNamespace(units=units, groups=groups)
    made = Tasks(plan, acts, Sizes(chunk, 1 << 20))
    for group in made.groups:
        group.wait = lambda stop, name=group.modules: acts.log.append(("wait", name))  # type: ignore[method-assign,misc]
    return [list(made.of_shard(part, part)) for part in shards]


def test_small_jobs_are_one_task_and_the_first_of_a_group_surveys_it() -> None:
    acts = Acts(holds=True)
    one = shard("one", unit("a", 0), unit("b", -1), unit("m", 0, "relayout"))
    two = shard("two", unit("c", 0), unit("d", 0, rows=4))
    first, second = tasks_of(acts, one, two)
    assert [(task.bytes, task.writer) for task in first] == [(13 * 128, one)] * 3
    assert [(task.bytes, task.writer) for task in second] == [((13 + 7) * 128, two)]
    for task in (*first, *second):
        task.run(ARENA)
    of = ("a", "m", "c", "d")
    assert acts.log == [
        ("whole", "a", "amcd", of, one, 640), ("whole", "b", "", "", one, 640), ("whole", "m", "", "", one, 640),
        ("whole", "cd", "", of, two, 640),
    ]  # fmt: skip


def test_large_jobs_are_a_task_per_piece() -> None:
    """All pieces of all partners are surveyed before any is written; a source is forgotten with its last piece."""
    acts = Acts(holds=False)
    one, two = shard("one", unit("a", 0), unit("b", -1, rows=5)), shard("two", unit("c", 0, rows=4))
    first, second = tasks_of(acts, one, two)
    surveys = [task for task in first if task.writer is None]
    assert [task.bytes for task in surveys] == [0] * 5
    assert first[:5] == surveys
    assert [task.bytes for task in first[5:]] == [640, 640, 384, 640, 384]
    assert [(task.bytes, task.writer) for task in second] == [(512, two), (384, two)]
    for task in (*first[:4], first[4]):
        assert not [entry for entry in acts.log if entry[0] == "settle"]
        task.run(ARENA)
    surveyed = [("survey", *place) for place in (("a", 0), ("a", 5), ("a", 0), ("c", 0), ("c", 0))]
    assert acts.log == [*surveyed, ("settle", "ac", 640)]
    acts.log.clear()
    for task in (*first[5:], *second):
        task.run(ARENA)
    of, wait = ("a", "c"), ("wait", ("a", "c"))
    assert acts.log == [
        wait, ("write", "a", 0, of), wait, ("write", "a", 5, of), wait, ("write", "a", 0, of), ("forget", "a"),
        ("write", "b", 0, None), ("write", "b", 0, None), ("forget", "b"),
        wait, ("write", "c", 0, of), wait, ("write", "c", 0, of), ("forget", "c"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "tasks"),
    [
        ([3, 4, 5], [12]),
        ([60, 40, 7], [100, 7]),
        ([99, 100, 7], [199, 7]),
        ([101, 3], [100, 1, 3]),
        ([3, 250, 4], [100, 100, 50, 7]),
        ([1] * 300, [100, 100, 100]),
        ([0, 0], [0]),
        ([], []),
    ],
)
def test_small_tensors_are_copied_together_and_large_ones_in_pieces(sizes: list[int], tasks: list[int]) -> None:
    copies = tuple(copied(str(number), size) for number, size in enumerate(sizes))
    (made,) = tasks_of(Acts(True), shard("s", copies=copies), chunk=100)
    assert [task.bytes for task in made] == tasks


def test_where_copies_are_read_and_put() -> None:
    """Each takes the room of one."""
    acts, put = Acts(True), list[tuple[object, ...]]()
    arena: Any = SimpleNamespace(
        release=lambda: put.append(("release",)), take=lambda size: SimpleNamespace(nbytes=size)
    )
    part = shard("s", copies=(copied("a", 30), copied("b", 120), copied("c", 40)))
    part.put = lambda output, raw, at=0: put.append((output.part.name, raw.nbytes, at))
    (made,) = tasks_of(acts, part, chunk=100)
    for task in made:
        task.run(arena)
    assert acts.log == [("read", 1000, 100), ("read", 1100, 20), ("read", 1000, 30), ("read", 1000, 40)]
    assert put == [("b", 100, 0), ("b", 20, 100), ("release",), ("a", 30, 0), ("release",), ("c", 40, 0)]
