"""Nothing is lost: killed anywhere, out of space, a changed source, another command; and nothing is done twice."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest

from halfbyte.checkpoint import Event, Options, Resources, make_plan, run
from halfbyte.checkpoint.execute.destination import only_one
from halfbyte.checkpoint.execute.disk import Disk, Made, Place
from halfbyte.checkpoint.execute.journal import JOURNAL, Finished
from halfbyte.checkpoint.execute.writer import ShardWriter
from halfbyte.checkpoint.plan.types import Output
from halfbyte.errors import CheckpointError
from tests.checkpoint.toy import all_bytes, llama, write_checkpoint

ONE = Resources(workers=1, max_memory=1 << 28, sync=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", llama(), shards=3)


class Stop(Exception):
    """Raised by a test's report, as an interruption would be."""


def stop_after(count: int, source: Path, destination: Path, options: Options | None = None) -> list[str]:
    """Convert until that many shards are whole, then break off; the shards that were made."""
    made: list[str] = []

    def report(event: Event) -> None:
        if event.kind == "shard":
            made.append(event.shard)
            if len(made) == count:
                raise Stop

    with pytest.raises(Stop):
        run(make_plan(source, options or Options(method="amax")), destination, ONE, report=report)
    return made


def test_whole_shards_are_not_made_again(tmp_path: Path, source: Path) -> None:
    destination = tmp_path / "d"
    made = stop_after(1, source, destination)
    assert {path.name for path in destination.iterdir()} == {".halfbyte"}
    before = {name: (destination / ".halfbyte" / name).stat().st_mtime_ns for name in made}
    outcome = run(make_plan(source, Options(method="amax")), destination, ONE)
    assert outcome.shards_found >= 1
    assert outcome.shards_written + outcome.shards_found == 3
    assert {name: (destination / name).stat().st_mtime_ns for name in made} == before
    run(make_plan(source, Options(method="amax")), tmp_path / "whole", ONE)
    assert all_bytes(destination) == all_bytes(tmp_path / "whole")


def test_a_finished_conversion_is_left_alone(tmp_path: Path, source: Path) -> None:
    plan = make_plan(source, Options(method="amax"))
    run(plan, tmp_path / "d", ONE)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "d").iterdir()}
    assert run(plan, tmp_path / "d", ONE).finished_before
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "d").iterdir()} == before


def test_a_source_that_changed_since(tmp_path: Path, source: Path) -> None:
    stop_after(1, source, tmp_path / "d")
    shard = source / "model-00002-of-00003.safetensors"
    os.utime(shard, ns=(0, 0))
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors changed since this conversion began"):
        run(make_plan(source, Options(method="amax")), tmp_path / "d", ONE)
    run(make_plan(source, Options(method="amax")), tmp_path / "d", ONE, overwrite=True)


@pytest.mark.parametrize("number", [1, 3])
def test_a_source_that_changes_while_it_is_converted(tmp_path: Path, source: Path, number: int) -> None:
    """It is an error as soon as the shard is complete, which then does not count as done."""
    plan, name = make_plan(source, Options(method="amax")), f"model-0000{number}-of-00003.safetensors"
    os.utime(source / name, ns=(0, 0))
    with pytest.raises(CheckpointError, match=f"{name} changed while it was converted"):
        run(plan, tmp_path / "d", ONE)
    assert {path.name for path in (tmp_path / "d").iterdir()} == {".halfbyte"}
    _, *done = (tmp_path / "d" / ".halfbyte" / JOURNAL).read_text().splitlines()
    assert [json.loads(line)["name"] for line in done if name in line] == []
    assert len(done) == number - 1


def test_a_source_that_changes_after_its_shard_is_complete(tmp_path: Path, source: Path) -> None:
    """Partners in other shards may have been made from what it holds now. No file gets its final name."""
    plan, name = make_plan(source, Options(method="amax")), "model-00001-of-00003.safetensors"

    def report(event: Event) -> None:
        if event.kind == "shard" and event.shard == name:
            os.utime(source / name, ns=(0, 0))

    with pytest.raises(CheckpointError, match=f"{name} changed while it was converted"):
        run(plan, tmp_path / "d", ONE, report=report)
    assert {path.name for path in (tmp_path / "d").iterdir()} == {".halfbyte"}


def test_a_source_that_goes_away_while_it_is_converted(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, and not the destination, although it was open and could be read to its end."""
    finish = ShardWriter.finish

    def slow(writer: ShardWriter, fingerprint: str) -> Finished:
        (source / writer.shard.name).rename(tmp_path / writer.shard.name)
        return finish(writer, fingerprint)

    plan = make_plan(source, Options(method="amax"))
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "finish", slow)
        with pytest.raises(CheckpointError) as caught:
            run(plan, tmp_path / "d", ONE)
    gone = list(tmp_path.glob("*.safetensors"))
    assert str(caught.value) in [f"{source / path.name} cannot be read: No such file or directory" for path in gone]
    for path in gone:
        path.rename(source / path.name)
    run(plan, tmp_path / "d", ONE)
    run(plan, tmp_path / "whole", ONE)
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "whole")


@pytest.mark.parametrize("finished", [False, True])
def test_a_side_file_that_went_away_since_the_plan(tmp_path: Path, source: Path, finished: bool) -> None:
    plan = make_plan(source, Options(method="amax"))
    if finished:
        run(plan, tmp_path / "d", ONE)
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        run(plan, tmp_path / "d", ONE)
    assert str(caught.value) == f"{source / 'tokenizer.json'} cannot be read: No such file or directory"


def test_a_source_that_is_cut_while_it_is_converted(tmp_path: Path, source: Path) -> None:
    plan = make_plan(source, Options(method="amax"))
    shard = source / "model-00001-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003.safetensors ended at byte \d+: it was cut"):
        run(plan, tmp_path / "d", ONE)
    assert {path.name for path in (tmp_path / "d").iterdir()} == {".halfbyte"}


def test_other_options_do_not_continue(tmp_path: Path, source: Path) -> None:
    stop_after(1, source, tmp_path / "d")
    with pytest.raises(CheckpointError, match=r"with other options \(method was 'amax', now 'optimal'\)"):
        run(make_plan(source, Options(method="optimal")), tmp_path / "d", ONE)
    run(make_plan(source, Options(method="optimal")), tmp_path / "d", ONE, overwrite=True)
    run(make_plan(source, Options(method="optimal")), tmp_path / "whole", ONE)
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "whole")


def test_a_lost_shard_is_made_again(tmp_path: Path, source: Path) -> None:
    made = stop_after(1, source, tmp_path / "d")
    (tmp_path / "d" / ".halfbyte" / made[0]).unlink()
    run(make_plan(source, Options(method="amax")), tmp_path / "d", ONE)
    run(make_plan(source, Options(method="amax")), tmp_path / "whole", ONE)
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "whole")


def test_a_journal_cut_in_its_first_line_begins_anew(tmp_path: Path, source: Path) -> None:
    stop_after(1, source, tmp_path / "d")
    journal = tmp_path / "d" / ".halfbyte" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:10])
    assert run(make_plan(source, Options(method="amax")), tmp_path / "d", ONE).shards_found == 0


def test_a_finished_conversion_is_replaced_only_when_asked(tmp_path: Path, source: Path) -> None:
    run(make_plan(source, Options(method="amax", activations="unit")), tmp_path / "d", ONE)
    other = make_plan(source, Options(method="amax", layout="compressed-tensors"))
    with pytest.raises(CheckpointError, match="holds a finished conversion with other options"):
        run(other, tmp_path / "d", ONE)
    run(other, tmp_path / "d", ONE, overwrite=True)
    run(other, tmp_path / "fresh", ONE)
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "fresh")  # hf_quant_config.json of the first is gone


def test_folders_of_a_replaced_conversion_go_with_their_files(tmp_path: Path, source: Path) -> None:
    for name in ("a/b/config.json", "2_Dense/config.json"):
        (source / name).parent.mkdir(parents=True)
        (source / name).write_text("{}")
    run(make_plan(source, Options(method="amax")), tmp_path / "d", ONE)
    (tmp_path / "d" / "2_Dense" / "mine.txt").write_text("x")
    shutil.rmtree(source / "a")
    shutil.rmtree(source / "2_Dense")
    run(make_plan(source, Options(method="amax")), tmp_path / "d", ONE, overwrite=True)
    assert {path.name for path in (tmp_path / "d").iterdir() if path.is_dir()} == {"2_Dense"}
    assert [path.name for path in (tmp_path / "d" / "2_Dense").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("count", [1, 3, 6])
def test_killed_while_an_earlier_conversion_is_taken_away(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    first, second = Options(method="amax", activations="unit"), Options(method="amax", layout="compressed-tensors")
    run(make_plan(source, first), tmp_path / "d", ONE)
    run(make_plan(source, second), tmp_path / "fresh", ONE)
    removed: list[Path] = []

    def remove(disk: Disk, path: Path) -> None:
        if len(removed) == count:
            raise Stop
        removed.append(path)
        os.unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "remove", remove)
        with pytest.raises(Stop):
            run(make_plan(source, second), tmp_path / "d", ONE, overwrite=True)
    assert len(removed) == count
    assert not (tmp_path / "d" / "config.json").exists()
    run(make_plan(source, second), tmp_path / "d", ONE)
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "fresh")


@pytest.mark.parametrize("count", [1, 4, 6])
def test_killed_while_files_get_their_names_and_begun_anew(tmp_path: Path, source: Path, count: int) -> None:
    """Other options and --overwrite take away what already has a final name."""

    def report(event: Event) -> None:
        if event.kind == "close" and event.done == count:
            raise Stop

    with pytest.raises(Stop):
        run(make_plan(source, Options(method="amax", activations="unit")), tmp_path / "d", ONE, report=report)
    other = make_plan(source, Options(method="amax", layout="compressed-tensors"))
    with pytest.raises(CheckpointError, match="holds an unfinished conversion with other options"):
        run(other, tmp_path / "d", ONE)
    run(other, tmp_path / "d", ONE, overwrite=True)
    run(other, tmp_path / "fresh", ONE)
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "fresh")


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "tokenizer.json"])
def test_a_source_that_changed_since_it_was_converted(tmp_path: Path, source: Path, name: str) -> None:
    """Other weights of the same shapes: the headers are the same."""
    run(make_plan(source, Options(method="amax")), tmp_path / "d", ONE)
    (source / name).write_bytes((source / name).read_bytes()[:-2] + b"}}")
    with pytest.raises(CheckpointError, match=f"{name} changed since it was converted"):
        run(make_plan(source, Options(method="amax")), tmp_path / "d", ONE)
    run(make_plan(source, Options(method="amax")), tmp_path / "d", ONE, overwrite=True)
    run(make_plan(source, Options(method="amax")), tmp_path / "fresh", ONE)
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "fresh")


def test_other_values_in_the_same_calibration_file(tmp_path: Path, source: Path) -> None:
    modules = [name.removesuffix(".weight") for name in llama() if name.endswith("_proj.weight")]
    file = tmp_path / "amax.json"
    options = Options(method="amax", activations=str(file))
    file.write_text(json.dumps(dict.fromkeys(modules, 1.0)))
    run(make_plan(source, options), tmp_path / "d", ONE)
    file.write_text(json.dumps(dict.fromkeys(modules, 2.0)))
    with pytest.raises(CheckpointError, match="holds a finished conversion with other options"):
        run(make_plan(source, options), tmp_path / "d", ONE)


@pytest.mark.parametrize("amax", [1e-45, 1e300])
def test_a_calibrated_amax_without_a_scale(tmp_path: Path, source: Path, amax: float) -> None:
    modules = [name.removesuffix(".weight") for name in llama() if name.endswith("_proj.weight")]
    (tmp_path / "amax.json").write_text(json.dumps(dict.fromkeys(modules, amax)))
    with pytest.raises(CheckpointError, match="whose scale is no normal float32"):
        make_plan(source, Options(activations=str(tmp_path / "amax.json")))


def test_a_finished_conversion_that_lost_a_file(tmp_path: Path, source: Path) -> None:
    plan = make_plan(source, Options(method="amax"))
    run(plan, tmp_path / "d", ONE)
    expected = all_bytes(tmp_path / "d")
    (tmp_path / "d" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="this very conversion, but a file of it is gone or was cut"):
        run(plan, tmp_path / "d", ONE)
    run(plan, tmp_path / "d", ONE, overwrite=True)
    assert all_bytes(tmp_path / "d") == expected


def test_a_large_side_file_is_copied_in_pieces(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(256)) * 1000
    (source / "notes.txt").write_bytes(content)
    (source / "notes.txt").chmod(0o640)
    plan = make_plan(source, Options(method="amax"))
    whole = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        assert path.name != "notes.txt"
        return whole(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read_bytes)
        run(plan, tmp_path / "d", ONE)
    assert (tmp_path / "d" / "notes.txt").read_bytes() == content
    assert (tmp_path / "d" / "notes.txt").stat().st_mode & 0o777 == 0o640


def test_a_destination_that_holds_something_else(tmp_path: Path, source: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match=r"holds something else \(thesis.tex\), which halfbyte did not write"):
            run(make_plan(source, Options()), tmp_path / "d", ONE, overwrite=overwrite)
    assert (tmp_path / "d" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("source", "is the source itself"),
        ("source/inside", "lies inside the source"),
        ("source/../source", "is the source itself"),
        (".", "holds the source"),
    ],
)
def test_a_destination_at_the_source(tmp_path: Path, source: Path, where: str, message: str) -> None:
    before = all_bytes(source)
    with pytest.raises(CheckpointError, match=message):
        run(make_plan(source, Options()), tmp_path / where, ONE)
    assert all_bytes(source) == before


def test_a_destination_that_is_a_link_to_the_source(tmp_path: Path, source: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(CheckpointError, match="is the source itself"):
        run(make_plan(source, Options()), tmp_path / "link", ONE)


def test_a_destination_that_is_a_file(tmp_path: Path, source: Path) -> None:
    (tmp_path / "d").write_text("x")
    with pytest.raises(CheckpointError, match="is a file; give a directory"):
        run(make_plan(source, Options()), tmp_path / "d", ONE)


def test_no_space_is_seen_before_work(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"has 1,000 bytes free, but the output needs [\d,]+ more"):
        run(make_plan(source, Options()), tmp_path / "d", ONE)
    assert list((tmp_path / "d").iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fills_up(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    real, calls = Disk.write_places, [0]

    def write_places(self: Disk, file: int, places: Sequence[Place], write: Callable[[int], Made]) -> Made:
        calls[0] += 1
        if calls[0] > 20:
            raise OSError(code, os.strerror(code))
        return real(self, file, places, write)

    monkeypatch.setattr(Disk, "write_places", write_places)
    message = "cannot be written" if code == errno.EIO else "no space left for .*make room and run the same command"
    with pytest.raises(CheckpointError, match=message):
        run(make_plan(source, Options(method="amax")), tmp_path / "d", ONE)
    assert {path.name for path in (tmp_path / "d").iterdir()} == {".halfbyte"}
    monkeypatch.undo()
    run(make_plan(source, Options(method="amax")), tmp_path / "d", ONE)
    run(make_plan(source, Options(method="amax")), tmp_path / "whole", ONE)
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "whole")


def test_two_at_once_are_refused(tmp_path: Path, source: Path) -> None:
    with (
        only_one(tmp_path / "d", Disk()),
        pytest.raises(CheckpointError, match=r"another conversion into .* is running"),
    ):
        run(make_plan(source, Options()), tmp_path / "d", ONE)


def test_a_destination_that_cannot_be_made(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written: Not a directory"):
        run(make_plan(source, Options()), tmp_path / "file" / "d", ONE)


def test_a_source_that_goes_away(tmp_path: Path, source: Path) -> None:
    plan = make_plan(source, Options())
    (source / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors cannot be read after byte \d+"):
        run(plan, tmp_path / "d", ONE)


def test_a_tensor_that_is_not_written_whole_is_noticed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all = ShardWriter.put_all

    def forgetful(self: ShardWriter, parts: Sequence[tuple[Output, npt.NDArray[Any], int]]) -> None:
        put_all(self, [part for part in parts if "o_proj.weight_scale_2" not in part[0].part.name])

    monkeypatch.setattr(ShardWriter, "put_all", forgetful)
    with pytest.raises(CheckpointError, match=r"o_proj.weight_scale_2 was planned with 4 bytes, and 0 written"):
        run(make_plan(source, Options()), tmp_path / "d", ONE)
    assert {path.name for path in (tmp_path / "d").iterdir()} == {".halfbyte"}
