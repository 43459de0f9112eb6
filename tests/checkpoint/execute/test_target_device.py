"""Devices that are there and are not."""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.backends import BACKENDS
from halfbyte.checkpoint import Options, Plan, make_plan
from halfbyte.checkpoint.execute import target_device
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.target_device import (
    driver_present,
    kernel_reason,
    kind_of,
    numbers_of,
    open_cards,
    open_devices,
    placed,
    resolve_device,
)
from halfbyte.checkpoint.plan.types import Solved
from halfbyte.errors import InputError, UnsupportedError
from halfbyte.smoothing import Smoothing
from tests.backends.gpu.card import convert_checks
from tests.checkpoint.test_calibrated import statistics
from tests.checkpoint.toy import llama, write_checkpoint


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_the_cpu_needs_nothing() -> None:
    assert resolve_device("cpu") == "cpu"


@pytest.mark.parametrize("name", ["tpu", "cpu:1", "cuda:-1", "cuda:x", "", "auto:0", "cuda:0,", "cuda:,1", "cuda:0;1"])
def test_unknown_devices(name: str) -> None:
    with pytest.raises(InputError, match="unknown device"):
        resolve_device(name)


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name == "torch" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(UnsupportedError, match="torch is not installed; use --device cpu"):
        resolve_device("cuda")


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(
    ("name", "full"), [("cuda", "cuda:0,1"), ("cuda:1", "cuda:1"), ("cuda:1,0,1", "cuda:0,1"), ("cuda:0", "cuda:0")]
)
def test_cuda_by_number(name: str, full: str) -> None:
    assert resolve_device(name) == full
    assert resolve_device(full) == full


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("name", ["cuda:2", "cuda:0,2"])
def test_a_number_too_large(name: str) -> None:
    with pytest.raises(UnsupportedError, match="this machine has 2 CUDA devices"):
        resolve_device(name)


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="torch finds no CUDA device"):
        resolve_device("cuda")


def relayout(folder: Path) -> Plan:
    """NVFP4 to another layout: nothing is computed."""
    make, config = convert_checks.SOURCES["nvfp4"]
    convert_checks.write(folder, make(), config)
    return make_plan(folder, Options(layout="compressed-tensors"))


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return make_plan(write_checkpoint(tmp_path / "s", llama()), Options())


def engine_of(plan: Plan) -> Engine:
    return Engine(plan.format, plan.contract, plan.method, plan.repairs)


@pytest.mark.usefixtures("two_devices")
def test_devices_are_opened_if_they_can_help(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(BACKENDS["gpu"]), "supports", lambda self, request: None)
    monkeypatch.setattr(target_device, "capability_of", lambda number: (9, 0))
    assert [device.name for device in open_devices("cuda", plan, engine_of(plan))] == ["cuda:0", "cuda:1"]
    assert open_devices("cpu", plan, engine_of(plan)) == ()
    nothing = relayout(tmp_path / "t")
    assert open_devices("cuda", nothing, engine_of(nothing)) == ()


@pytest.mark.usefixtures("two_devices")
def test_devices_that_cannot_help_are_refused(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(BACKENDS["gpu"]), "supports", lambda self, request: None)
    monkeypatch.setattr(target_device, "capability_of", lambda number: (8, 9 - number))
    with pytest.raises(UnsupportedError, match=r"cuda:1 has compute capability 8.8, and the kernels need 8.9; use"):
        open_devices("cuda", plan, engine_of(plan))
    monkeypatch.setattr(type(BACKENDS["gpu"]), "supports", lambda self, request: f"none for {request.dtype}")
    with pytest.raises(UnsupportedError, match="device cuda cannot do this: none for bf16; use --device cpu"):
        open_devices("cuda", plan, engine_of(plan))


def statistics_plan(folder: Path, **options: Any) -> Plan:
    tensors = llama()
    statistics(folder / "stats", tensors)
    return make_plan(write_checkpoint(folder / "s", tensors), Options(statistics=folder / "stats", **options))


def test_what_gpus_have_no_kernel_for(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of what decodes, of solved weights and of smoothed ones; else every dtype of the values."""
    asked: list[str] = []

    def supports(self: object, request: Any) -> str | None:
        asked.append(request.dtype)
        return f"none for {request.dtype}" if request.dtype == "fp32" else None

    monkeypatch.setattr(type(BACKENDS["gpu"]), "supports", supports)
    assert kernel_reason(replace(plan, format=None)) is None
    solved = Solved(tmp_path, "gptq", "digest", {})
    assert kernel_reason(replace(plan, solved=solved)) == "weights that are solved already are written by the CPU"
    smoothed = kernel_reason(replace(plan, smoothing=Smoothing(())))
    assert smoothed == "smoothed weights are computed on the CPU"
    assert asked == []
    assert kernel_reason(plan) is None
    assert asked == ["bf16"]
    decoded = make_plan(tmp_path / "s", Options())
    both = [replace(unit, sources=(replace(unit.sources[0], kind="fp8"),)) for unit in decoded.units[:1]]
    mixed = replace(plan, shards=(replace(plan.shards[0], units=(*plan.shards[0].units, *both)),))
    asked.clear()
    assert kernel_reason(mixed) == "none for fp32"
    assert asked == ["bf16", "fp32"]
    moved = replace(plan.shards[0], units=tuple(replace(unit, action="relayout") for unit in both))
    assert kernel_reason(replace(plan, shards=(moved,))) is None


@pytest.mark.usefixtures("two_devices")
def test_cards_are_opened_for_statistics(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_device, "capability_of", lambda number: (9, 0))
    known = statistics_plan(tmp_path / "known", method="gptq")
    engine = engine_of(known)
    monkeypatch.setattr(target_device, "solving_reason", lambda *given: None)
    assert [card.name for card in open_cards("cuda", known, engine)] == ["cuda:0", "cuda:1"]
    assert open_cards("cpu", known, engine) == open_cards("cuda", plan, engine) == ()
    assert open_devices("cuda", known, engine) == ()
    monkeypatch.setattr(target_device, "solving_reason", lambda *given: "no kernel")
    with pytest.raises(UnsupportedError, match=r"^device cuda cannot do this: no kernel; use --device cpu$"):
        open_cards("cuda", known, engine)
    monkeypatch.setattr(target_device, "solving_reason", lambda *given: None)
    monkeypatch.setattr(target_device, "capability_of", lambda number: (8, 8))
    with pytest.raises(UnsupportedError, match=r"^device cuda:0 has compute capability 8.8, and the kernels need 8.9"):
        open_cards("cuda", known, engine)


def test_what_makes_factors_is_named_once(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where last bits depend on it."""
    monkeypatch.setattr(target_device, "kind_of", lambda device: f"kind of {device}")
    assert placed(plan, "cpu") is plan
    gptq, hessian = (statistics_plan(tmp_path / method, method=method) for method in ("gptq", "hessian"))
    assert placed(hessian, "cpu") is hessian
    found = placed(gptq, "cuda:1")
    assert found.calibrated is not None
    assert found.calibrated.device == "kind of cuda:1"
    assert placed(found, "cpu") is found


def test_numbers_and_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [numbers_of(name) for name in ("cpu", "cuda", "cuda:3", "cuda:10,2,10")] == [(), (), (3,), (2, 10)]
    assert kind_of("cpu") == f"cpu {platform.machine()}"
    for there in ("/dev/nvidiactl", "/dev/dxg", "/dev/nvidia0", "/dev/null"):
        monkeypatch.setattr(Path, "exists", lambda path, there=there: str(path) == there)
        assert driver_present() is (there != "/dev/null")
