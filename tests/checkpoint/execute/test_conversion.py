"""What a run may use by default, how work is cut to fit memory, and what is reported of it."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halfbyte.checkpoint import Event, Outcome, Resources, run
from halfbyte.checkpoint.execute import conversion
from halfbyte.checkpoint.execute.conversion import cards_of, prepare, sizes_for, staged_memory
from halfbyte.checkpoint.execute.device.sizes import Limits
from halfbyte.checkpoint.execute.pieces import SLACK, largest_piece
from halfbyte.errors import CheckpointError, InputError
from tests.checkpoint.execute.scenes import plan_of, small_source


def test_defaults() -> None:
    assert {field.name: getattr(Resources(), field.name) for field in fields(Resources)} == {
        "workers": None, "max_memory": None, "device": "cpu", "device_reason": "", "max_gpu_memory": None,
        "sync": True, "chunk": 32 << 20,
    }  # fmt: skip
    assert Outcome(2, 3) == Outcome(2, 3, False, 0, True, 0)
    assert Event("end", 1, 2).shard == ""


def test_work_is_cut_so_that_it_fits(tmp_path: Path) -> None:
    """A piece takes a quarter of a worker's memory at most, or less where more is made of it; then fewer workers."""
    plan = plan_of(small_source(tmp_path))

    def cut(memory: int, workers: int = 1, chunk: int = 1 << 30) -> tuple[int, int, int]:
        sizes, used = sizes_for(plan, Resources(workers=workers, max_memory=memory, chunk=chunk))
        needed = max(largest_piece(unit, sizes.chunk) for unit in plan.units) + SLACK
        assert needed <= sizes.arena
        return sizes.chunk, sizes.arena, used

    assert cut(1 << 30) == ((1 << 30) * 9 // 10 // 4, (1 << 30) * 9 // 10, 1)
    assert cut(1 << 30, 3) == ((1 << 30) * 9 // 10 // 3 // 4, (1 << 30) * 9 // 10 // 3, 3)
    assert cut(1 << 30, 3, 1000)[0] == 1000
    least = next(memory for memory in range(1 << 17, 1 << 21, 1 << 8) if _fits(plan, memory))
    chunk, arena, used = cut(least)
    assert (arena, used) == (least * 9 // 10, 1)
    assert chunk in (arena // 4, arena // 8, arena // 16)
    assert cut(least, 8)[2] == 1, "one worker where there is room for one"
    assert cut(2 * least + 2, 8)[2] == 2
    with pytest.raises(InputError) as caught:
        cut(least - (1 << 8))
    found = str(caught.value)
    assert found.startswith(f"--max-memory {least - (1 << 8):,} is too little: a piece of the largest tensor needs ")
    needed, enough = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:bytes|are enough)", found))
    assert needed > (least - (1 << 8)) * 9 // 10
    assert least - (1 << 8) < enough < 2 * least
    for tiny in (1, 1000, least // 2):
        with pytest.raises(InputError, match=r"are enough$") as caught:
            cut(tiny)
        told = int(str(caught.value).split("; ")[1].split(" ")[0].replace(",", ""))
        assert least - (1 << 8) < told < 4 * least
        assert cut(told)[2] == 1, "what is said to be enough is"


@pytest.mark.parametrize("limit", [10_000_000, None])
def test_what_is_said_to_be_enough_may_be_just_enough(monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    """One byte is lacking of nine million: two more of the limit make one, and the rest goes to objects."""
    given = limit or conversion.DEFAULT_MEMORY
    monkeypatch.setattr(conversion, "largest_piece", lambda unit, chunk: given * 9 // 10 + 1 - SLACK)
    plan: Any = SimpleNamespace(units=["one"], calibrated=None)
    with pytest.raises(InputError) as caught:
        sizes_for(plan, Resources(workers=3, max_memory=limit))
    enough = given + 2
    assert str(caught.value) == (
        f"--max-memory {given:,} is too little: a piece of the largest tensor needs {given * 9 // 10 + 1:,} bytes; "
        f"{enough:,} are enough"
    )
    sizes, workers = sizes_for(plan, Resources(workers=3, max_memory=enough))
    assert (sizes.arena, workers) == (enough * 9 // 10, 1)


@pytest.mark.parametrize(
    ("device", "workers", "cards", "lanes"),
    [("cpu", 8, 0, 0), ("cuda", 3, 1, 3), ("cuda:2", 3, 1, 3), ("cuda:0,1", 3, 2, 4), ("cuda:1,1", 3, 1, 3)],
)
def test_cards_that_are_asked_for(device: str, workers: int, cards: int, lanes: int) -> None:
    resources = Resources(device=device)
    assert cards_of(resources) == cards
    assert staged_memory(resources, workers) == lanes * (4 << 20)


def _fits(plan: Any, memory: int) -> bool:
    try:
        sizes_for(plan, Resources(workers=1, max_memory=memory))
    except InputError:
        return False
    return True


def test_a_plan_without_units_needs_little(tmp_path: Path) -> None:
    plan = plan_of(small_source(tmp_path))
    bare = replace(plan, shards=tuple(replace(shard, units=()) for shard in plan.shards))
    assert sizes_for(bare, Resources(workers=2, max_memory=1 << 20))[1] == 2


def test_memory_for_the_buffers_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that buffers may take: what plans the lanes leaves a tenth of it, and their pinned bytes."""
    monkeypatch.setattr(conversion, "open_devices", lambda device, plan, engine: ["one"])
    monkeypatch.setattr(
        conversion,
        "plan_devices",
        lambda found, engine, units, workers, limits: SimpleNamespace(sizes="as the lanes need", given=(found, limits)),
    )
    resources = Resources(workers=2, max_memory=1 << 28, device="cuda:0", max_gpu_memory=1 << 30, chunk=5000)
    prepared: Any = prepare(plan_of(small_source(tmp_path)), resources)
    assert prepared.devices.given == (["one"], Limits(1 << 28, 1 << 30, 5000))
    assert prepared.sizes == "as the lanes need"


def test_events_and_outcome(tmp_path: Path) -> None:
    """Bytes of the source from begin to end; each shard once; every file that gets its name. A second run is silent."""
    plan = plan_of(small_source(tmp_path / "s", shards=3))
    events: list[Event] = []
    resources = Resources(workers=1, max_memory=1 << 28, sync=False)
    assert run(plan, tmp_path / "d", resources, report=events.append) == Outcome(3, 0)
    total = sum(copy.output.bytes for shard in plan.shards for copy in shard.copies)
    total += sum(unit.source_bytes for unit in plan.units)
    assert events[0] == Event("begin", 0, total)
    assert events[-1] == Event("end", total, total)
    assert sorted(event.shard for event in events if event.kind == "shard") == [shard.name for shard in plan.shards]
    files = 3 + len(plan.side_files) + len(plan.json_files) + 1
    assert [event for event in events if event.kind == "close"] == [
        Event("close", done, files) for done in range(1, files + 1)
    ]
    progress = [event.done for event in events if event.kind == "progress"]
    assert progress == sorted(progress)
    assert progress[-1] == total
    again: list[Event] = []
    assert run(plan, tmp_path / "d", resources, report=again.append) == Outcome(0, 3, finished_before=True)
    assert again == []


@pytest.mark.parametrize("chunk", [32 << 20, 300, 256, 128, 100])
def test_every_byte_counts_once(tmp_path: Path, chunk: int) -> None:
    """Tensors that are copied together, alone or in pieces."""
    plan = plan_of(small_source(tmp_path / "s", shards=1))
    events: list[Event] = []
    run(plan, tmp_path / "d", Resources(workers=1, max_memory=1 << 28, sync=False, chunk=chunk), report=events.append)
    total = sum(copy.output.bytes for copy in plan.shards[0].copies) + sum(unit.source_bytes for unit in plan.units)
    (done,) = {event.done for event in events if event.kind == "shard"}
    assert (done, events[0].total, events[-1].total) == (total, total, total)


def test_a_source_that_changes_before_the_last_steps(tmp_path: Path) -> None:
    plan = plan_of(small_source(tmp_path / "s"))
    first = plan.files[0]
    changed = replace(plan, files=(replace(first, modified=first.modified + 1), *plan.files[1:]))
    with pytest.raises(CheckpointError) as caught:
        run(changed, tmp_path / "d", Resources(workers=1, max_memory=1 << 28, sync=False))
    assert str(caught.value) == (
        f"{plan.source / first.name} changed while it was converted; begin anew with --overwrite"
    )


@pytest.mark.parametrize(("factor", "part"), [(2, 4), (3.5, 4), (4.5, 8), (7, 8), (9, 16), (15, 16), (16.5, 0)])
def test_what_is_made_of_a_piece_decides_its_part(monkeypatch: pytest.MonkeyPatch, factor: float, part: int) -> None:
    """A quarter, an eighth or a sixteenth of a worker's memory: the first that leaves room for what is made of it."""
    monkeypatch.setattr(conversion, "largest_piece", lambda unit, chunk: int(factor * chunk))
    plan: Any = SimpleNamespace(units=["one"], calibrated=None)
    resources = Resources(workers=1, max_memory=1 << 30, chunk=1 << 40)
    arena = (1 << 30) * 9 // 10
    if not part:
        with pytest.raises(InputError):
            sizes_for(plan, resources)
    else:
        assert sizes_for(plan, resources)[0].chunk == arena // part


def test_what_statistics_need_of_a_piece_decides_its_part_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "largest_piece", lambda unit, chunk: 2 * chunk)
    monkeypatch.setattr(conversion, "widened_bytes", lambda unit, chunk: 3 * chunk)
    monkeypatch.setattr(conversion, "shared_memory", lambda plan, resources: (1 << 30, 0))
    plan: Any = SimpleNamespace(units=["one"], calibrated="statistics")
    sizes, _ = sizes_for(plan, Resources(workers=1, chunk=1 << 40))
    assert sizes.chunk == (1 << 30) * 9 // 10 // 8


def test_a_run_into_the_source_makes_nothing(tmp_path: Path) -> None:
    plan = plan_of(small_source(tmp_path / "s"))
    with pytest.raises(CheckpointError, match=r"d lies inside the source .*; give a directory outside$"):
        run(plan, tmp_path / "s" / "d", Resources(workers=1, max_memory=1 << 28, sync=False))
    assert not (tmp_path / "s" / "d").exists()
