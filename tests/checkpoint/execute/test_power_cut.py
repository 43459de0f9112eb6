"""The power goes at any operation: what was finished is there, what was not is made again, and nothing is half."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from halfbyte.errors import CheckpointError
from tests.checkpoint.execute.power_cut import SimulatedDisk, Tree
from tests.checkpoint.execute.recorder import Operation
from tests.checkpoint.execute.scenes import (
    IN_WORK,
    INTO,
    SCENES,
    Scene,
    fresh,
    journal_lines,
    more_kept_after_config,
    replaced,
)

Promised = dict[frozenset[tuple[str, tuple[bytes, int] | None]], int]


def cuts(scene: Scene, dropped: Callable[[Operation], bool] = lambda operation: False) -> Promised:
    """Every tree that a cut may leave → shards that must not be made again if it does.

    dropped: operations that the disk is not told of, as if the code had forgotten them.
    """
    disk = SimulatedDisk(scene.before)
    found = {frozenset(tree.items()): scene.found for tree in disk.outcomes()}
    for count, operation in enumerate(scene.operations, 1):
        if not dropped(operation):
            disk.apply(operation)
        promised = scene.found + journal_lines(scene.operations[:count])
        for tree in disk.outcomes():
            found[frozenset(tree.items())] = promised
    return found


def check(scene: Scene, tree: Tree, promised: int) -> None:
    scene.check_names(tree)
    with scene.disk(tree) as root:
        scene.check_finished(root, promised)


@pytest.mark.parametrize("make", SCENES)
def test_at_every_operation(tmp_path: Path, make: Callable[[Path], Scene]) -> None:
    scene = make(tmp_path)
    trees = cuts(scene)
    assert len(trees) > 80
    for items, promised in trees.items():
        check(scene, dict(items), promised)


@pytest.mark.parametrize("make", SCENES)
def test_all_is_on_the_disk_when_a_run_ends(tmp_path: Path, make: Callable[[Path], Scene]) -> None:
    """Also shows that every operation is recorded."""
    scene = make(tmp_path)
    disk = SimulatedDisk(scene.before)
    for operation in scene.operations:
        disk.apply(operation)
    assert [dict(tree) for tree in disk.outcomes()] == [scene.whole]


def test_twice(tmp_path: Path) -> None:
    """What the next run does is cut as well."""
    scene, chosen = fresh(tmp_path), random.Random(0)
    for items, promised in cuts(scene).items():
        if chosen.random() < 0.2:
            with scene.disk(dict(items)) as root:
                operations = scene.killed(root, chosen.randrange(1, 60))
            disk = SimulatedDisk(dict(items))
            for operation in operations:
                disk.apply(operation)
            for tree in chosen.sample(list(disk.outcomes()), 1):
                check(scene, tree, promised)


FORGOTTEN: dict[str, Callable[[Operation], bool]] = {
    "bytes of shards": lambda operation: operation.kind == "flush" and operation.path.endswith(".part"),
    "names of shards": lambda operation: operation.kind == "flush folder" and operation.path + "/" == IN_WORK,
    "lines of the journal": lambda operation: operation.kind == "flush" and operation.path.endswith("journal.jsonl"),
    "bytes of side files": lambda operation: operation.kind == "flush" and operation.path.endswith("side file"),
    "bytes of the index": lambda operation: operation.kind == "flush" and operation.path.endswith("index.json"),
    "bytes of config.json": lambda operation: operation.kind == "flush" and operation.path.endswith("/config.json"),
    "bytes of the manifest": lambda operation: operation.kind == "flush" and operation.path.endswith("halfbyte.json"),
    "final names": lambda operation: operation.kind == "flush folder" and operation.path == INTO,
    "names in folders": lambda operation: operation.kind == "flush folder" and operation.path == f"{INTO}/a/b",
    "names of folders": lambda operation: operation.kind == "flush folder" and operation.path == f"{INTO}/a",
    "name of the destination": lambda operation: operation.kind == "flush folder" and operation.path == ".",
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_each_flush_is_needed(tmp_path: Path, what: str) -> None:
    """The model notices when it is left out."""
    assert fails_without(fresh(tmp_path), FORGOTTEN[what])


def test_a_new_journal_is_flushed_before_it_replaces_another(tmp_path: Path) -> None:
    scene = more_kept_after_config(tmp_path)
    assert fails_without(scene, lambda operation: operation.kind == "flush" and operation.path.endswith("journal.new"))


def test_removed_names_are_flushed_in_folders_that_stay(tmp_path: Path) -> None:
    """A file of the user is in this one."""
    scene = replaced(tmp_path)
    assert fails_without(scene, lambda operation: operation.kind == "flush folder" and operation.path == f"{INTO}/c")


def fails_without(scene: Scene, forgotten: Callable[[Operation], bool]) -> bool:
    """Whether some cut shows that operations were left out."""
    known = cuts(scene)
    for items, promised in cuts(scene, forgotten).items():
        if known.get(items, -1) < promised:  # those that the disk may hold anyway are fine
            try:
                check(scene, dict(items), promised)
            except (AssertionError, CheckpointError):
                return True
    return False
