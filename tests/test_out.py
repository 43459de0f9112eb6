"""quantize(out=…): the same bits in memory that was there before, and nothing written where it does not fit."""

from __future__ import annotations

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
