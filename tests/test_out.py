"""quantize(out=…): the same bits in existing memory, and nothing is written if `out` does not fit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte.testing import assert_same_bits
from tests.samples import gaussian


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("shape", [(4, 64), (2, 3, 48), (5, 40), (32,)])
@pytest.mark.parametrize("method", ["amax", "four_six", "optimal"])
def test_out_is_overwritten_with_the_same_bits(shape: tuple[int, ...], backend: str, method: str) -> None:
    old = hb.quantize(gaussian(*shape, seed=1), "nvfp4")
    codes, scales = old.codes, old.scales
    x = gaussian(*shape, seed=2)
    q = hb.quantize(x, "nvfp4", method=method, backend=backend, out=old)
    fresh = hb.quantize(x, "nvfp4", method=method, backend=backend)
    assert q.codes is codes
    assert q.scales is scales
    assert_same_bits(codes, fresh.codes)
    assert_same_bits(scales, fresh.scales)
    assert q.global_scale is not None
    assert fresh.global_scale is not None
    assert_same_bits(q.global_scale, fresh.global_scale)


def test_out_of_torch_tensors() -> None:
    old = hb.quantize(torch.zeros(4, 64), "mxfp4")
    x = torch.from_numpy(gaussian(4, 64))
    q = hb.quantize(x, "mxfp4", out=old)
    assert q.codes is old.codes
    assert_same_bits(old.codes, hb.quantize(x, "mxfp4").codes)


def test_out_that_does_not_fit() -> None:
    x = gaussian(4, 64)
    with pytest.raises(
        hb.InputError, match=r"^out holds nvfp4 of shape \(4, 32\), but the result is nvfp4 of \(4, 64\)$"
    ):
        hb.quantize(x, "nvfp4", out=hb.quantize(gaussian(4, 32), "nvfp4"))
    with pytest.raises(hb.InputError, match=r"^out holds mxfp4"):
        hb.quantize(x, "nvfp4", out=hb.quantize(x, "mxfp4"))
    with pytest.raises(hb.InputError, match="the same kind of arrays as x"):
        hb.quantize(x, "nvfp4", out=hb.quantize(torch.zeros(4, 64), "nvfp4"))


def test_out_that_must_not_be_written() -> None:
    x = gaussian(4, 64)
    old = hb.quantize(x, "nvfp4")
    assert isinstance(old.codes, np.ndarray)
    old.codes.flags.writeable = False
    with pytest.raises(hb.InputError, match="contiguous, writable and on the CPU"):
        hb.quantize(x, "nvfp4", out=old)


def test_out_that_overlaps_the_input() -> None:
    x = gaussian(4, 64)
    raw = x.view(np.uint8).reshape(-1)
    old = hb.quantize(x, "nvfp4")
    overlapping = hb.QuantizedTensor(
        old.format, old.shape, raw[:128].reshape(4, 32), old.scales, old.global_scale, old.stored_scale, old.contract
    )
    with pytest.raises(hb.InputError, match="out overlaps the input"):
        hb.quantize(x, "nvfp4", out=overlapping)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(4, 64), (2, 3, 96)])
def test_values_are_decoded_into_out(shape: tuple[int, ...], dtype: str, format: str, backend: str) -> None:
    q = hb.quantize(gaussian(*shape, seed=3), format)
    fresh = hb.dequantize(q, dtype, backend=backend)
    out = np.full_like(fresh, 7)
    assert hb.dequantize(q, dtype, backend=backend, out=out) is out
    assert_same_bits(out, fresh)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_ragged_rows_are_decoded_into_out(backend: str) -> None:
    q = hb.quantize(gaussian(5, 40, seed=3), "nvfp4")
    out = np.full((5, 40), np.nan, np.float32)
    assert hb.dequantize(q, backend=backend, out=out) is out
    assert_same_bits(out, hb.dequantize(q))


def test_values_are_decoded_into_a_torch_tensor() -> None:
    q = hb.quantize(torch.from_numpy(gaussian(4, 64)), "nvfp4")
    out = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert hb.dequantize(q, "bfloat16", out=out) is out
    assert_same_bits(out, hb.dequantize(q, "bfloat16"))


def test_decoding_into_what_does_not_fit() -> None:
    q = hb.quantize(gaussian(4, 64), "nvfp4")
    with pytest.raises(
        hb.InputError, match=r"out is float32 of shape \(4, 32\), but the result is float32 of \(4, 64\)"
    ):
        hb.dequantize(q, out=np.zeros((4, 32), np.float32))
    with pytest.raises(hb.InputError, match=r"out is float32 of shape .*, but the result is float16"):
        hb.dequantize(q, "float16", out=np.zeros((4, 64), np.float32))
    with pytest.raises(hb.InputError, match="same kind of array"):
        hb.dequantize(q, out=torch.zeros(4, 64))
    with pytest.raises(hb.InputError, match="contiguous"):
        hb.dequantize(q, out=np.zeros((64, 4), np.float32).T)
    memory = np.zeros(4 * 64 * 4, np.uint8)
    inside = dataclasses.replace(q, codes=memory[:128].reshape(4, 32))
    with pytest.raises(hb.InputError, match="overlaps"):
        hb.dequantize(inside, out=memory.view(np.float32).reshape(4, 64))
