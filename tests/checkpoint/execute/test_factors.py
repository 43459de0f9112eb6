"""Memory of what is made of statistics: counted, and never more than there is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.checkpoint.execute.conversion import shared_memory, sizes_for
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.factors import KEPT, Kept, Need
from halfbyte.checkpoint.execute.pieces import SLACK
from halfbyte.checkpoint.execute.solving import (
    HostSolver,
    Source,
    factor_need,
    memory_of,
    method_need,
    objective_of,
    statistics_bytes,
)
from halfbyte.checkpoint.plan.types import Calibrated
from halfbyte.contracts import get_contract
from halfbyte.errors import InputError
from halfbyte.feedback import factor_memory, prepare
from halfbyte.statistics import write_statistics
from halfbyte.testing import assert_same_bits
from tests.checkpoint.test_calibrated import linear
from tests.checkpoint.toy import all_bytes, random, write_checkpoint


def test_who_shares_a_key_shares_the_thing_and_memory_is_never_exceeded() -> None:
    kept: Kept[object] = Kept(100)
    lock, made, most, now = threading.Lock(), list[int](), 0, 0

    def use(number: int) -> object:
        nonlocal most, now

        def make() -> object:
            nonlocal most, now
            with lock:
                made.append(number % 5)
                now += 40
                most = max(most, now)
            time.sleep(0.001)
            with lock:
                now -= 40
            return ("thing", number % 5)

        with kept.borrow(number % 5, Need(40, 10), make) as found:
            time.sleep(0.001)
            return found

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(use, range(60)))
    assert found == [("thing", number % 5) for number in range(60)]
    assert kept.most_used <= 100
    assert most <= 80
    assert len(made) < 60
    kept.clear()
    assert kept.used == 0


def test_the_longest_unused_goes_first_and_a_large_thing_comes_alone() -> None:
    kept: Kept[int] = Kept(100)
    made: list[int] = []

    def use(number: int, making: int = 20) -> None:
        def make() -> int:
            made.append(number)
            return number

        with kept.borrow(number, Need(making, 20), make) as found:
            assert found == number

    for number in (1, 2, 3, 4, 1, 5, 1, 2):
        use(number)
    assert made == [1, 2, 3, 4, 5, 2]
    assert KEPT == 4
    assert kept.used == 4 * 20
    use(6, making=500)
    assert kept.used == 20
    assert kept.most_used == 500


def test_what_fails_is_made_anew_and_leaves_nothing() -> None:
    kept: Kept[int] = Kept(50)

    def fail() -> int:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"), kept.borrow(1, Need(50, 10), fail):
            pass
    assert kept.used == 0
    with kept.borrow(1, Need(50, 10), lambda: 3) as found:
        assert found == 3
    barrier = threading.Barrier(2)

    def late() -> int:
        barrier.wait()
        time.sleep(0.05)
        raise ValueError("late")

    def other() -> int:
        barrier.wait()
        with kept.borrow(2, Need(10, 10), lambda: 5) as found:
            return found

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(other)
        with pytest.raises(ValueError, match="late"), kept.borrow(2, Need(10, 10), late):
            pass
        assert waiting.result() == 5


@pytest.mark.parametrize(("crossed", "descent"), [(False, 0), (True, 0), (True, 1)])
def test_a_factor_takes_what_is_counted(crossed: bool, descent: int) -> None:
    """Beside LAPACK's own copies, which numpy does not count: two of A in float64, or three."""
    width = 768
    known = linear(0, width, cross=crossed)
    assert known.second_moment is not None
    making, held = factor_memory(width, crossed, descent)
    hb.gptq(np.ones((4, 16), np.float32), np.eye(16), "nvfp4", backend="cpu")  # tables that stay
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    factor = prepare(known.second_moment, 16, hb.Gptq(descent=descent), cross_moment=known.cross_moment)
    now, peak = (size - before for size in tracemalloc.get_traced_memory())
    hb.gptq(np.ones((4, width), np.float32), factor, "nvfp4", backend="cpu")
    after = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    given, hidden = known.second_moment.nbytes * (2 if crossed else 1), (2 if crossed else 1) * 8 * width * width
    assert 0.6 * making < peak + given + hidden <= making
    assert now <= after
    assert 0.5 * held < after <= held


def test_an_objective_takes_what_is_counted() -> None:
    """With blocks of 32, which are the most."""
    width = 768
    known = linear(0, width)
    planned = Calibrated(Path("stats"), "hessian", hb.Gptq(), "", 0, {}, {})
    need, given = method_need(planned, width), statistics_bytes(planned, width)
    assert known.second_moment is not None
    assert given == 2 * known.second_moment.nbytes
    assert statistics_bytes(replace(planned, crossed=True), width) == 2 * given
    x = np.ones((4, width), np.float32)
    hb.quantize(x, "mxfp4", method=objective_of(known, 32, "nearest"), threads=1)  # tables that stay
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    method = objective_of(known, 32, "nearest")
    peak = tracemalloc.get_traced_memory()[1] - before
    hb.quantize(x, "mxfp4", method=method, threads=1)
    after = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.3 * (need.making - given) < peak <= need.making - given
    assert 0.3 * need.held < after <= need.held


def test_a_conversion_keeps_to_its_memory(tmp_path: Path) -> None:
    width = 512
    tensors = {f"model.layers.{i}.mlp.down_proj.weight": random(i, 64, width, dtype=np.float32) for i in range(6)}
    config = {"model_type": "llama", "num_hidden_layers": 6}
    source = write_checkpoint(tmp_path / "s", tensors, config)
    known = {name.removesuffix(".weight"): linear(i, width) for i, name in enumerate(tensors)}
    write_statistics(tmp_path / "stats.safetensors", known)
    plan = make_plan(source, Options(method="gptq", statistics=tmp_path / "stats.safetensors"))
    assert plan.calibrated is not None
    need = factor_need(plan.calibrated, width)
    assert memory_of(plan, 0) == (need.making, need.making + 3 * need.held)
    roomy = Resources(2, sync=False)
    assert shared_memory(plan, roomy) == (2 << 30, need.making + 3 * need.held)
    for device, cards in (("cuda", 1), ("cuda:3", 1), ("cuda:0,2", 2)):
        used = cards * statistics_bytes(plan.calibrated, width)
        assert shared_memory(plan, Resources(device=device)) == (2 << 30, used), "cards hold the factors"
        assert memory_of(plan, cards) == (used, used)
    half = need.making + need.held
    assert shared_memory(plan, Resources(2, max_memory=2 * half)) == (half, half)
    with pytest.raises(InputError, match=rf"--max-memory {need.making:,} is too little: the largest factor of the"):
        run(plan, tmp_path / "d", Resources(1, max_memory=need.making))
    with pytest.raises(InputError, match=r"is too little: a piece of the largest .* are left beside the fac"):
        run(plan, tmp_path / "d", Resources(1, max_memory=need.making + 1000))
    run(plan, tmp_path / "roomy", roomy)
    limit = need.making + (2 << 20)
    tight = Resources(2, max_memory=limit, sync=False)
    assert sum(shared_memory(plan, tight)) == limit
    code = f"""
import sys, tracemalloc
from pathlib import Path
from halfbyte.checkpoint import Options, Resources, make_plan, run
folder = Path(sys.argv[1])
plan = make_plan(folder / "s", Options(method="gptq", statistics=folder / "stats.safetensors"))
run(plan, folder / "warm", Resources(1, sync=False))
tracemalloc.start()
run(plan, folder / "tight", Resources(2, max_memory={limit}, sync=False))
print(tracemalloc.get_traced_memory()[1])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all_bytes(tmp_path / "tight") == all_bytes(tmp_path / "roomy")
    assert int(done.stdout) < limit


@pytest.mark.parametrize("kind", ["gptq", "hessian"])
def test_statistics_that_no_module_takes_need_no_memory(tmp_path: Path, kind: Literal["gptq", "hessian"]) -> None:
    """As when every weight is FP4 in the source."""
    name = "model.layers.0.mlp.down_proj"
    source = write_checkpoint(tmp_path / "s", {f"{name}.weight": random(0, 64, 64, dtype=np.float32)})
    write_statistics(tmp_path / "stats.safetensors", {name: linear(0, 64)})
    plan = make_plan(source, Options(method=kind, statistics=tmp_path / "stats.safetensors"))
    assert plan.calibrated is not None
    assert min(*memory_of(plan, 0), *memory_of(plan, 2)) > 1
    bare = replace(plan, calibrated=replace(plan.calibrated, names={}))
    assert memory_of(bare, 0) == memory_of(bare, 2) == (0, 0)
    nothing = replace(bare, shards=tuple(replace(shard, units=()) for shard in plan.shards))
    least = -(-SLACK * 10 // 9)
    assert sizes_for(nothing, Resources(workers=1, max_memory=least))[0].arena == SLACK


def test_bytes_on_the_host_counted_by_hand() -> None:
    """Second moments once as they are read and once divided; blocks of 16 and 32 and what they are made of."""
    planned = Calibrated(Path("stats"), "hessian", hb.Gptq(), "", 0, {}, {})
    assert statistics_bytes(planned, 768) == 2 * 4 * 768 * 768
    assert statistics_bytes(replace(planned, crossed=True), 768) == 4 * 4 * 768 * 768
    assert method_need(planned, 768) == Need(4_718_592 + 786_432, 393_216)
    for descent in (0, 1):
        by = replace(planned, kind="gptq", method=hb.Gptq(descent=descent))
        assert factor_need(by, 768) == Need(*factor_memory(768, False, descent))


def test_a_solver_forgets_when_it_is_closed() -> None:
    planned = Calibrated(Path("stats"), "hessian", hb.Gptq(), "", 0, {}, {})
    format = hb.get_format("nvfp4")
    solver = HostSolver(planned, Engine(format, get_contract("modelopt", format), "optimal", True), 1 << 24)
    x = random(0, 4, 64, dtype=np.float32)
    codes, scales = solver.hessian(x, Source("a", 64, lambda: linear(0, 64), "m"), np.float32(7))
    wanted = hb.quantize(x, "nvfp4", "modelopt", objective_of(linear(0, 64), 16, "nearest"), global_amax=7.0)
    assert_same_bits(codes, wanted.codes)
    assert_same_bits(scales, wanted.scales)
    assert solver.kept.used == method_need(planned, 64).held
    solver.close()
    assert solver.kept.used == 0


def test_what_just_fits_is_kept_and_waits_for_nothing() -> None:
    kept, made = Kept[int](40), list[int]()

    def use(number: int) -> None:
        with kept.borrow(number, Need(20, 20), lambda: made.append(number) or number):  # type: ignore[func-returns-value]
            pass

    for number in (1, 2, 1, 2):
        use(number)
    assert (made, kept.used) == ([1, 2], 40)
    with ThreadPoolExecutor(1) as pool, kept.borrow(1, Need(20, 20), lambda: 1):
        pool.submit(use, 3).result(30)
    assert (made, kept.used) == ([1, 2, 3], 40)


def test_a_thing_is_shared_as_soon_as_it_is_made() -> None:
    """Whoever waited for it need not wait until the first is done with it."""
    kept, asked, shared = Kept[str](10), threading.Event(), threading.Event()

    def second() -> None:
        asked.set()
        with kept.borrow("key", Need(5, 5), lambda: "another") as found:
            assert found == "one"
            shared.set()

    def make() -> str:
        waiting.append(pool.submit(second))
        assert asked.wait(30)
        time.sleep(0.05)  # it comes to wait
        return "one"

    waiting: list[Future[None]] = []
    with ThreadPoolExecutor(1) as pool:
        with kept.borrow("key", Need(5, 5), make):
            assert shared.wait(10), "the second still waits"
        waiting[0].result(30)
    assert kept.used == 5
