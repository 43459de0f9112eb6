"""Modules with statistics solved on GPUs: plain functions here stand for them. The bytes are those of the CPU."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfbyte.checkpoint import Event, Options, Plan, Resources, make_plan, run
from halfbyte.checkpoint.execute import conversion, target_device
from halfbyte.checkpoint.execute.device.cards import CardSolver, budget_of, card_need
from halfbyte.checkpoint.execute.device.protocol import STAGED, DeviceMemoryError
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.factors import Need
from halfbyte.checkpoint.execute.solving import Source, formats_of
from halfbyte.codec.bits import F32, U8
from halfbyte.contracts import get_contract
from halfbyte.errors import CheckpointError, InputError, UnsupportedError
from halfbyte.feedback import Factor, factor_memory_on_device, prepare, request_for, solve_weight
from halfbyte.formats import get_format
from halfbyte.methods import Gptq, Method
from halfbyte.quantize import quantize
from halfbyte.statistics import LinearStatistics
from tests.checkpoint.test_calibrated import linear, statistics
from tests.checkpoint.toy import all_bytes, llama, write_checkpoint


class FakeCard:
    """Does on the CPU what a GPU does, in the thread that it was begun in, and runs out of memory when told to."""

    def __init__(self, name: str, engine: Engine, memory: int = 1 << 34) -> None:
        self.name, self.memory = name, memory
        self.format, self.contract = formats_of(engine)
        self.limit: int | None = None
        self.thread: threading.Thread | None = None
        self.ended = False
        self.factors = self.releases = 0
        self.rows: list[int] = []
        self.full_factors = 0
        """So many calls of `factor` run out of memory."""
        self.most_rows = 1 << 30
        """More rows than this run out of memory."""

    def free(self) -> int:
        return self.memory

    def begin(self, limit: int | None) -> None:
        self.limit, self.thread = limit, threading.current_thread()

    def factor(self, known: LinearStatistics, block: int, method: Gptq, name: str) -> Factor:
        assert threading.current_thread() is self.thread
        if self.full_factors:
            self.full_factors -= 1
            raise DeviceMemoryError(name)
        self.factors += 1
        return prepare(known.second_moment, block, method, cross_moment=known.cross_moment, name=name)

    def solve(self, values: F32, factor: Factor, amax: np.float32 | None, name: str) -> tuple[U8, U8]:
        self._take(values)
        request = request_for(self.format, self.contract, 1)
        q = solve_weight(values, factor, request, global_amax=amax, backend="auto", name=name)
        return np.asarray(q.codes), np.asarray(q.scales)

    def quantize(self, values: F32, method: Method, amax: np.float32 | None) -> tuple[U8, U8]:
        self._take(values)
        q = quantize(values, self.format, self.contract, method, global_amax=amax, threads=1)
        return np.asarray(q.codes), np.asarray(q.scales)

    def _take(self, values: F32) -> None:
        assert threading.current_thread() is self.thread
        if len(values) > self.most_rows:
            raise DeviceMemoryError(f"{len(values)} rows")
        self.rows.append(len(values))

    def release(self) -> None:
        self.releases += 1

    def end(self) -> None:
        self.ended = True


Cards = list[FakeCard]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cards]:
    """The GPUs of the next run; filled by it, one for each number of the device. Change them in `tell`."""
    made: Cards = []

    def open_cards(device: str, plan: Plan, engine: Engine) -> Cards:
        made[:] = [FakeCard(f"cuda:{number}", engine) for number in target_device.numbers_of(device)]
        for card in made:
            TELL[0](card)
        return list(made)

    monkeypatch.setattr(conversion, "open_cards", open_cards)
    monkeypatch.setattr(target_device, "kind_of", lambda device: "cpu" if device == "cpu" else "GPU")
    TELL[0] = lambda card: None
    yield made
    assert all(card.ended for card in made)


TELL: list[Callable[[FakeCard], Any]] = [lambda card: None]
WAYS = (
    Resources(2, device="cuda:0", sync=False),
    Resources(3, device="cuda:0,1", sync=False, chunk=3000),
    Resources(1, device="cuda:0,1,2", sync=False, max_memory=4_000_000 + 3 * STAGED),
)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return planned(tmp_path)


def planned(tmp_path: Path, method: str | Gptq = "gptq", cross: bool = False) -> Plan:
    tensors = llama()
    statistics(tmp_path / "stats", tensors, cross=cross)
    source = write_checkpoint(tmp_path / "s", tensors, shards=3)
    return make_plan(source, Options(method=method, statistics=tmp_path / "stats"))


def tensors_of(folder: Path) -> dict[str, bytes]:
    """Everything but the manifest, which names the device."""
    return {name: data for name, data in all_bytes(folder).items() if name != "halfbyte.json"}


@pytest.mark.parametrize("method", ["gptq", "hessian"])
def test_the_bytes_are_those_of_the_cpu(tmp_path: Path, cards: Cards, method: str) -> None:
    plan = planned(tmp_path, method, cross=method == "gptq")
    run(plan, tmp_path / "cpu", Resources(2, sync=False))
    for number, resources in enumerate(WAYS):
        run(plan, tmp_path / f"{number}", resources)
        assert tensors_of(tmp_path / f"{number}") == tensors_of(tmp_path / "cpu")
        assert sum(sum(card.rows) for card in cards) == sum(
            source.rows for unit in plan.units if unit.action == "quantize" for source in unit.sources
        )
        assert all(card.rows for card in cards)
        assert (sum(card.factors for card in cards) >= 8) == (method == "gptq")


def test_the_manifest_names_what_made_the_factors(tmp_path: Path, cards: Cards, plan: Plan) -> None:
    def device(folder: str) -> object:
        return json.loads((tmp_path / folder / "halfbyte.json").read_text()).get("device")

    run(plan, tmp_path / "gpu", WAYS[0])
    run(plan, tmp_path / "cpu", Resources(1, sync=False))
    assert (device("gpu"), device("cpu")) == ("GPU", "cpu")
    assert run(plan, tmp_path / "gpu", WAYS[1]).finished_before
    with pytest.raises(CheckpointError, match="holds a finished conversion with other options"):
        run(plan, tmp_path / "gpu", Resources(1, sync=False))
    hessian = make_plan(plan.source, Options(method="hessian", statistics=tmp_path / "stats"))
    run(hessian, tmp_path / "hessian", WAYS[0])
    assert device("hessian") is None  # the same bytes everywhere
    assert run(hessian, tmp_path / "hessian", Resources(1, sync=False)).finished_before
    assert not any(card.rows for card in cards)


def test_a_run_goes_on_but_not_on_another_kind_of_device(tmp_path: Path, cards: Cards, plan: Plan) -> None:
    run(plan, tmp_path / "whole", WAYS[0])

    class StopError(Exception):
        pass

    def stop(event: Event) -> None:
        if event.kind == "shard":
            raise StopError

    with pytest.raises(StopError):
        run(plan, tmp_path / "d", WAYS[0], report=stop)
    with pytest.raises(CheckpointError, match="device was 'GPU', now 'cpu'"):
        run(plan, tmp_path / "d", Resources(1, sync=False))
    outcome = run(plan, tmp_path / "d", WAYS[1])
    assert outcome.shards_found > 0
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "whole")
    assert cards


def test_rows_are_cut_until_they_fit(tmp_path: Path, cards: Cards, plan: Plan) -> None:
    run(plan, tmp_path / "cpu", Resources(1, sync=False))
    TELL[0] = lambda card: setattr(card, "most_rows", 7)
    run(plan, tmp_path / "d", WAYS[0])
    assert tensors_of(tmp_path / "d") == tensors_of(tmp_path / "cpu")
    assert 0 < min(cards[0].rows) <= max(cards[0].rows) <= 7
    assert cards[0].releases
    TELL[0] = lambda card: setattr(card, "most_rows", 0)
    with pytest.raises(
        CheckpointError, match="device cuda:0 has no memory left for the factor of 64 inputs; free some"
    ):
        run(plan, tmp_path / "e", WAYS[0])


def test_a_factor_is_tried_again_with_free_memory(tmp_path: Path, cards: Cards, plan: Plan) -> None:
    TELL[0] = lambda card: setattr(card, "full_factors", 1)
    run(plan, tmp_path / "d", WAYS[0])
    assert cards[0].factors >= 8
    assert cards[0].releases == 1
    TELL[0] = lambda card: setattr(card, "full_factors", 2)
    with pytest.raises(CheckpointError, match="device cuda:0 has no memory left for the factor"):
        run(plan, tmp_path / "e", WAYS[0])


def test_a_limit_is_kept_or_refused(tmp_path: Path, cards: Cards, plan: Plan) -> None:
    assert plan.calibrated is not None
    width = max(source.columns for unit in plan.units for source in unit.sources)
    making = card_need(plan.calibrated, width).making
    with pytest.raises(InputError, match=rf"--max-gpu-memory {making:,} is too little: the factor of {width} inputs"):
        run(plan, tmp_path / "d", Resources(1, device="cuda:0", max_gpu_memory=making))
    cards[0].end()
    TELL[0] = lambda card: setattr(card, "memory", making)
    with pytest.raises(UnsupportedError, match=f"device cuda:0 has {making:,} bytes free, and the factor"):
        run(plan, tmp_path / "d", Resources(1, device="cuda:0"))
    TELL[0] = lambda card: None
    cards[0].memory = 1 << 34
    budgets = [budget_of(cards[0], plan.calibrated, set(), given) for given in (1, 1 << 40, None)]
    assert budgets == [1, (1 << 34) * 9 // 10, 1 << 33]
    engine = Engine(plan.format, plan.contract, plan.method, plan.repairs)
    limit = making + (1 << 22)
    solver = CardSolver(plan, engine, cards, limit)
    assert [kept.memory for kept in solver.kept] == [limit]
    solver.close()
    run(plan, tmp_path / "d", Resources(2, device="cuda:0", max_gpu_memory=limit, sync=False))
    assert cards[0].limit == limit


def test_gpus_of_several_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(target_device, "resolve_device", lambda device: device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number // 2}")
    assert target_device.kind_of("cuda:2,3") == "GPU 1"
    with pytest.raises(UnsupportedError, match="GPU 0 and GPU 1 may differ in the last bits of factors"):
        target_device.kind_of("cuda:1,2")


def test_what_gpus_do_not_solve(tmp_path: Path) -> None:
    def reason(options: Options) -> str | None:
        return target_device.kernel_reason(make_plan(tmp_path / "s", options))

    planned(tmp_path)
    stats = tmp_path / "stats"
    assert reason(Options(method="gptq", statistics=stats)) is None
    assert reason(Options(method="hessian", statistics=stats)) is None
    assert reason(Options(to="mxfp4", layout="compressed-tensors", method="gptq", statistics=stats)) is None
    assert "no descent" in str(reason(Options(method=Gptq(descent=1), statistics=stats)))
    known, mxfp4 = make_plan(tmp_path / "s", Options(method="gptq", statistics=stats)).calibrated, get_format("mxfp4")
    assert known is not None
    found = target_device.solving_reason(known, mxfp4, get_contract("gguf", mxfp4))
    assert "contracts without a search of their own" in str(found)


# --- one solver, by hand ---

WIDTH = 64
ROOM = 256 * 32 * WIDTH
"""Bytes for the rows that are solved at once at least."""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    """By both methods, and likewise without units, so that the inputs of none are the largest."""
    folder = tmp_path_factory.mktemp("plans")
    made = {"gptq": planned(folder)}
    made["hessian"] = make_plan(folder / "s", Options(method="hessian", statistics=folder / "stats"))
    bare = {
        f"{name} alone": replace(plan, shards=tuple(replace(shard, units=()) for shard in plan.shards))
        for name, plan in made.items()
    }
    return made | bare


def solver_of(plan: Plan, *cards: FakeCard, limit: int | None = None) -> CardSolver:
    return CardSolver(plan, engine_of(plan), cards, limit)


def engine_of(plan: Plan) -> Engine:
    return Engine(plan.format, plan.contract, plan.method, plan.repairs)


def one_of(key: str, width: int = WIDTH) -> Source:
    return Source(key, width, lambda: linear(0, width), f"module {key}")


def test_bytes_that_just_fit(plans: dict[str, Plan]) -> None:
    plan = plans["gptq"]
    assert plan.calibrated is not None
    card = FakeCard("cuda:5", engine_of(plan))
    need = card_need(plan.calibrated, WIDTH).making + ROOM
    for free, limit, budget in (
        (need, None, need), (2 * need + 1, None, need), (2 * need + 2, None, need + 1), (10 * need, need, need),
        (10 * need, 20 * need, 9 * need), (need, need, need * 9 // 10),
    ):  # fmt: skip
        card.memory = free
        assert budget_of(card, plan.calibrated, {16, WIDTH}, limit) == budget
    with pytest.raises(InputError) as refused:
        budget_of(card, plan.calibrated, {WIDTH}, need - 1)
    assert str(refused.value) == (
        f"--max-gpu-memory {need - 1:,} is too little: the factor of 64 inputs needs {need:,} while it is made; or use "
        "--device cpu"
    )
    card.memory = need - 1
    with pytest.raises(UnsupportedError) as full:
        budget_of(card, plan.calibrated, {WIDTH}, None)
    assert str(full.value) == (
        f"device cuda:5 has {need - 1:,} bytes free, and the factor of 64 inputs needs {need:,} while it is made; free "
        "some, choose another device, or use --device cpu"
    )


def test_what_one_input_takes_of_a_gpu(plans: dict[str, Plan]) -> None:
    plan = plans["gptq"]
    assert plan.calibrated is not None
    assert card_need(replace(plan.calibrated, kind="hessian"), 96) == Need(98_304, 98_304)
    for crossed in (False, True):
        making, held = factor_memory_on_device(96, crossed)
        assert card_need(replace(plan.calibrated, crossed=crossed), 96) == Need(making, held)


def test_an_input_goes_to_the_card_with_the_least_to_do_and_stays_there(plans: dict[str, Plan]) -> None:
    """What a piece takes: as many steps as it has numbers, for each input."""
    plan = plans["hessian"]
    cards = [FakeCard(f"cuda:{number}", engine_of(plan)) for number in range(2)]
    solver = solver_of(plan, *cards)
    for key, rows, width, card in (
        ("a", 1, 96, 0),  # 9,216
        ("b", 6, 32, 1),  # 6,144
        ("c", 2, 32, 1),  # 8,192 in all
        ("d", 1, 32, 1),  # 9,216
        ("e", 9, 32, 0),  # as much to do on both: the first
        ("b", 8, 32, 1),
        ("a", 7, 96, 0),
    ):
        solver.hessian(np.ones((rows, width), np.float32), one_of(key, width), np.float32(6))
        assert cards[card].rows.pop() == rows, key
        assert not any(one.rows for one in cards)
    solver.close()
    assert [(one.ended, kept.used) for one, kept in zip(cards, solver.kept, strict=True)] == [(True, 0)] * 2


@pytest.mark.parametrize("method", ["gptq", "hessian"])
@pytest.mark.parametrize(
    ("more", "rows", "cut"),
    [(0, 300, [256, 44]), (44, 700, [300, 300, 100]), (44, 600, [300, 300]), (1000, 700, [700])],
)
def test_rows_that_fit_beside_what_they_are_solved_with(
    plans: dict[str, Plan], method: str, more: int, rows: int, cut: list[int]
) -> None:
    plan = plans[f"{method} alone"]
    assert plan.calibrated is not None
    card = FakeCard("cuda:0", engine_of(plan))
    solver = solver_of(plan, card, limit=card_need(plan.calibrated, WIDTH).held + ROOM + more * 32 * WIDTH)
    values = np.arange(rows * WIDTH, dtype=np.float32).reshape(rows, WIDTH)
    codes, scales = getattr(solver, method)(values, one_of("a"), np.float32(rows * WIDTH))
    assert card.rows == cut
    assert (codes.shape, scales.shape) == ((rows, WIDTH // 2), (rows, WIDTH // 16))
    solver.close()


@pytest.mark.parametrize(("most", "cut", "releases"), [(7, [5] * 4, 6), (19, [19, 1], 4), (1, [1] * 20, 9), (0, [], 9)])
def test_rows_are_halved_until_they_fit(plans: dict[str, Plan], most: int, cut: list[int], releases: int) -> None:
    """From 300 on; what torch holds back is given up before each try."""
    plan = plans["hessian alone"]
    assert plan.calibrated is not None
    card = FakeCard("cuda:0", engine_of(plan))
    card.most_rows = most
    solver = solver_of(plan, card, limit=card_need(plan.calibrated, WIDTH).held + ROOM + 44 * 32 * WIDTH)
    values = np.ones((20, WIDTH), np.float32)
    if cut:
        solver.hessian(values, one_of("a"), np.float32(6))
    else:
        with pytest.raises(CheckpointError) as caught:
            solver.hessian(values, one_of("a"), np.float32(6))
        assert str(caught.value) == (
            "module a: device cuda:0 has no memory left for the factor of 64 inputs; free some, choose another device, "
            "or begin anew with --device cpu"
        )
    assert (card.rows, card.releases) == (cut, releases)
    solver.close()


def test_factors_that_nobody_uses_make_room(plans: dict[str, Plan]) -> None:
    """They are forgotten, and torch gives their memory back, before a factor is tried again."""
    plan = plans["gptq"]
    card = FakeCard("cuda:0", engine_of(plan))
    solver = solver_of(plan, card)
    made, (kept,) = card.factor, solver.kept
    assert plan.calibrated is not None
    need = card_need(plan.calibrated, WIDTH)

    def factor(*given: Any) -> Factor:
        if kept.used > need.making:
            raise DeviceMemoryError("full")
        return made(*given)

    card.factor = factor  # type: ignore[assignment,method-assign]
    for number, key in enumerate("abb"):
        solver.gptq(np.ones((4, WIDTH), np.float32), one_of(key), np.float32(6))
        assert (kept.used, card.releases) == (need.held, min(number, 1))
    solver.close()
