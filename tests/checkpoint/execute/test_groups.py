"""Modules that share a tensor scale lie in several shards, and many workers convert them at once."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.casting.window import Exponents, join
from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.checkpoint.execute import group
from halfbyte.checkpoint.execute.group import Group
from halfbyte.checkpoint.execute.journal import JOURNAL
from halfbyte.checkpoint.execute.unit import UnitWork
from halfbyte.checkpoint.plan.types import Unit
from halfbyte.testing import assert_same_bits
from tests.checkpoint.execute.recorder import Recorder
from tests.checkpoint.execute.scenes import on_disk
from tests.checkpoint.toy import all_bytes, llama, read_checkpoint, write_checkpoint

SHARDS = 5
WORKERS = (1, 2, 3, 8, 16)
CHUNKS = (200, 5_000, 1 << 20)
"""Bytes of a piece: less than a row, some rows, more than all partners."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"), llama(layers=3), {"num_hidden_layers": 3}, shards=SHARDS)


def resources(workers: int, chunk: int) -> Resources:
    return Resources(workers=workers, max_memory=1 << 27, sync=False, chunk=chunk)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_bytes_are_those_of_partners_quantized_together(
    tmp_path: Path, source: Path, workers: int, chunk: int
) -> None:
    plan = make_plan(source, Options(method="amax"))
    run(plan, tmp_path / "d", resources(workers, chunk))
    made, tensors = read_checkpoint(tmp_path / "d"), read_checkpoint(source)
    spread = 0
    for partners in plan.groups:
        shared = max(np.abs(tensors[f"{module}.weight"].astype(np.float32)).max() for module in partners)
        spread += len({shard.name for shard in plan.shards for unit in shard.units if unit.module in partners}) > 1
        for module in partners:
            q = hb.quantize(tensors[f"{module}.weight"], "nvfp4", "modelopt", "amax", global_amax=shared)
            assert_same_bits(made[f"{module}.weight"], q.codes)
            assert_same_bits(made[f"{module}.weight_scale"], q.scales)
    assert spread == 6


@pytest.mark.parametrize("chunk", CHUNKS[1:])
def test_any_shards_may_be_done_already(tmp_path: Path, source: Path, chunk: int) -> None:
    """Then their partners are surveyed by others. Every choice of shards, with many workers."""
    plan = make_plan(source, Options(method="amax"))
    whole, work = tmp_path / "whole", tmp_path / "d" / ".halfbyte"
    run(plan, whole, resources(1, chunk))
    recorder = Recorder(tmp_path)
    with on_disk(recorder):
        run(plan, tmp_path / "d", resources(1, chunk))
    shutil.rmtree(tmp_path / "d")
    written = {operation.path: operation.data for operation in recorder.operations if operation.kind == "write"}
    first = written["d/.halfbyte/journal.new"]
    lines = {
        json.loads(operation.data)["name"]: operation.data
        for operation in recorder.operations
        if operation.kind == "write" and operation.path == f"d/.halfbyte/{JOURNAL}"
    }
    names = [shard.name for shard in plan.shards]
    for done in itertools.chain.from_iterable(itertools.combinations(range(SHARDS), count) for count in range(SHARDS)):
        work.mkdir(parents=True)
        for i in done:
            shutil.copy(whole / names[i], work / names[i])
        (work / JOURNAL).write_bytes(first + b"".join(lines[names[i]] for i in done))
        outcome = run(plan, tmp_path / "d", resources(8, chunk))
        assert outcome.shards_found == len(done)
        assert all_bytes(tmp_path / "d") == all_bytes(whole)
        shutil.rmtree(tmp_path / "d")


def test_a_group_begins_with_nothing() -> None:
    found = Group(("a", "b"))
    assert (found.claimed, found.pending, float(found.amax), found.bad) == (False, 0, 0.0, False)
    assert (found.exponents, found.choice, found.scales, found.ready.is_set()) == (None, None, None, False)


def test_what_two_workers_find_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost if one adds while another does."""
    found, others = Group(("a", "b")), list[threading.Thread]()

    def slow_join(parts: list[Exponents | None]) -> Exponents | None:
        joined = join(parts)
        if not others:
            others.append(threading.Thread(target=found.add, args=(np.float32(9), Exponents(-7, 1))))
            others[0].start()
            others[0].join(0.2)
        return joined

    monkeypatch.setattr(group, "join", slow_join)
    found.add(np.float32(3), Exponents(-2, 5))
    others[0].join()
    assert found.amax == 9
    assert found.exponents == Exponents(-7, 5)
    found.add(np.float32(np.nan))
    found.add(np.float32(1))
    assert np.isnan(found.amax)


@pytest.mark.parametrize("chunk", CHUNKS[1:])
def test_each_scale_is_found_once(tmp_path: Path, source: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever came second would begin with the amax that a headroom has raised."""
    plan, settled, settle = make_plan(source, Options(method="optimal")), list[tuple[str, ...]](), UnitWork.settle

    def counted(work: UnitWork, units: Sequence[Unit], group: Group, *others: Any) -> None:
        settled.append(group.modules)
        settle(work, units, group, *others)

    monkeypatch.setattr(UnitWork, "settle", counted)
    run(plan, tmp_path / "d", resources(4, chunk))
    assert sorted(settled) == sorted(plan.groups)


def test_who_surveys_all_partners_holds_the_bytes_of_its_own_shard(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no room planned for those of the others, which it does not write."""
    plan, held, survey = make_plan(source, Options(method="amax")), set[str](), UnitWork.survey

    def noted(work: UnitWork, unit: Unit, piece: Any, group: Group, arena: Any, keep: bool = False) -> Any:
        held.update({unit.module} if keep else ())
        return survey(work, unit, piece, group, arena, keep)

    monkeypatch.setattr(UnitWork, "survey", noted)
    run(plan, tmp_path / "d", resources(1, 1 << 20))
    for partners in plan.groups:
        shares = [{unit.module for unit in shard.units} & set(partners) for shard in plan.shards]
        assert held & set(partners) == next(share for share in shares if share)
    assert len(held) < sum(map(len, plan.groups))
