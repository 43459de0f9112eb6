"""What `--device auto` takes, and what it says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfbyte.backends import BACKENDS
from halfbyte.checkpoint import Options, Plan, Rules, make_plan
from halfbyte.checkpoint.execute.device import choice, solving_time
from halfbyte.checkpoint.execute.device.choice import MOVING, START, choose_device, choose_for_model, cpu_seconds
from halfbyte.formats import get_format
from tests.backends.gpu.card import convert_checks
from tests.checkpoint.test_calibrated import statistics
from tests.checkpoint.toy import llama, write_checkpoint


def relayout(folder: Path) -> Plan:
    """NVFP4 to another layout: nothing is computed."""
    make, config = convert_checks.SOURCES["nvfp4"]
    convert_checks.write(folder, make(), config)
    return make_plan(folder, Options(layout="compressed-tensors"))


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return make_plan(write_checkpoint(tmp_path / "s", llama()), Options())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver, two devices and every kernel."""
    monkeypatch.setattr(choice, "driver_present", lambda: True)
    monkeypatch.setattr(choice, "cuda_count", lambda: 2)
    monkeypatch.setattr(type(BACKENDS["gpu"]), "supports", lambda self, request: None)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("seconds", "workers", "device", "reason"),
    [
        (4 * START - 1, 4, "cpu", "about 5 s on the CPU, 5 s on a GPU, of which 5 to start"),
        (4 * START + 40, 4, "cuda", "about 15 s on the CPU, 5 s on a GPU, of which 5 to start"),
        (4 * START + 40, 16, "cpu", "about 4 s on the CPU, 5 s on a GPU"),
    ],
)
def test_the_faster_one(plan: Plan, seconds: float, workers: int, device: str, reason: str) -> None:
    """A small plan: reading and writing take no time."""
    found = choose_device(plan, workers, lambda plan: seconds)
    assert found.device == device
    assert reason in found.reason


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("gigabytes", "workers", "device"), [(300, 2, "cuda"), (300, 8, "cuda"), (300, 16, "cpu"), (16, 8, "cpu")]
)
def test_as_measured(plan: Plan, monkeypatch: pytest.MonkeyPatch, gigabytes: int, workers: int, device: str) -> None:
    """Optimal scales at 0.94 GB/s per worker of the CPU: sixteen of them are as fast as a GPU."""
    size = gigabytes * 1e9
    monkeypatch.setattr(type(plan.units[0]), "source_bytes", property(lambda unit: size / len(plan.units)))
    assert choose_device(plan, workers, lambda plan: size * (1 / 0.94e9 - MOVING)).device == device


@pytest.mark.usefixtures("gpu")
def test_reasons_against_a_gpu(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is found before anything slower is asked."""

    def never() -> int:
        raise AssertionError("torch was asked")

    def forever(plan: Plan) -> float:
        return 1e9

    monkeypatch.setattr(choice, "cuda_count", lambda: ": torch finds no CUDA device here")
    assert (
        choose_device(plan, 2, forever).reason
        == "torch cannot use a GPU (device cuda: torch finds no CUDA device here)"
    )
    monkeypatch.setattr(choice, "cuda_count", never)
    monkeypatch.setattr(type(BACKENDS["gpu"]), "supports", lambda self, request: "no kernel for that")
    assert choose_device(plan, 2, forever).reason == "GPUs cannot do this: no kernel for that"
    monkeypatch.setattr(choice, "driver_present", lambda: False)
    assert choose_device(plan, 2, forever).reason == "there is no NVIDIA driver"
    nothing = relayout(tmp_path / "t")
    assert choose_device(nothing, 2, forever).reason == "nothing is quantized"


def test_the_estimate_grows_with_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_seconds_each", lambda engine, dtype: {"BF16": 1.0, "F32": 4.0}[dtype])
    tensors = llama(layers=1)
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors), Options())
    elements = sum(x.size for name, x in tensors.items() if "_proj.weight" in name)
    assert cpu_seconds(plan) == elements


def test_the_timing_is_a_time(plan: Plan) -> None:
    assert 0 < cpu_seconds(plan) < 60


@pytest.mark.usefixtures("gpu")
def test_conversions_by_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows of the same few inputs are for a GPU; a small model is not."""
    tensors = llama()
    statistics(tmp_path / "stats", tensors)
    source = write_checkpoint(tmp_path / "s", tensors)
    plan = make_plan(source, Options(method="gptq", statistics=tmp_path / "stats"))
    work = solving_time.work_of(plan)
    linears = [source for unit in plan.units for source in unit.sources]
    assert work.elements == sum(one.rows * one.columns for one in linears)
    assert work.terms == sum(one.rows * one.columns**2 / 2 for one in linears)
    assert work.turns == sum(one.columns / 16 for one in linears)
    assert work.squares == 2 * (3 * 64**2 + 96**2)  # q, k and v share theirs; so do gate and up
    assert work.factors == pytest.approx(2 * (3 * 64**3 + 96**3) / 3)
    small = choose_device(plan, 2)
    assert (small.device, small.reason.startswith("about 0 s on the CPU, 5 s on a GPU")) == ("cpu", True)
    monkeypatch.setattr(choice, "work_of", lambda plan: solving_time.Work(elements=1e11, turns=100))
    large = choose_device(plan, 2)
    assert (large.device, large.reason.startswith("about 850 s on the CPU, 5 s on a GPU")) == ("cuda", True)


def test_what_each_count_costs() -> None:
    """In seconds: every one adds to the others."""
    work = solving_time.Work(elements=1e9, terms=4e12, turns=1000, factors=5e12, squares=1e9)
    assert work.on_cpu(1) == pytest.approx(17 + 84 + 200 + 60)
    assert work.on_gpu() == pytest.approx(0.7 + 1 + 1 + 4)
    assert work.on_cpu(4) == work.on_cpu(1) / 4
    assert work.on_gpu(2) == work.on_gpu() / 2


def test_a_model_runs_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "driver_present", lambda: False)
    assert choose_for_model("auto").reason == "there is no NVIDIA driver"
    monkeypatch.setattr(choice, "driver_present", lambda: True)
    monkeypatch.setattr(choice, "cuda_count", lambda: ": torch finds no CUDA device here")
    assert choose_for_model("auto").device == "cpu"
    monkeypatch.setattr(choice, "cuda_count", lambda: 2)
    assert choose_for_model("auto").device == "cuda:0"
    monkeypatch.setattr(choice, "resolve_device", {"cuda": "cuda:0,1", "cuda:1": "cuda:1", "cpu": "cpu"}.__getitem__)
    assert [choose_for_model(name).device for name in ("cuda", "cuda:1", "cpu")] == ["cuda:0", "cuda:1", "cpu"]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("gigabytes", "workers", "seconds", "estimate"),
    [
        # the slower of a worker's own work and of what memory allows, on either; the GPU needs 5 s to start
        (21.5, 2, 0, "about 5 s on the CPU, 10 s on a GPU"),
        (21.5, 2, 10, "about 10 s on the CPU, 10 s on a GPU"),
        (21.5, 1, 10, "about 20 s on the CPU, 15 s on a GPU"),
        (21, 16, 1, "about 2 s on the CPU, 7 s on a GPU"),
    ],
)
def test_both_estimates(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, gigabytes: float, workers: int, seconds: float, estimate: str
) -> None:
    size = int(gigabytes * 1e9)
    own = [size // len(plan.units) + (number < size % len(plan.units)) for number in range(len(plan.units))]
    sizes = {unit.module: bytes_ for unit, bytes_ in zip(plan.units, own, strict=True)}
    monkeypatch.setattr(type(plan.units[0]), "source_bytes", property(lambda unit: sizes[unit.module]))
    found = choose_device(plan, workers, lambda plan: seconds)
    assert found.reason == f"{estimate}, of which 5 to start"


@pytest.mark.usefixtures("gpu")
def test_what_is_as_fast_on_the_cpu_stays_there(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(plan.units[0]), "source_bytes", property(lambda unit: 0))
    assert choose_device(plan, 1, lambda plan: START).device == "cpu"
    assert choose_device(plan, 1, lambda plan: START * 1.001).device == "cuda"


def test_only_what_is_quantized_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the dtype of its values: decoded ones are float32."""
    asked: list[tuple[str, int]] = []

    def each(engine: object, dtype: str) -> float:
        asked.append((dtype, 0))
        return 2.0

    monkeypatch.setattr(choice, "_seconds_each", each)
    tensors = {
        "model.layers.0.mlp.down_proj.weight": np.ones((32, 32), ml_dtypes.float8_e4m3fn),
        "model.layers.0.mlp.down_proj.weight_scale": np.ones((), np.float32),
        "model.layers.1.mlp.down_proj.weight": np.ones((32, 64), ml_dtypes.float8_e4m3fn),
        "model.layers.1.mlp.down_proj.weight_scale": np.ones((), np.float32),
        "model.layers.2.mlp.down_proj.weight": np.ones((32, 64), ml_dtypes.float8_e4m3fn),
        "model.layers.2.mlp.down_proj.weight_scale": np.ones((), np.float32),
    }
    config = {"num_hidden_layers": 3, "quantization_config": {"quant_method": "fp8"}}
    source = write_checkpoint(tmp_path / "s", tensors, config)
    assert cpu_seconds(make_plan(source, Options(rules=Rules(keep_first=1)))) == 2 * 2 * 32 * 64
    assert asked == [("F32", 0)]


@pytest.mark.usefixtures("gpu")
def test_both_estimates_by_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading and writing come on top; a GPU solves a weight block after block, and has to start."""
    tensors = llama()
    statistics(tmp_path / "stats", tensors)
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors), Options(method="gptq", statistics=tmp_path / "stats"))
    size = 8.6e9 / len(plan.units)
    monkeypatch.setattr(type(plan.units[0]), "source_bytes", property(lambda unit: size))
    monkeypatch.setattr(choice, "work_of", lambda plan: solving_time.Work(elements=2e9, turns=10_000))
    found = choose_device(plan, 2)
    assert found.reason == "about 19 s on the CPU, 14 s on a GPU, of which 5 to start"
    assert found.device == "cuda"


def test_the_work_of_other_plans(tmp_path: Path) -> None:
    """Objectives have no terms; cross moments have twice as many besides; what has no statistics does not count."""
    tensors = llama()
    source = write_checkpoint(tmp_path / "s", tensors)
    assert solving_time.work_of(make_plan(source, Options())) == solving_time.Work()
    statistics(tmp_path / "stats", tensors, without="down_proj", cross=True)

    def work(method: str) -> solving_time.Work:
        return solving_time.work_of(make_plan(source, Options(method=method, statistics=tmp_path / "stats")))

    rows = 2 * (64 + 32 + 32 + 64 + 96 + 96)
    assert work("hessian") == solving_time.Work(elements=rows * 64, squares=2 * 3 * 64**2)
    found = work("gptq")
    assert (found.elements, found.terms, found.turns) == (rows * 64, rows * 64**2 * 1.5, 2 * 6 * 64 / 16)


@pytest.mark.parametrize("to", ["nvfp4", "mxfp4"])
def test_the_best_of_three_calls(monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """On a matrix as weights are; the first call may build tables."""
    calls: list[tuple[object, ...]] = []
    clock = iter([0.0, 5.0, 10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr(choice, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

    def quantize(x: Any, amax: object, codes: Any, scales: Any) -> None:
        assert 0.019 < x.astype(np.float32).std() < 0.021
        calls.append((x.dtype, x.shape, amax, codes.shape, scales.shape))

    engine: Any = SimpleNamespace(
        format=get_format(to),
        amax=lambda x: 0.5,
        widths=lambda columns: (columns // 2, columns // 8),
        quantize=quantize,
    )
    assert choice._seconds_each(engine, "F16") == 2 / (256 * 1024)
    amax = 0.5 if to == "nvfp4" else None
    assert calls == [(np.float16, (256, 1024), amax, (256, 512), (256, 128))] * 3
