"""The power goes at any operation: what was finished is there, what was not is made again, and nothing is half."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.execute.power_cut import SimulatedDisk, read_tree
from tests.checkpoint.execute.recorder import Operation
from tests.checkpoint.execute.scenes import INTO, MANY, Scene, change_weights, plan_of, small_source

KEEP = ("mlp.down_proj",)


def outcomes(scene: Scene) -> dict[frozenset[tuple[str, tuple[bytes, int] | None]], int]:
    """Every tree that a cut may leave → the last cut that may leave it, in operations carried out."""
    disk = SimulatedDisk(scene.before)
    found: dict[frozenset[tuple[str, tuple[bytes, int] | None]], int] = {}
    for cut, operation in enumerate([None, *scene.operations]):
        if operation is not None:
            disk.apply(operation)
        for tree in disk.outcomes():
            found[frozenset(tree.items())] = cut
    return found


def check(scene: Scene) -> int:
    """At every cut; the number of trees that were tried."""
    trees = outcomes(scene)
    for items, cut in trees.items():
        tree = dict(items)
        try:
            scene.check_names(tree)
            scene.check_rerun(tree, scene.promised(cut))
        except Exception as error:
            last = scene.operations[cut - 1]
            raise AssertionError(f"cut after operation {cut}, {last.kind} {last.path}: {error}") from error
    return len(trees)


def fresh(folder: Path) -> Scene:
    return Scene(plan_of(small_source(folder / "source")), folder)


def many_workers(folder: Path) -> Scene:
    return Scene(plan_of(small_source(folder / "source")), folder, resources=MANY)


def one_shard(folder: Path) -> Scene:
    """Without an index and hf_quant_config.json, config.json comes right after the shard."""
    source = small_source(folder / "source", shards=1)
    (source / "tokenizer.json").unlink()
    (source / "a" / "b" / "notes.json").unlink()
    return Scene(plan_of(source, layout="compressed-tensors"), folder)


def replaced(folder: Path) -> Scene:
    """An earlier conversion with other options: some of its files have names that the new one does not use."""
    source = small_source(folder / "source")
    earlier = Scene(plan_of(source, activations="unit"), folder).whole
    return Scene(plan_of(source, layout="compressed-tensors"), folder, earlier, overwrite=True, others=(earlier,))


def made_again(folder: Path) -> Scene:
    """The same conversion of a source whose weights changed: every file has the name and the size of an earlier one."""
    source = small_source(folder / "source")
    earlier = Scene(plan_of(source), folder).whole
    change_weights(source)
    return Scene(plan_of(source), folder, earlier, overwrite=True, others=(earlier,))


def other_options(folder: Path, stopped_at: Callable[[Operation], bool]) -> Scene:
    """More modules are kept than in a run that was killed after that operation."""
    source = small_source(folder / "source")
    first = Scene(plan_of(source), folder)
    at = next(i for i, operation in enumerate(first.operations) if stopped_at(operation))
    with first.disk() as root:
        assert first.kill(root, at + 1)
        left = read_tree(root)
    return Scene(plan_of(source, KEEP), folder, left, others=(first.whole,))


def kept_after_two_shards(folder: Path) -> Scene:
    return other_options(folder, lambda operation: "00002" in operation.path and operation.kind == "rename")


def kept_after_names_were_given(folder: Path) -> Scene:
    return other_options(folder, lambda operation: operation.target == f"{INTO}/model.safetensors.index.json")


def kept_after_config(folder: Path) -> Scene:
    return other_options(folder, lambda operation: operation.target == f"{INTO}/config.json")


@pytest.mark.parametrize(
    "scene",
    [
        fresh,
        many_workers,
        one_shard,
        replaced,
        made_again,
        kept_after_two_shards,
        kept_after_names_were_given,
        kept_after_config,
    ],
)
def test_at_every_operation(tmp_path: Path, scene: Callable[[Path], Scene]) -> None:
    assert check(scene(tmp_path)) > 80
