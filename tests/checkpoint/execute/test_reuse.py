"""Another plan goes on from an unfinished one: what stays the same is used, and the bytes are those of a fresh run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from halfbyte.checkpoint import Event, Options, Plan, Resources, Rules, make_plan, run
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.errors import CheckpointError
from tests.checkpoint.toy import all_bytes, llama, write_checkpoint

ONE = Resources(workers=1, max_memory=1 << 28, sync=False)
KEEP = Rules(keep=("layers.1.mlp.down_proj",))


class Stop(Exception):
    """Raised by a test's report, as an interruption would be."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", llama(), shards=5)


def plan_of(source: Path, rules: Rules | None = None, layout: str = "modelopt") -> Plan:
    return make_plan(source, Options(method="amax", layout=layout, rules=rules or Rules()))


def stop_at(kind: str, count: int) -> Callable[[Event], None]:
    seen: list[Event] = []

    def report(event: Event) -> None:
        seen.extend([event] if event.kind == kind else [])
        if len(seen) == count:
            raise Stop

    return report


@pytest.mark.parametrize(("kind", "count"), [("shard", 2), ("shard", 5), *(("close", i) for i in range(1, 10))])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "there and back"])
def test_more_modules_are_kept_after_a_stop(tmp_path: Path, source: Path, kind: str, count: int, twice: bool) -> None:
    with pytest.raises(Stop):
        run(plan_of(source), tmp_path / "d", ONE, report=stop_at(kind, count))
    if twice:
        with pytest.raises(Stop):
            run(plan_of(source, KEEP), tmp_path / "d", ONE, report=stop_at("begin", 1))
    plan = plan_of(source) if twice else plan_of(source, KEEP)
    outcome = run(plan, tmp_path / "d", ONE)
    assert outcome.shards_found == 4 or (kind, count) == ("shard", 2)
    assert outcome.shards_found >= 1
    run(plan, tmp_path / "fresh", ONE)
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "fresh")


@pytest.mark.parametrize(("kind", "count"), [("shard", 3), ("close", 2), ("close", 7)])
def test_while_an_earlier_conversion_is_replaced(tmp_path: Path, source: Path, kind: str, count: int) -> None:
    """Its files have the same names, and the first of them the same size."""
    run(plan_of(source, Rules(keep=("v_proj",))), tmp_path / "d", ONE)
    with pytest.raises(Stop):
        run(plan_of(source), tmp_path / "d", ONE, overwrite=True, report=stop_at(kind, count))
    run(plan_of(source, KEEP), tmp_path / "d", ONE)
    run(plan_of(source, KEEP), tmp_path / "fresh", ONE)
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "fresh")


def test_files_of_the_replaced_conversion_are_no_shards_of_the_new(tmp_path: Path, source: Path) -> None:
    run(plan_of(source, Rules(keep=("v_proj",))), tmp_path / "d", ONE)
    with pytest.raises(Stop):
        run(plan_of(source), tmp_path / "d", ONE, overwrite=True, report=stop_at("shard", 5))
    for path in (tmp_path / "d" / ".halfbyte").glob("*.safetensors"):
        path.unlink()
    assert run(plan_of(source), tmp_path / "d", ONE).shards_found == 0


def test_a_conversion_that_was_stopped_after_its_last_step_is_finished(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_tree(disk: Disk, path: Path) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "remove_tree", remove_tree)
        with pytest.raises(Stop):
            run(plan_of(source), tmp_path / "d", ONE)
    whole = {name: data for name, data in all_bytes(tmp_path / "d").items() if not name.startswith(".")}
    with pytest.raises(CheckpointError, match="holds a finished conversion with other options"):
        run(plan_of(source, KEEP), tmp_path / "d", ONE)
    run(plan_of(source), tmp_path / "d", ONE)
    assert all_bytes(tmp_path / "d") == whole
    run(plan_of(source, KEEP), tmp_path / "d", ONE, overwrite=True)
    run(plan_of(source, KEEP), tmp_path / "fresh", ONE)
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "fresh")


def test_a_journal_of_another_version_is_refused(tmp_path: Path, source: Path) -> None:
    with pytest.raises(Stop):
        run(plan_of(source), tmp_path / "d", ONE, report=stop_at("shard", 2))
    journal = tmp_path / "d" / ".halfbyte" / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"version": 1', '"version": 0', 1))
    with pytest.raises(CheckpointError, match="another version of halfbyte wrote it"):
        run(plan_of(source, KEEP), tmp_path / "d", ONE)


def test_what_a_shard_depends_on(source: Path) -> None:
    """Its own bytes, and units in other shards that share a tensor scale with its own."""
    plan = plan_of(source)
    first = next(shard for shard in plan.shards if any("q_proj" in unit.module for unit in shard.units))
    same = plan_of(source)
    assert plan.shard_fingerprint(first) == same.shard_fingerprint(first)
    unit = next(unit for unit in first.units if "q_proj" in unit.module)
    partner = next(
        shard for shard in plan.shards for other in shard.units if other.group == unit.group and other != unit
    )
    assert partner is not first
    moved = tuple(
        replace(other, sources=tuple(replace(source, divides=True) for source in other.sources))
        for other in partner.units
    )
    shards = tuple(replace(shard, units=moved) if shard is partner else shard for shard in plan.shards)
    assert replace(plan, shards=shards).shard_fingerprint(first) != plan.shard_fingerprint(first)
    touched = tuple(replace(file, modified=file.modified + (file.name == partner.name)) for file in plan.files)
    assert replace(plan, files=touched).shard_fingerprint(first) != plan.shard_fingerprint(first)
    assert replace(plan, method="optimal").shard_fingerprint(first) != plan.shard_fingerprint(first)


def test_the_journal_is_that_of_the_plan_that_goes_on(tmp_path: Path, source: Path) -> None:
    """Of the same plan it stays as it is; of another it is written anew before any work."""
    journal = tmp_path / "d" / ".halfbyte" / "journal.jsonl"
    with pytest.raises(Stop):
        run(plan_of(source), tmp_path / "d", ONE, report=stop_at("shard", 2))
    number, lines = journal.stat().st_ino, journal.read_text()
    for rules, again in ((None, True), (KEEP, False)):
        plan = plan_of(source, rules)
        with pytest.raises(Stop):
            run(plan, tmp_path / "d", ONE, report=stop_at("begin", 1))
        assert (journal.stat().st_ino == number) is again
        assert journal.read_text().startswith(lines) is again
        assert json.loads(journal.read_text().splitlines()[0])["fingerprint"] == plan.fingerprint
