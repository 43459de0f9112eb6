"""Tensors without rows: an empty batch is quantized and decoded to an empty result, under every contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.contracts import CONTRACTS, DecodeRule
from halfbyte.testing import assert_same_bits
from tests.samples import gaussian

CASES = [
    (name, format)
    for name, make in CONTRACTS.items()
    for format, rule in make().rules.items()
    if not isinstance(rule, DecodeRule)
]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("contract", "format"), CASES)
def test_every_contract(contract: str, format: str, backend: str) -> None:
    for leading in ((0,), (2, 0), (0, 3)):
        q = hb.quantize(np.zeros((*leading, 64), np.float32), format, contract, backend=backend)
        assert q.shape == (*leading, 64)
        zeros = hb.quantize(np.zeros((1, 64), np.float32), format, contract, backend=backend)
        assert q.codes.shape == (*leading, zeros.codes.shape[-1])
        for part in ("global_scale", "stored_scale"):
            got, wanted = getattr(q, part), getattr(zeros, part)
            assert (got is None) == (wanted is None)
            if got is not None:
                assert_same_bits(got, wanted, any_nan=True)
        decoded = np.asarray(hb.dequantize(q, "bfloat16", backend=backend))
        assert (decoded.shape, decoded.dtype.name) == ((*leading, 64), "bfloat16")


def test_a_given_amax_and_a_method_are_kept() -> None:
    q = hb.quantize(np.zeros((0, 64), np.float32), "nvfp4", method="optimal", global_amax=3.0)
    wanted = hb.quantize(gaussian(2, 64), "nvfp4", method="optimal", global_amax=3.0)
    assert_same_bits(np.asarray(q.global_scale), np.asarray(wanted.global_scale))
    assert q.method == wanted.method
    tiled = hb.quantize(np.zeros((0, 64), np.float32), "nvfp4", "transformer_engine", tile=(16, 16))
    assert tiled.scales.shape == (0, 4)


def test_row_scaling_has_no_scale_to_give() -> None:
    q = hb.quantize(np.zeros((2, 0, 64), np.float32), "nvfp4", "transformer_engine", scaling="row")
    assert np.asarray(q.global_scale).shape == (2, 0)
    assert np.asarray(hb.dequantize(q)).shape == (2, 0, 64)


def test_torch_tensors_stay_torch_tensors() -> None:
    import torch

    q = hb.quantize(torch.zeros(0, 64, dtype=torch.bfloat16), "nvfp4")
    assert isinstance(q.codes, torch.Tensor)
    decoded = hb.dequantize(q, torch.float16)
    assert isinstance(decoded, torch.Tensor)
    assert (decoded.shape, decoded.dtype) == ((0, 64), torch.float16)


def test_out_is_checked_and_returned() -> None:
    first = hb.quantize(np.zeros((0, 64), np.float32), "nvfp4")
    again = hb.quantize(np.zeros((0, 64), np.float32), "nvfp4", out=first)
    assert again.codes is first.codes
    with pytest.raises(hb.InputError, match=r"out holds nvfp4 of shape \(0, 64\)"):
        hb.quantize(np.zeros((0, 32), np.float32), "nvfp4", out=first)
    room = np.empty((0, 64), np.float32)
    assert np.asarray(hb.dequantize(first, out=room)).shape == (0, 64)
    with pytest.raises(hb.InputError, match="but the result is float32"):
        hb.dequantize(first, out=np.empty((1, 64), np.float32))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("leading", [(0,), (2, 0)])
def test_casts(kind: str, leading: tuple[int, ...]) -> None:
    import torch

    x: Any = np.zeros((*leading, 64), np.float32)
    x = torch.from_numpy(x) if kind == "torch" else x
    for algorithm in ("optimal", "hybrid", "verbatim", "requantize"):
        for contract in (None, "modelopt", "compressed_tensors"):
            made, report = hb.cast(hb.quantize(x, "mxfp4"), "nvfp4", algorithm, contract=contract)
            assert (made.shape, report.label, report.blocks, report.mse) == ((*leading, 64), "bit-exact", 0, 0.0)
            assert (type(made.codes), made.dequantize().shape) == (type(x), x.shape)
    back, report = hb.cast(hb.quantize(x, "nvfp4"), "mxfp4")
    assert (back.format.name, back.shape, report.label) == ("mxfp4", (*leading, 64), "bit-exact")
    values, report = hb.cast(hb.quantize(x, "mxfp8"), "bfloat16")
    assert (values.shape, report.label) == (x.shape, "value-exact")
    into = hb.quantize(x, "nvfp4", "modelopt")
    made, _ = hb.cast(hb.quantize(x, "mxfp4"), "nvfp4", out=into)
    assert made.codes is into.codes
    with pytest.raises(hb.InputError, match="out holds nvfp4 of shape"):
        hb.cast(hb.quantize(x, "mxfp4"), "nvfp4", out=hb.quantize(x[..., :32], "nvfp4"))


@pytest.mark.parametrize("shape", [(0, 4, 64), (2, 0, 64), (0, 0, 64)])
def test_experts(shape: tuple[int, ...]) -> None:
    for method in (None, "optimal"):
        q = hb.quantize(np.zeros(shape, np.float32), "nvfp4", "modelopt", method, scaling="expert")
        assert (q.shape, np.asarray(q.stored_scale).shape) == (shape, shape[:1])
        assert np.asarray(q.dequantize()).shape == shape
