"""Readers of the layouts' tensors: against what was quantized."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte.testing import assert_same_bits
from tests.samples import gaussian

X = torch.from_numpy(gaussian(24, 64))


@pytest.mark.parametrize("typed", [False, True])
def test_matrices(typed: bool) -> None:
    q = hb.quantize(X, "nvfp4", "modelopt")
    scales = q.scales_as_float8 if typed else q.scales
    assert hb.layouts.from_modelopt(q.codes, scales, q.stored_scale) == q  # type: ignore[arg-type]
    c = hb.quantize(X, "nvfp4", "compressed_tensors")
    stored: Any = c.stored_scale
    assert hb.layouts.from_compressed_tensors(c.codes, c.scales, stored.reshape(1)) == c
    m = hb.quantize(X, "mxfp4")
    assert hb.layouts.from_compressed_tensors(m.codes, m.scales) == m
    codes: Any = m.codes
    assert hb.layouts.from_deepseek_v4(codes.view(torch.int8), m.scales_as_float8 if typed else m.scales) == m


def test_stacks() -> None:
    x = X.reshape(3, 8, 64)
    q = hb.quantize(x, "nvfp4", "modelopt", scaling="expert")
    codes, scales = q.codes.mT.contiguous(), q.scales.mT.contiguous()  # type: ignore[union-attr]
    assert hb.layouts.from_modelopt(codes, scales, q.stored_scale) == q  # type: ignore[arg-type]
    numpy = hb.layouts.from_modelopt(codes.numpy(), scales.numpy(), q.stored_scale.numpy())  # type: ignore[union-attr]
    assert numpy == q
    m = hb.quantize(x, "mxfp4")
    read = hb.layouts.from_gpt_oss(m.codes.reshape(3, 8, 2, 16), m.scales)
    assert read == m
    assert_same_bits(read.dequantize(), hb.dequantize(m))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: hb.layouts.from_gpt_oss(b(4, 2, 8), b(4, 2)), r"blocks have shape \(4, 2, 8\); gpt-oss stores"),
        (lambda b: hb.layouts.from_gpt_oss(b(4, 2, 16), b(4, 3)), r"needs scales of shape \(4, 2\), got \(4, 3\)"),
        (lambda b: hb.layouts.from_modelopt(b(4), b(4), 1.0), r"codes have shape \(4,\), but modelopt stores"),
        (
            lambda b: hb.layouts.from_modelopt(cast("Any", [1]), b(4), 1.0),
            "codes must be a numpy array or a torch tensor, not list",
        ),
        (lambda b: hb.layouts.from_compressed_tensors(b(4, 16), b(4, 2)), r"needs scales of shape \(4, 1\)"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(hb.InputError, match=message):
        call(lambda *shape: np.zeros(shape, np.uint8))


def test_the_checkpoint_reader_agrees() -> None:
    """gpt-oss' decoder in transformers gives the same values for the same bytes."""
    m = hb.quantize(X, "mxfp4")
    by_contract = hb.QuantizedTensor("mxfp4", m.shape, m.codes, m.scales, contract="transformers")
    assert_same_bits(
        by_contract.dequantize(), hb.layouts.from_gpt_oss(m.codes.reshape(24, 2, 16), m.scales).dequantize()
    )
