"""Devices that are there and are not."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from halfbyte.checkpoint.execute import target_device
from halfbyte.checkpoint.execute.target_device import resolve_device
from halfbyte.errors import InputError, UnsupportedError


def test_the_cpu_needs_nothing() -> None:
    assert resolve_device("cpu") == "cpu"


@pytest.mark.parametrize("name", ["tpu", "cpu:1", "cuda:-1", "cuda:x", "", "auto:0"])
def test_unknown_devices(name: str) -> None:
    with pytest.raises(InputError, match="unknown device"):
        resolve_device(name)


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name == "torch" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    without_torch(monkeypatch)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(UnsupportedError, match="torch is not installed; use --device cpu"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("driver", "cuda", "found"), [(False, True, "cpu"), (True, False, "cpu"), (True, True, "cuda:0")]
)
def test_auto(monkeypatch: pytest.MonkeyPatch, driver: bool, cuda: bool, found: str) -> None:
    monkeypatch.setattr(target_device, "_driver_present", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == found


def test_cuda_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == "cuda:1"
    with pytest.raises(UnsupportedError, match="this machine has 2 CUDA devices"):
        resolve_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="torch finds no CUDA device"):
        resolve_device("cuda")
