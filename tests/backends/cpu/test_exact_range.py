"""Exact searches of tensors far from 1: compiled, they have the reference's bits for amaxes of 2**-100 to 2**100."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import halfbyte as hb
from halfbyte.backends.cpu import backend
from halfbyte.methods import Method
from halfbyte.testing import assert_same_bits

CONTRACTS = ["transformer_engine", "modelopt", "compressed_tensors", "torchao", "flashinfer", "miles", "vllm"]
METHODS: list[str | Method] = [
    "optimal", hb.Optimal(headroom=1), hb.Optimal(np.arange(1.0, 49.0)), hb.Hessian(np.tile(np.eye(16), (3, 1, 1))),
]  # fmt: skip


@pytest.mark.parametrize("contract", CONTRACTS)
def test_far_from_one(contract: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    quantize_matrix = backend.quantize_matrix

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
