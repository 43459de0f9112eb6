"""The engine: chunks give the bits of the whole, on the CPU and through torch; devices that are there and are not."""

from __future__ import annotations

import importlib.util
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

import halfbyte as hb
from halfbyte.checkpoint import engine as engine_module
from halfbyte.checkpoint.engine import Engine, bf16, resolve_device
from halfbyte.contracts import get_contract
from halfbyte.errors import CheckpointError, InputError, UnsupportedError
from halfbyte.testing import assert_same_bits
from tests.checkpoint.toy import random

NVFP4 = hb.get_format("nvfp4")


def make(contract: str = "modelopt", method: str = "amax", through_torch: bool = False) -> Engine:
    found = Engine(NVFP4, get_contract(contract, NVFP4), method, repairs=contract == "modelopt")
    if through_torch:
        found.device = "cpu:0"  # another name for the CPU: the road that a GPU takes
    return found


@pytest.mark.parametrize("through_torch", [False, True])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("method", ["amax", "four_six", "optimal"])
def test_chunks_give_the_bits_of_the_whole(dtype: npt.DTypeLike, method: str, through_torch: bool) -> None:
    x = random(0, 50, 64, dtype=dtype)
    found = make(method=method, through_torch=through_torch)
    amax = max(found.amax(x[start : start + 7]) for start in range(0, 50, 7))
    assert amax == np.abs(x.astype(np.float32)).max()
    q = hb.quantize(x, "nvfp4", "modelopt", method)
    codes, scales = np.zeros((50, 32), np.uint8), np.zeros((50, 4), np.uint8)
    for start in range(0, 50, 7):
        found.quantize(x[start : start + 7], amax, codes[start : start + 7], scales[start : start + 7])
    assert_same_bits(codes, q.codes)
    assert_same_bits(scales, q.scales)


@pytest.mark.parametrize("through_torch", [False, True])
def test_nan_and_inf_reach_the_amax(through_torch: bool) -> None:
    x = random(0, 4, 64)
    x[1, 3] = np.inf
    assert make(through_torch=through_torch).amax(x) == np.inf
    x[2, 5] = np.nan
    assert np.isnan(make(through_torch=through_torch).amax(x))


def test_strided_chunks_have_an_amax_too() -> None:
    x = random(0, 8, 64)
    assert make().amax(x[:, ::2]) == np.abs(x[:, ::2].astype(np.float32)).max()


@pytest.mark.parametrize(
    ("amax", "usable"), [(0.0, 2688.0), (1e-40, 2688 * 2.0**-126), (3.0, 3.0), (3e38, 3e38), (1e-30, 1e-30)]
)
def test_amaxes_that_give_no_usable_scale_are_raised(amax: float, usable: float) -> None:
    assert make().usable_amax(np.float32(amax), "m") == np.float32(usable)
    assert make("miles").usable_amax(np.float32(amax), "m") == np.float32(amax)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_unusable_amaxes_are_refused_by_every_contract(value: float) -> None:
    for contract in ("modelopt", "miles"):
        with pytest.raises(CheckpointError, match=r"some.module holds"):
            make(contract).usable_amax(np.float32(value), "some.module")


def test_tensor_scales_in_both_directions() -> None:
    scales = make().tensor_scales(np.float32(3), np.float32)
    assert scales.multiplier == np.float32(3) / np.float32(2688)
    assert scales.divisor == np.float32(1) / scales.multiplier
    theirs = make("compressed_tensors").tensor_scales(np.float32(3), np.float32)
    assert theirs.divisor == np.float32(1) / np.float32(3) * np.float32(2688)


def test_bf16_rounds_once_and_keeps_what_is_special() -> None:
    values = np.array([1.00390625, -0.0, np.inf, 3.4e38], np.float32)
    assert bf16(values).astype(np.float32).tolist() == [1.0, -0.0, np.inf, np.inf]


def test_bf16_equals_the_cast_of_the_dtype() -> None:
    """Every upper half, with lower halves around the tie; NaN may have any bits."""
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | np.uint32(lower)).view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = values.astype(ml_dtypes.bfloat16)
        assert_same_bits(bf16(values), expected, any_nan=True)
        assert (np.isnan(values) == np.isnan(bf16(values).astype(np.float32))).all()


# --- devices ---


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
    monkeypatch.setattr(engine_module, "_driver_present", lambda: driver)
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


def test_decoding_has_no_scales() -> None:
    plain = Engine(None, None, None, repairs=False)
    x = random(0, 4, 64)
    with pytest.raises(UnsupportedError):
        plain.amax(x)
    with pytest.raises(UnsupportedError):
        plain.quantize(x, None, np.zeros((4, 32), np.uint8), np.zeros((4, 4), np.uint8))
    with pytest.raises(UnsupportedError):
        plain.tensor_scales(np.float32(1), np.float32)
