"""The order in which a conversion changes the disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from halfbyte.checkpoint import Event, run
from halfbyte.checkpoint.execute.journal import JOURNAL
from halfbyte.checkpoint.io.index import CONFIG, INDEX, MANIFEST
from tests.checkpoint.execute.recorder import Operation, Recorder
from tests.checkpoint.execute.scenes import (
    IN_WORK,
    INTO,
    SCENES,
    Scene,
    fresh,
    journal_lines,
    made_again,
    many_workers,
    on_disk,
    plan_of,
    replaced,
    small_source,
)  # fmt: skip

WORK = IN_WORK.rstrip("/")


Fits = Callable[[Operation], bool]


def places(operations: Iterable[Operation], fits: Fits) -> list[int]:
    return [i for i, operation in enumerate(operations) if fits(operation)]


def of_file(kind: str, path: str) -> Fits:
    return lambda operation: operation.kind == kind and operation.path == path


def renamed_to(path: str) -> Fits:
    return lambda operation: operation.kind == "rename" and operation.target == path


def given_names(operations: Iterable[Operation]) -> dict[str, int]:
    """Final name → the operation that gave it."""
    return {
        operation.target.removeprefix(f"{INTO}/"): i
        for i, operation in enumerate(operations)
        if operation.kind == "rename" and not operation.target.startswith(IN_WORK)
    }


@pytest.mark.parametrize("make", [fresh, many_workers])
def test_a_shard_is_on_the_disk_before_the_journal_names_it(tmp_path: Path, make: Callable[[Path], Scene]) -> None:
    scene = make(tmp_path)
    operations = scene.operations
    lines = {json.loads(operations[i].data)["name"]: i for i in places(operations, of_file("write", IN_WORK + JOURNAL))}
    assert set(lines) == {shard.name for shard in scene.plan.shards}
    for name, line in lines.items():
        *_, last = places(operations, of_file("write", f"{IN_WORK}{name}.part"))
        (flush,) = places(operations, of_file("flush", f"{IN_WORK}{name}.part"))
        (named,) = places(operations, renamed_to(IN_WORK + name))
        assert last < flush < named < line
        assert any(named < i < line for i in places(operations, of_file("flush folder", WORK)))


def test_a_shard_is_reported_after_its_line_is_on_the_disk(tmp_path: Path) -> None:
    plan = plan_of(small_source(tmp_path / "source"))
    recorder = Recorder(tmp_path)
    reported: list[int] = []

    def report(event: Event) -> None:
        if event.kind == "shard":
            reported.append(journal_lines(recorder.operations) - len(reported))

    with on_disk(recorder):
        run(plan, tmp_path / INTO, report=report)
    assert len(reported) == len(plan.shards)
    assert min(reported) >= 1


@pytest.mark.parametrize("make", SCENES)
def test_files_are_written_in_the_work_folder_alone(tmp_path: Path, make: Callable[[Path], Scene]) -> None:
    """Also those beside the shards: a final name comes by a rename, from a file that is flushed."""
    operations = make(tmp_path).operations
    opened = {operation.path for operation in operations if operation.kind in ("create", "reopen")}
    assert all(path.startswith(IN_WORK) for path in opened)
    for i, operation in enumerate(operations):
        if operation.kind == "rename" and operation.path in opened:
            done = [other.kind for other in operations[:i] if other.path == operation.path and other.handle >= 0]
            assert done[-1] == "flush", operation


@pytest.mark.parametrize("make", [fresh, many_workers, replaced, made_again])
def test_final_names(tmp_path: Path, make: Callable[[Path], Scene]) -> None:
    """After all shards are done: shards, side files, index, config.json, and the manifest last of all."""
    scene = make(tmp_path)
    operations, names = scene.operations, given_names(scene.operations)
    assert set(names) >= {*(shard.name for shard in scene.plan.shards), *scene.plan.side_files, *scene.plan.json_files}
    shards = [names[shard.name] for shard in scene.plan.shards]
    side = [names[name] for name in scene.plan.side_files]
    other = [names[name] for name in scene.plan.json_files if name != CONFIG]
    assert journal_lines(operations[: min(shards)]) == len(shards)
    assert max(shards) < min(side) < max(side) < min(other)
    assert names[INDEX] in other
    assert max(other) < names[CONFIG] < names[MANIFEST]
    after = [operation for operation in operations[names[MANIFEST] + 1 :] if operation.kind != "flush folder"]
    assert {operation.kind for operation in after} == {"remove", "remove folder"}
    assert all(operation.path.startswith(WORK) for operation in after)


@pytest.mark.parametrize("make", SCENES)
def test_names_are_on_the_disk_before_config_json(tmp_path: Path, make: Callable[[Path], Scene]) -> None:
    """And config.json before the manifest, and that before the journal goes, by which a run would be continued."""
    operations = make(tmp_path).operations
    names = given_names(operations)
    *_, journal_goes = places(operations, of_file("remove", IN_WORK + JOURNAL))
    for name, given in names.items():
        before = {CONFIG: names[MANIFEST], MANIFEST: journal_goes}.get(name, names[CONFIG])
        folder = f"{INTO}/{name}".rpartition("/")[0]
        assert any(given < i < before for i in places(operations, of_file("flush folder", folder))), name


@pytest.mark.parametrize("make", [replaced, made_again])
def test_an_earlier_conversion_goes_config_json_first(tmp_path: Path, make: Callable[[Path], Scene]) -> None:
    """Its manifest is set aside, on the disk, before; and it is all gone, on the disk, before the first new name."""
    operations = make(tmp_path).operations
    flushes = places(operations, of_file("flush folder", INTO))
    (aside,) = places(operations, of_file("rename", f"{INTO}/{MANIFEST}"))
    removed = places(operations, lambda operation: operation.kind == "remove" and IN_WORK not in operation.path)
    assert operations[removed[0]].path == f"{INTO}/{CONFIG}"
    assert any(aside < i < removed[0] for i in flushes)
    assert any(removed[0] < i < removed[1] for i in flushes)
    assert any(removed[-1] < i < min(given_names(operations).values()) for i in flushes)
