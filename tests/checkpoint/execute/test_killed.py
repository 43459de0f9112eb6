"""Killed at every operation that changes the disk, and continued: with the same command, and with others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from halfbyte.checkpoint.io.index import CONFIG, MANIFEST
from halfbyte.errors import CheckpointError
from halfbyte.verify import verify
from tests.checkpoint.execute.power_cut import Tree, read_tree
from tests.checkpoint.execute.scenes import INTO, SCENES, Scene, finals, fresh, journal_lines, plan_of, small_source


@pytest.mark.parametrize("make", SCENES)
def test_twice_in_a_row(tmp_path: Path, make: Callable[[Path], Scene]) -> None:
    """Once at every operation, then somewhere in the run that continues. Nothing that counted as done is made again."""
    scene = make(tmp_path)
    for at in range(len(scene.operations)):
        with scene.disk(scene.before) as root:
            done = scene.found + journal_lines(scene.killed(root, at))
            scene.check_names(read_tree(root))
            scene.killed(root, 1 + at * 7 % 31)
            scene.check_names(read_tree(root))
            scene.check_finished(root, done)


def closing(scene: Scene) -> Iterator[Tree]:
    """What is left by a kill at every operation from the first final name on."""
    first = next(i for i, operation in enumerate(scene.operations) if operation.target.startswith(f"{INTO}/model"))
    for at in range(first, len(scene.operations) + 1):
        with scene.disk(scene.before) as root:
            scene.killed(root, at)
            tree = read_tree(root)
        yield tree


@pytest.mark.parametrize("overwrite", [False, True], ids=["more modules kept", "--overwrite with another layout"])
def test_another_command_after_every_kill_of_the_last_steps(tmp_path: Path, overwrite: bool) -> None:
    """And that command is killed too, at one place after another."""
    first = fresh(tmp_path)
    source = first.plan.source
    plan = plan_of(source, layout="compressed-tensors") if overwrite else plan_of(source, ("mlp.down_proj",))
    other = Scene(plan, overwrite=overwrite, others=(first.whole,))
    refused = 0
    for number, tree in enumerate(closing(first)):
        with first.disk(tree) as root:
            if MANIFEST in finals(tree) and not overwrite:
                with pytest.raises(CheckpointError, match="holds a finished conversion with other options"):
                    other.run(root)
                refused += 1
                continue
            other.killed(root, 1 + number * 5 % 37)
            other.check_names(read_tree(root))
            other.killed(root, 1 + number)
            other.check_names(read_tree(root))
            other.check_finished(root, promised=0)
    assert number > 35
    assert refused < 8


def test_what_a_kill_leaves_is_no_checkpoint_for_verify(tmp_path: Path) -> None:
    """Until config.json is there; from then on it is a whole one."""
    scene = fresh(tmp_path)
    results = []
    for tree in closing(scene):
        with scene.disk(tree) as root:
            try:
                results.append((CONFIG in finals(tree), verify(root / INTO).clean))
            except CheckpointError:
                results.append((CONFIG in finals(tree), False))
    assert set(results) == {(False, False), (True, True)}


def test_by_a_signal(tmp_path: Path) -> None:
    """A process that is killed leaves what the recorder leaves: nothing waits in buffers of its own."""
    program = [sys.executable, "-m", "tests.checkpoint.execute.killed", str(small_source(tmp_path / "source"))]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
