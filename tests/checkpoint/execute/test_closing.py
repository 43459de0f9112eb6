"""The last steps: what is removed of an earlier conversion, what is taken back, and in which order files are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfbyte.checkpoint import run
from halfbyte.checkpoint.execute import closing
from halfbyte.checkpoint.execute.closing import close, remove_begun, take_back
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.journal import Finished, Journal
from halfbyte.errors import CheckpointError
from tests.checkpoint.execute.recorder import Operation, Recorder
from tests.checkpoint.execute.scenes import ONE, on_disk, plan_of, small_source
from tests.checkpoint.toy import llama, write_checkpoint

QUICK = Disk(sync=False)


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("a", True), ("b/c", True), ("b/../a", True), ("link", True), ("new/x", True),
        ("../a", False), ("/etc/passwd", False), (".halfbyte/a", False), ("b/../.halfbyte/a", False),
        ("out/x", False), ("inner/x", False), (".halfbyte", False),
    ],
)  # fmt: skip
def test_names_that_may_be_removed(tmp_path: Path, name: str, may: bool) -> None:
    """A link may go; what lies behind one may not, nor anything in the work folder."""
    home = tmp_path / "d"
    (home / "b").mkdir(parents=True)
    (home / ".halfbyte").mkdir()
    (tmp_path / "out").mkdir()
    (home / "out").symlink_to(tmp_path / "out")
    (home / "inner").symlink_to(".halfbyte")
    (home / "link").symlink_to(tmp_path / "out")
    assert closing._may_remove(name, home) is may


def test_files_that_are_removed_take_their_empty_folders_along(tmp_path: Path) -> None:
    for name in ("config.json", "a/b/c", "a/d", "e/f", "g", "h/i/j"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    closing._remove_files(["a/b/c", "gone/x", "g", "h/i/j"], tmp_path, QUICK)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["a", "a/d", "e", "e/f"], "config.json goes whatever is listed"


def test_names_that_anybody_may_have_written() -> None:
    assert closing._names(["a", 3, None, "b"]) == ["a", "b"]
    assert closing._names(None) == closing._names({"a": 1}) == closing._names("ab") == []


def begun(folder: Path) -> tuple[Journal, Path]:
    """A conversion that was stopped when its files had their final names, but for the manifest."""
    plan = plan_of(small_source(folder / "s"))
    into = folder / "d"
    (into / ".halfbyte").mkdir(parents=True)
    journal = Journal.start(into / ".halfbyte" / "journal.jsonl", QUICK, plan)
    for name in journal.first["outputs"]:
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        (into / name).write_text(name)
    (into / "mine").write_text("")
    return journal, into


def test_a_conversion_that_was_begun_goes(tmp_path: Path) -> None:
    """Unless there is a manifest: then what stands there is whole, and goes when the new one is."""
    journal, into = begun(tmp_path)
    (into / "halfbyte.json").write_text("{}")
    before = sorted(path.name for path in into.iterdir())
    remove_begun(journal, into)
    assert sorted(path.name for path in into.iterdir()) == before
    (into / "halfbyte.json").unlink()
    remove_begun(journal, into)
    assert sorted(path.name for path in into.iterdir()) == [".halfbyte", "mine"]


def test_shards_that_another_plan_uses_are_taken_back(tmp_path: Path) -> None:
    journal, into = begun(tmp_path)
    plan = plan_of(tmp_path / "s", keep=("mlp.down_proj",))
    work, name = into / ".halfbyte", plan.shards[0].name
    for other in ("a.part", "side file"):
        (work / other).write_text("")
    (work / "folder").mkdir()
    take_back(plan, into, journal, {name: Finished(name, 5)})
    assert sorted(path.name for path in into.iterdir()) == [".halfbyte", "mine"]
    assert sorted(path.name for path in work.iterdir()) == sorted(["folder", "journal.jsonl", name])
    assert (work / name).read_text() == name
    loaded = Journal.load(journal.path, QUICK)
    assert (loaded.continues(plan), list(loaded.finished)) == (True, [name])


def test_what_stands_beside_a_manifest_is_not_taken_back(tmp_path: Path) -> None:
    journal, into = begun(tmp_path)
    (into / "halfbyte.json").write_text("{}")
    before = sorted(path.name for path in into.iterdir())
    take_back(plan_of(tmp_path / "s", keep=("mlp.down_proj",)), into, journal, {})
    assert sorted(path.name for path in into.iterdir()) == before


def test_files_get_their_names_one_by_one(tmp_path: Path) -> None:
    """Shards, side files, JSON with config.json behind all others, the manifest last; each is counted."""
    plan = plan_of(small_source(tmp_path / "s", shards=2))
    into = tmp_path / "d"
    run(plan, tmp_path / "whole", ONE)
    manifest = json.loads((tmp_path / "whole" / "halfbyte.json").read_text())
    work = into / ".halfbyte"
    work.mkdir(parents=True)
    journal = Journal.start(work / "journal.jsonl", QUICK, plan)
    for shard in plan.shards:
        (tmp_path / "whole" / shard.name).rename(work / shard.name)
        journal.finished[shard.name] = Finished(shard.name, shard.size, manifest["shards"][shard.name]["tensors"])
    seen: list[tuple[int, int, list[str]]] = []

    def report(done: int, total: int) -> None:
        files = [path for path in into.rglob("*") if path.is_file() and work not in path.parents]
        seen.append((done, total, [str(path.relative_to(into)) for path in files]))

    close(plan, into, journal, report)
    total = len(plan.shards) + len(plan.side_files) + len(plan.json_files) + 1
    assert [(done, all_) for done, all_, _ in seen] == [(done, total) for done in range(1, total + 1)]
    new = [set(after) - set(before) for (*_, before), (*_, after) in zip([(0, 0, []), *seen], seen, strict=False)]
    order = [name for names in new for name in names]
    shards, side = [shard.name for shard in plan.shards], list(plan.side_files)
    assert order[: len(shards) + len(side)] == shards + side
    assert order[-2:] == ["config.json", "halfbyte.json"]
    assert json.loads((into / "halfbyte.json").read_text()) == manifest
    assert not work.exists()
    for name in plan.json_files:
        assert (into / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_shard_that_is_gone(tmp_path: Path) -> None:
    plan = plan_of(small_source(tmp_path / "s", shards=2))
    into = tmp_path / "d"
    (into / ".halfbyte").mkdir(parents=True)
    journal = Journal.start(into / ".halfbyte" / "journal.jsonl", QUICK, plan)
    with pytest.raises(CheckpointError) as caught:
        close(plan, into, journal)
    gone = into / plan.shards[0].name
    assert str(caught.value) == f"{gone} was removed; the same command makes it again"


def test_how_json_is_written(tmp_path: Path) -> None:
    """Text as it is, a line at the end; two spaces, but one in the manifest, which is long."""
    source = write_checkpoint(tmp_path / "s", llama(layers=1), {"num_hidden_layers": 1, "author": "Ängström"})
    run(plan_of(source), tmp_path / "d", ONE)
    config = (tmp_path / "d" / "config.json").read_text(encoding="utf-8")
    assert config.startswith('{\n  "model_type": "llama",\n  "num_hidden_layers": 1,\n  "author": "Ängström",\n  "')
    manifest = (tmp_path / "d" / "halfbyte.json").read_text(encoding="utf-8")
    assert manifest.startswith('{\n "halfbyte": 1,\n "fingerprint": "')
    for text in (config, manifest):
        assert text.endswith("\n}\n")


def names_of(operations: list[Operation]) -> list[str]:
    """Each operation in a few words, without those that write to a file."""
    within = ("write", "resize", "flush", "set mode", "create", "reopen")
    short = [f"{one.kind} {one.path.removeprefix('d/')} {one.target.removeprefix('d/')}".strip() for one in operations]
    return [text for text, one in zip(short, operations, strict=True) if one.kind not in within]


NAMED = [f"rename .halfbyte/{name} {name}" for name in ("config.json", "halfbyte.json")]


def test_the_names_of_a_small_conversion(tmp_path: Path) -> None:
    """Every name that is given or taken, in order, and what is flushed between: all that a power cut may show."""
    source = write_checkpoint(tmp_path / "s", llama(layers=1), {"num_hidden_layers": 1})
    plan, disk = plan_of(source, layout="compressed-tensors"), Recorder(tmp_path)
    shard = "model.safetensors"
    with on_disk(disk):
        run(plan, tmp_path / "d", ONE)
    assert names_of(disk.operations) == [
        "make folder d", "flush folder .", "make folder .halfbyte", "flush folder d",
        "rename .halfbyte/journal.new .halfbyte/journal.jsonl", "flush folder .halfbyte",
        f"rename .halfbyte/{shard}.part .halfbyte/{shard}", "flush folder .halfbyte",
        f"rename .halfbyte/{shard} {shard}", "flush folder d", "flush folder .halfbyte",
        "rename .halfbyte/side file tokenizer.json", "flush folder d",
        NAMED[0], "flush folder d", NAMED[1], "flush folder d",
        "remove .halfbyte/journal.jsonl", "remove folder .halfbyte", "flush folder d",
    ]  # fmt: skip
    again, disk = plan_of(source, keep=("down_proj",), layout="compressed-tensors"), Recorder(tmp_path)
    with on_disk(disk):
        run(again, tmp_path / "d", ONE, overwrite=True)
    assert names_of(disk.operations) == [
        "make folder .halfbyte", "flush folder d",
        "rename .halfbyte/journal.new .halfbyte/journal.jsonl", "flush folder .halfbyte",
        f"rename .halfbyte/{shard}.part .halfbyte/{shard}", "flush folder .halfbyte",
        "make folder .halfbyte/replaced", "flush folder .halfbyte",
        "rename halfbyte.json .halfbyte/replaced/halfbyte.json", "flush folder d",
        "remove config.json", "flush folder d",
        f"remove {shard}", "remove tokenizer.json", "flush folder d",
        "remove .halfbyte/replaced/halfbyte.json", "remove folder .halfbyte/replaced", "flush folder .halfbyte",
        f"rename .halfbyte/{shard} {shard}", "flush folder d", "flush folder .halfbyte",
        "rename .halfbyte/side file tokenizer.json", "flush folder d",
        NAMED[0], "flush folder d", NAMED[1], "flush folder d",
        "remove .halfbyte/journal.jsonl", "remove folder .halfbyte", "flush folder d",
    ]  # fmt: skip


def test_the_names_that_are_taken_back(tmp_path: Path) -> None:
    """By a plan that keeps more: config.json goes first, and is gone from the disk before anything else."""
    journal, into = begun(tmp_path)
    plan = plan_of(tmp_path / "s", keep=("mlp.down_proj",))
    first, second, third = (shard.name for shard in plan.shards)
    (into / ".halfbyte" / "old").write_text("")
    disk = Recorder(tmp_path)
    take_back(plan, into, Journal.load(journal.path, disk), {first: Finished(first, 5)})
    assert names_of(disk.operations) == [
        "remove config.json", "flush folder d", f"rename {first} .halfbyte/{first}",
        "remove a/b/notes.json", "remove folder a/b", "remove folder a", "remove hf_quant_config.json",
        f"remove {second}", f"remove {third}", "remove model.safetensors.index.json", "remove tokenizer.json",
        "flush folder d", "rename .halfbyte/journal.new .halfbyte/journal.jsonl", "flush folder .halfbyte",
        "remove .halfbyte/old",
    ]  # fmt: skip


def test_a_work_folder_that_was_left_goes_for_good(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", llama(layers=1), {"num_hidden_layers": 1})
    plan = plan_of(source)
    run(plan, tmp_path / "d", ONE)
    (tmp_path / "d" / ".halfbyte").mkdir()
    disk = Recorder(tmp_path)
    with on_disk(disk):
        run(plan, tmp_path / "d", ONE)
    assert names_of(disk.operations) == ["remove folder .halfbyte", "flush folder d"]
