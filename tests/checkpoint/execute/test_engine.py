"""The engine: chunks give the bits of the whole."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import halfbyte as hb
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.contracts import get_contract
from halfbyte.errors import CheckpointError, UnsupportedError
from halfbyte.testing import assert_same_bits
from tests.checkpoint.toy import random

NVFP4 = hb.get_format("nvfp4")


def make(contract: str = "modelopt", method: str = "amax") -> Engine:
    return Engine(NVFP4, get_contract(contract, NVFP4), method, repairs=contract == "modelopt")


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("method", ["amax", "four_six", "optimal"])
def test_chunks_give_the_bits_of_the_whole(dtype: npt.DTypeLike, method: str) -> None:
    x = random(0, 50, 64, dtype=dtype)
    found = make(method=method)
    amax = max(found.amax(x[start : start + 7]) for start in range(0, 50, 7))
    assert amax == np.abs(x.astype(np.float32)).max()
    q = hb.quantize(x, "nvfp4", "modelopt", method, global_amax=amax)
    codes, scales = np.zeros((50, 32), np.uint8), np.zeros((50, 4), np.uint8)
    for start in range(0, 50, 7):
        found.quantize(x[start : start + 7], amax, codes[start : start + 7], scales[start : start + 7])
    assert_same_bits(codes, q.codes)
    assert_same_bits(scales, q.scales)


def test_nan_and_inf_reach_the_amax() -> None:
    x = random(0, 4, 64)
    x[1, 3] = np.inf
    assert make().amax(x) == np.inf
    x[2, 5] = np.nan
    assert np.isnan(make().amax(x))


def test_strided_chunks_have_an_amax_too() -> None:
    x = random(0, 8, 64)
    assert make().amax(x[:, ::2]) == np.abs(x[:, ::2].astype(np.float32)).max()


@pytest.mark.parametrize(
    ("amax", "usable"), [(0.0, 2688.0), (1e-40, 2688 * 2.0**-126), (3.0, 3.0), (3e38, 3e38), (1e-30, 1e-30), (1.0, 1.0)]
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


def test_decoding_has_no_scales() -> None:
    plain = Engine(None, None, None, repairs=False)
    x = random(0, 4, 64)
    assert plain.amax(x) == np.abs(x.astype(np.float32)).max()
    with pytest.raises(UnsupportedError):
        plain.quantize(x, None, np.zeros((4, 32), np.uint8), np.zeros((4, 4), np.uint8))
    with pytest.raises(UnsupportedError):
        plain.tensor_scales(np.float32(1), np.float32)


def test_widths_of_codes_and_scales() -> None:
    assert make().widths(64) == (32, 4)
    assert Engine(hb.get_format("mxfp4"), get_contract("ocp", hb.get_format("mxfp4")), None, False).widths(64) == (
        32,
        2,
    )


def test_what_decoding_does_not_have() -> None:
    """Each question names what is missing."""
    plain, x = Engine(None, None, None, repairs=False), random(0, 4, 64)
    no_format = "this conversion decodes; it has no format to quantize to"
    no_scale = "this conversion decodes; it has no tensor scale"
    one = np.float32(1)
    for call, message in (
        (lambda: plain.widths(64), no_format),
        (lambda: plain.quantize(x, None, np.zeros((4, 32), np.uint8), np.zeros((4, 4), np.uint8)), no_format),
        (lambda: plain.tensor_scales(one, np.float32), no_scale),
    ):
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert str(caught.value) == message
    ocp = Engine(hb.get_format("mxfp4"), get_contract("ocp", hb.get_format("mxfp4")), None, False)
    with pytest.raises(UnsupportedError) as caught:
        ocp.tensor_scales(one, np.float32)
    assert str(caught.value) == "ocp() stores no tensor scale"


@pytest.mark.parametrize("amax", [0.0, 1e-30, 3.0, 3e38])
@pytest.mark.parametrize("contract", ["modelopt", "torchao", "miles", "compressed_tensors", "fouroversix"])
def test_tensor_scales_are_those_of_quantize(contract: str, amax: float) -> None:
    """As the contract stores one; the other direction is its reciprocal."""
    x = np.zeros((1, 16), np.float32)
    q = hb.quantize(x, "nvfp4", contract, "amax", global_amax=amax)
    assert q.global_scale is not None
    assert q.stored_scale is not None
    found = make(contract).tensor_scales(np.float32(amax), np.float32)
    assert_same_bits(np.asarray(found.multiplier), np.asarray(q.global_scale, np.float32))
    if contract == "compressed_tensors":
        assert_same_bits(np.asarray(found.divisor), np.asarray(q.stored_scale, np.float32))
    else:
        with np.errstate(all="ignore"):
            assert_same_bits(np.asarray(found.divisor), np.asarray(np.float32(1) / found.multiplier))
