"""search_global_scale: it is never worse, reports its true gain, and equals a search written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte.testing import assert_same_bits
from tests.samples import gaussian


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        ("qwantize", r"^search_global_scale: contract qwantize\(\) has no tensor scale to choose$"),
        (
            hb.contracts.vllm(global_scale=3.0),
            r"^search_global_scale: contract vllm\(.* has no tensor scale to choose$",
        ),
        (
            hb.contracts.transformer_engine(row_scaled_nvfp4=True),
            "has one per row; give the contract without row scaling$",
        ),
    ],
)
def test_contracts_without_a_tensor_scale_to_choose(contract: str | hb.contracts.Contract, message: str) -> None:
    with pytest.raises(hb.UnsupportedError, match=message):
        hb.search_global_scale(gaussian(4, 32), contract)


@pytest.mark.parametrize("method", ["amax", "optimal"])
@pytest.mark.parametrize("seed", range(4))
def test_never_worse_and_what_it_says(method: str, seed: int) -> None:
    x = gaussian(16, 128, seed=seed)
    found = hb.search_global_scale(x, method=method)
    q = hb.quantize(x, "nvfp4", method=method, global_amax=found.global_amax)
    assert_same_bits(found.quantized.codes, q.codes)

    def squared_error(tensor: hb.QuantizedTensor) -> float:
        return float(np.square(np.asarray(hb.dequantize(tensor)).astype(np.float64) - x).sum())

    assert found.squared_error == squared_error(q)
    assert found.plain_squared_error == squared_error(
        hb.quantize(x, "nvfp4", method=method, global_amax=float(np.abs(x).max()))
    )
    assert found.squared_error <= found.plain_squared_error
    assert found.gain == 1 - found.squared_error / found.plain_squared_error


def test_never_worse_than_the_headroom_of_optimal() -> None:
    """On what 4over6 with 256 wrote, 448/256 loses nothing, and no step of the grid is 448/256."""
    x = np.asarray(hb.dequantize(hb.quantize(gaussian(16, 128), "nvfp4", method=hb.FourSix("mse", 256))))
    optimal = hb.quantize(x, "nvfp4", method="optimal").error(x).squared
    found = hb.search_global_scale(x, method="optimal")
    assert found.squared_error <= optimal < found.plain_squared_error / 100
    assert hb.search_global_scale(x, method=hb.Optimal(headroom=1)).squared_error > optimal


def test_it_gains_where_a_better_scale_exists() -> None:
    assert any(hb.search_global_scale(gaussian(16, 128, seed=seed)).gain > 0.01 for seed in range(4))


def test_zero_and_representable_tensors_gain_nothing() -> None:
    assert hb.search_global_scale(np.zeros((2, 32), np.float32)).gain == 0
    exact = np.array([[6, 3, 1.5, -0.5] * 4], np.float32) * 448
    assert hb.search_global_scale(exact).squared_error == 0


def test_torch_tensors() -> None:
    x = gaussian(4, 64)
    found = hb.search_global_scale(torch.from_numpy(x).to(torch.bfloat16))
    assert isinstance(found.quantized.codes, torch.Tensor)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_error_to_minimise(value: float) -> None:
    x = gaussian(2, 32)
    x[1, 3] = value
    with pytest.raises(hb.InputError, match="needs finite values"):
        hb.search_global_scale(x)


def test_wrong_steps() -> None:
    with pytest.raises(hb.InputError, match=r"steps must be a whole number from 1 to 65,536, not 0"):
        hb.search_global_scale(gaussian(2, 32), steps=0)


def test_numbers_of_numpy() -> None:
    x = gaussian(4, 64)
    steps: Any = np.int64(4)
    octaves: Any = np.float32(0.5)
    made = hb.search_global_scale(x, steps=steps, octaves=octaves)
    expected = hb.search_global_scale(x, steps=4, octaves=0.5)
    assert (made.global_amax, made.squared_error) == (expected.global_amax, expected.squared_error)
