"""Exact searches of tensors far from 1: compiled, they have the reference's bits for amaxes of 2**-100 to 2**100."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import halfbyte as hb
from halfbyte.backends.cpu import backend, call
from halfbyte.backends.reference.quantize import quantize_matrix
from halfbyte.methods import Method
from halfbyte.testing import assert_same_bits

CONTRACTS = ["transformer_engine", "modelopt", "compressed_tensors", "torchao", "flashinfer", "miles", "vllm"]
METHODS: list[str | Method] = [
    "optimal", hb.Optimal(headroom=1), hb.Optimal(np.arange(1.0, 49.0)), hb.Hessian(np.tile(np.eye(16), (3, 1, 1))),
]  # fmt: skip


@pytest.mark.parametrize("contract", CONTRACTS)
def test_far_from_one(contract: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def noted(*arguments: Any) -> Any:
        sent.append(power)
        return quantize_matrix(*arguments)

    monkeypatch.setattr(backend, "quantize_matrix", noted)
    rng = np.random.default_rng(0)
    for power in (-101, -99, -80, -61, 61, 80, 99, 101):
        for number, method in enumerate(METHODS):
            x = rng.standard_normal((3, 48)) * np.exp2(rng.integers(-20, 1, (3, 3))).repeat(16, 1)
            x = np.ldexp(x / np.abs(x).max(), power).astype(np.float32)
            x = x.astype(ml_dtypes.bfloat16 if number % 2 else np.float32)
            found, expected = (hb.quantize(x, "nvfp4", contract, method, backend=name) for name in ("cpu", "reference"))
            for part in ("codes", "scales", "stored_scale", "global_scale"):
                if getattr(expected, part) is not None:
                    assert_same_bits(getattr(found, part), getattr(expected, part))
    assert set(sent) <= {-101, 101}


@pytest.mark.parametrize(("large", "small"), [(58, -130), (99, -65), (70, -100)])
@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_block_that_becomes_zero_is_none_of_zeros(contract: str, large: int, small: int) -> None:
    """Its elements, scaled as the search scales them, are too small for float32: the smallest scale wins."""
    x = np.zeros((3, 48), np.float32)
    x[:, 0], x[1, 20], x[2, 40] = 2.0**large, 2.0**small, -(2.0**small)
    for method in METHODS:
        for dtype in (np.float32, ml_dtypes.bfloat16):
            found, expected = (
                hb.quantize(x.astype(dtype), "nvfp4", contract, method, backend=name) for name in ("cpu", "reference")
            )
            assert_same_bits(found.scales, expected.scales)
            assert_same_bits(found.codes, expected.codes)
            if method == METHODS[0]:
                assert int(np.asarray(expected.scales)[1, 1]) == 1


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_blocks_of_mx_far_from_one(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference, which is slow, takes only blocks with an amax below 2**-107."""
    sent: list[int] = []

    def noted(x: np.ndarray[Any, Any], *rest: Any) -> Any:
        sent.append(len(x))
        return quantize_matrix(x, *rest)

    monkeypatch.setattr(call, "quantize_matrix", noted)
    powers = np.arange(-112, -84)
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (powers.size, 64)) * np.exp2(rng.integers(-12, 1, (powers.size, 64)))
    x[:, ::32] = 1.5
    x = np.ldexp(x, powers[:, None]).astype(ml_dtypes.bfloat16)
    found, expected = (hb.quantize(x, format, method="optimal", backend=name) for name in ("cpu", "reference"))
    assert_same_bits(found.codes, expected.codes)
    assert_same_bits(found.scales, expected.scales)
    assert sent == [2 * int((powers < -107).sum())]
