"""hb.error: against sums by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte.testing import assert_same_bits
from tests.samples import gaussian


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("width", [64, 72])
def test_sums(format: str, width: int) -> None:
    x = gaussian(5, width)
    q = hb.quantize(x, format, "torchao" if width == 64 else None, method="amax")
    found = hb.error(q, x)
    difference = hb.dequantize(q).astype(np.float64) - x  # type: ignore[union-attr]
    block = q.format.block
    by_hand = np.array(
        [[float(np.square(row[at : at + block]).sum()) for at in range(0, width, block)] for row in difference]
    )
    np.testing.assert_allclose(found.block_squared, by_hand, rtol=1e-14)
    assert found.block_squared.shape == q.scales.shape
    assert math.isclose(found.relative, np.linalg.norm(difference) / np.linalg.norm(x.astype(np.float64)))
    assert math.isclose(found.snr_db, -20 * math.log10(found.relative))
    assert found.largest == np.abs(difference).max()
    assert found.worst_block == np.unravel_index(np.asarray(found.block_squared).argmax(), by_hand.shape)
    assert found.worst_block_squared == np.asarray(found.block_squared).max()
    of_torch = hb.error(q.to("cpu"), torch.from_numpy(x))
    assert isinstance(of_torch.block_squared, torch.Tensor)
    np.testing.assert_allclose(of_torch.block_squared.numpy(), by_hand, rtol=1e-14)
    assert of_torch.worst_block == found.worst_block


def test_corners() -> None:
    zero = hb.quantize(torch.zeros(2, 32), "mxfp4")
    found = hb.error(zero, torch.zeros(2, 32))
    assert (found.relative, found.snr_db, found.squared) == (0.0, math.inf, 0.0)
    ones = hb.quantize(torch.ones(2, 32), "mxfp4")
    assert hb.error(ones, torch.zeros(2, 32)).relative == math.inf
    broken = torch.ones(2, 32)
    broken[1, 3] = math.nan
    assert math.isnan(hb.error(ones, broken).relative)
    assert hb.error(ones, broken).worst_block == (1, 0)
    empty = hb.error(hb.quantize(torch.zeros(0, 32), "mxfp4"), torch.zeros(0, 32))
    assert (empty.relative, empty.worst_block) == (0.0, ())
    assert "relative=0, snr_db=inf" in repr(found)


def test_float8_is_widened_not_read_as_bytes() -> None:
    x = torch.from_numpy(gaussian(4, 32)).to(torch.float8_e4m3fn)
    q = hb.quantize(x.float(), "nvfp4")
    wanted = hb.error(q, x.double()).squared
    assert hb.error(q, x).squared == wanted
    assert math.isclose(hb.error(q.to("numpy"), x).squared, wanted, rel_tol=1e-14)
    assert math.isclose(hb.error(q.to("numpy"), x.double().numpy()).squared, wanted, rel_tol=1e-14)


@pytest.mark.parametrize(
    ("q", "x", "message"),
    [
        (hb.quantize(np.ones((2, 32), np.float32), "mxfp4"), np.ones((2, 16), np.float32), r"x has shape \(2, 16\)"),
        (
            hb.quantize(np.ones((1, 32), np.float32), "mxfp4"),
            np.full((1, 32), "a"),
            "x of dtype <U1 holds no numbers to compare with: could not convert",
        ),
        (np.ones(3), np.ones(3), "takes a QuantizedTensor and a tensor, not ndarray first"),
    ],
)
def test_errors(q: Any, x: Any, message: str) -> None:
    with pytest.raises(hb.InputError, match=message):
        hb.error(q, x)


def test_a_search_agrees() -> None:
    """The tensor scale that the search reports as better has the error that error() measures."""
    x = torch.from_numpy(gaussian(16, 64))
    found = hb.search_global_scale(x, method="optimal")
    assert math.isclose(hb.error(found.quantized, x).squared, found.squared_error, rel_tol=1e-12)
    assert isinstance(found.quantized.codes, torch.Tensor)
    assert_same_bits(
        hb.quantize(x, "nvfp4", method="optimal", global_amax=found.global_amax).codes, found.quantized.codes
    )
