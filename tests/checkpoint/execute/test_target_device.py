"""Devices that are there and are not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.backends import BACKENDS
from halfbyte.checkpoint import Options, Plan, make_plan
from halfbyte.checkpoint.execute import target_device
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.target_device import open_devices, resolve_device
from halfbyte.errors import InputError, UnsupportedError
from tests.backends.gpu.card import convert_checks
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
