"""What a worker holds, reads twice and gives back between the pieces of its units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfbyte.checkpoint import Options, Plan, Resources, make_plan, run
from halfbyte.checkpoint.execute import conversion
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.group import Group
from halfbyte.checkpoint.execute.pieces import SLACK, Piece, Sizes, largest_piece, pieces_of
from halfbyte.checkpoint.execute.unit import MANY, UnitWork
from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.plan.types import Unit
from halfbyte.errors import CheckpointError
from tests.checkpoint.execute.test_memory_plan import AT, CASES, Source, bytes_of, mxfp4
from tests.checkpoint.execute.test_pieces import stand_in
from tests.checkpoint.toy import random, write_checkpoint


def named(module: str, rows: int = 10) -> Any:
    made = stand_in(rows=rows)
    made.module, made.source_bytes, made.group = module, 128 * (rows + 3), 0
    return made


def test_units_that_a_worker_can_hold() -> None:
    """All their bytes, the largest piece of all that it surveys, and some slack for each; but not too many pieces."""
    work: Any = UnitWork.__new__(UnitWork)
    mine, other = [named("a"), named("b", 20)], named("c", 50)
    held = 128 * (13 + 23)
    for members, largest in (([], mine[1]), ([*mine, other], other)):
        for chunk in (128 * 3, 128 * 30):
            needed = held + largest_piece(largest, chunk) + 2 * SLACK
            assert work.holds(mine, members, Sizes(chunk, needed))
            assert not work.holds(mine, members, Sizes(chunk, needed - 1))
    roomy = 1 << 30
    assert work.holds(mine, [], Sizes(held // 16, roomy))
    assert not work.holds(mine, [], Sizes(held // 16 - 1, roomy))


class Noted(UnitWork):
    """Notes what is asked of it, and does nothing."""

    def __init__(self) -> None:
        super().__init__(Files({}), Engine(None, None, None, repairs=False))
        self.log: list[tuple[object, ...]] = []

    def _reads_twice(self, members: Sequence[Unit]) -> bool:
        return False

    def survey(self, unit: Unit, piece: Piece, group: Group, arena: Arena, keep: bool = False) -> Any:
        self.log.append(("survey", unit.module, piece.number, keep))
        return f"{unit.module}{piece.number}" if keep else None

    def settle(self, units: Any, group: Group, chunk: int, arena: Arena, held: Any = ()) -> None:
        self.log.append(("settle", [unit.module for unit in units], dict(held)))

    def write(self, unit: Unit, piece: Piece, raw: Any, group: Any, writer: Any, arena: Arena) -> None:
        self.log.append(("write", unit.module, piece.number, raw))

    def forget(self, unit: Unit) -> None:
        self.log.append(("forget", unit.module))


def group_of(log: list[Any]) -> Any:
    return SimpleNamespace(wait=lambda stop: log.append(("wait", stop)))


def test_both_passes_by_one_worker() -> None:
    """What was read last is written first, as it may still be in the cache. Only bytes of its own units are held."""
    mine, other, work = [named("a", 3), named("b", 3)], named("c", 3), Noted()
    writer: Any = SimpleNamespace(stop="stop")
    chunk = 3 * 128
    writes = [
        ("write", "b", 1, "b1"), ("write", "b", 0, "b0"), ("forget", "b"),
        ("write", "a", 1, "a1"), ("write", "a", 0, "a0"), ("forget", "a"),
    ]  # fmt: skip
    pieces = [(module, number, module != "c") for module in "abc" for number in (0, 1)]
    work.whole(mine, [*mine, other], group_of(work.log), writer, chunk, Arena(1 << 20))
    held = {(module, number): f"{module}{number}" for module in "ab" for number in (0, 1)}
    assert work.log == [*(("survey", *piece) for piece in pieces), ("settle", ["a", "b", "c"], held), *writes]
    plain = [(*one[:3], None) if one[0] == "write" else one for one in writes]
    for group, before in ((group_of(work.log), [("wait", "stop")]), (None, [])):
        work.log.clear()
        work.whole(mine, [], group, writer, chunk, Arena(1 << 20))
        assert work.log == [*before, *plain]


def test_bytes_are_held_if_there_is_room_for_them() -> None:
    mine, other = [named("a"), named("b", 20)], named("c", 50)
    chunk = 128 * 30
    needed = 128 * (13 + 23) + 2 * SLACK + largest_piece(other, chunk)
    for size, keeps in ((needed, True), (needed - 1, False)):
        work = Noted()
        work.whole(mine, [*mine, other], group_of(work.log), SimpleNamespace(stop=0), chunk, Arena(size))  # type: ignore[arg-type]
        assert {one[3] for one in work.log if one[0] == "survey" and one[1] != "c"} == {keeps}


@pytest.fixture
def partners(tmp_path: Path) -> tuple[Plan, UnitWork]:
    """Gate and up in two files, and what converts them."""
    tensors = {f"model.layers.0.mlp.{name}_proj.weight": random(0, 32, 64) for name in ("gate", "up")}
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors, shards=2), Options(method="amax"))
    files = Files({file.name: str(plan.source / file.name) for file in plan.files})
    return plan, UnitWork(files, Engine(plan.format, plan.contract, plan.method, plan.repairs))


def test_who_reads_twice(partners: tuple[Plan, UnitWork], monkeypatch: pytest.MonkeyPatch) -> None:
    """Many workers, if one call takes each unit to the shard, nothing chooses a headroom, and all is in the cache."""
    plan, work = partners
    encoders: dict[str, object] = {unit.module: "some" for unit in plan.units}
    cached: dict[str, object] = {file.name: True for file in plan.files}
    monkeypatch.setattr(UnitWork, "encoder", lambda self, unit: encoders[unit.module])
    monkeypatch.setattr(Files, "is_cached_here", lambda self, file: cached[file])
    assert (MANY, work.workers, work._reads_twice(plan.units)) == (8, 1, False)
    work.workers = 7
    assert not work._reads_twice(plan.units)
    work.workers = 8
    assert work._reads_twice(plan.units)
    for known, other in ((encoders, None), (cached, False)):
        for name in list(known):
            before, known[name] = known[name], other
            assert not work._reads_twice(plan.units)
            known[name] = before
    asked: list[int] = []
    monkeypatch.setattr(Engine, "headrooms", lambda self, size: asked.append(size) or (1.0, 2.0))  # type: ignore[func-returns-value]
    assert not work._reads_twice(plan.units)
    assert asked == [2 * 32 * 64]


@pytest.mark.parametrize(
    ("bad", "spoiled", "group", "action", "goes_on"),
    [
        (False, False, True, "quantize", True),
        (True, False, True, "quantize", False),
        (False, True, True, "quantize", False),
        (False, True, False, "quantize", True),  # it may have bad values of its own, which are named
        (False, True, False, "decode", False),
        (False, False, False, "decode", True),
    ],
)
def test_a_shard_that_is_given_up_is_not_written_further(
    bad: bool, spoiled: bool, group: bool, action: str, goes_on: bool
) -> None:
    class Begun(Exception):
        pass

    class First(Noted):
        def _encode(self, *given: Any) -> bool:
            raise Begun

    shared: Any = SimpleNamespace(bad=bad) if group else None
    writer: Any = SimpleNamespace(spoiled=spoiled)
    writer.spoil = lambda: setattr(writer, "spoiled", True)
    made = named("a")
    made.action = action

    def write() -> None:
        UnitWork.write(First(), made, Piece(0, 0, 0, 10), None, shared, writer, Arena(100))

    if goes_on:
        with pytest.raises(Begun):
            write()
    else:
        write()
    assert writer.spoiled == (bad or spoiled)


def test_a_cast_without_a_group_is_no_plan() -> None:
    made = named("a.b")
    made.action = "cast"
    for group in (None, SimpleNamespace(choice=None)):
        with pytest.raises(CheckpointError, match=r"^a\.b was planned without a group$"):
            Noted()._blocks(made, Piece(0, 0, 0, 10), None, group, None, None)  # type: ignore[arg-type]


# --- what a worker gives back ---


def watched(monkeypatch: pytest.MonkeyPatch) -> list[UnitWork]:
    """Those who compute in the next runs. Whatever they take of an arena they must give back, but for held bytes."""
    made: list[UnitWork] = []

    class Watched(UnitWork):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    def check(name: str, arena_at: int, kept: Callable[[Any], int] = lambda found: 0) -> None:
        usual = getattr(UnitWork, name)

        def with_check(self: UnitWork, *given: Any) -> Any:
            arena = given[arena_at]
            before = arena.mark()
            found = usual(self, *given)
            assert arena.mark() - before == kept(found), f"{name} keeps memory"
            return found

        monkeypatch.setattr(Watched, name, with_check, raising=False)

    check("survey", 3, lambda raw: 0 if raw is None else raw.nbytes + -raw.nbytes % 64)
    check("settle", 3)
    check("write", 5)
    monkeypatch.setattr(conversion, "UnitWork", Watched)
    return made


def far_apart(rows: int, columns: int) -> Source:
    """MXFP4 whose exponents no window holds: they are surveyed."""
    tensors, config = mxfp4(rows, columns)
    tensors[f"{AT}.weight_scale"] = 90 + bytes_of(rows, columns // 32) % 40
    return tensors, config


WATCHED = CASES | {"mxfp4 far apart": (far_apart, Options())}


@pytest.mark.parametrize("case", WATCHED)
@pytest.mark.parametrize("chunk", [600, 1 << 20])
def test_nothing_is_kept_between_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, chunk: int) -> None:
    """Neither of an arena, but what is held on purpose, nor the small scales of a source that is done."""
    make, options = WATCHED[case]
    tensors, config = make(32, 128)
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors, {"num_hidden_layers": 1, **config}), options)
    made = watched(monkeypatch)
    run(plan, tmp_path / "d", Resources(workers=1, max_memory=1 << 24, sync=False, chunk=chunk))
    (work,) = made
    assert work._scales == {}


@pytest.mark.parametrize("kind", ["bf16", "int4"])
@pytest.mark.parametrize("chunk", [600, 1 << 20])
def test_nothing_is_kept_of_bad_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, chunk: int) -> None:
    make, options = CASES[kind]
    tensors, config = make(32, 128)
    name = f"{AT}.weight" if kind == "bf16" else f"{AT}.weight_scale"
    tensors[name] = np.full_like(tensors[name], np.inf)
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors, {"num_hidden_layers": 1, **config}), options)
    watched(monkeypatch)
    with pytest.raises(CheckpointError, match=r"holds (NaN and )?Inf"):
        run(plan, tmp_path / "d", Resources(workers=1, max_memory=1 << 24, sync=False, chunk=chunk))


def test_a_limit_that_is_just_enough_is_enough_for_bad_values(tmp_path: Path) -> None:
    """They are decoded once more to be counted."""
    tensors, config = CASES["int4"][0](2, 1 << 16)
    tensors[f"{AT}.weight_scale"][1, 7] = np.inf
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors, {"num_hidden_layers": 1, **config}), CASES["int4"][1])
    piece = largest_piece(plan.units[0], 1) + SLACK
    limit = Resources(workers=1, max_memory=-(-piece * 10 // 9), sync=False, chunk=1)
    with pytest.raises(CheckpointError, match=r"down_proj holds .*Inf .*, the first at row 1, column 224\)"):
        run(plan, tmp_path / "d", limit)


def test_an_amax_of_zero_has_no_headroom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one looked for; an amax of one is an amax like others."""
    looked: list[float] = []
    monkeypatch.setattr(UnitWork, "_look", lambda self, units, first, *rest: looked.append(float(first.amax)) or 2.0)  # type: ignore[func-returns-value]
    for amax, found in ((0.0, []), (1.0, [1.0])):
        looked.clear()
        x = np.full((32, 64), amax, ml_dtypes.bfloat16)
        source = write_checkpoint(tmp_path / f"s{amax}", {f"{AT}.weight": x})
        plan = make_plan(source, Options(method="optimal", contract="compressed_tensors", layout="compressed-tensors"))
        run(plan, tmp_path / f"d{amax}", Resources(workers=1, max_memory=1 << 24, sync=False))
        assert looked == found


def test_pieces_are_numbered_over_all_sources() -> None:
    assert [piece.number for piece in pieces_of(named("a", 3), 128)] == [0, 1, 2, 3, 4, 5]
