"""What cast refuses, and that each message names the tensor, the rule and the way out."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.casting.api import TARGETS
from halfbyte.testing import assert_same_bits
from tests.casting.sources import random_source, source
from tests.samples import gaussian


@pytest.fixture
def q() -> hb.QuantizedTensor:
    tensor: hb.QuantizedTensor = random_source(np.random.default_rng(0), 20)
    return tensor


def test_nan_scale_is_refused_by_name(q: hb.QuantizedTensor) -> None:
    scales = np.asarray(q.scales).copy()
    scales[3, 1] = 255
    broken = hb.QuantizedTensor(q.format, q.shape, q.codes, scales, None, None, q.contract)
    with pytest.raises(hb.InputError, match=r"layers\.0\.w1 of shape \(8, 128\): 1 of 32 E8M0 scale bytes are 255"):
        hb.cast(broken, "nvfp4", name="layers.0.w1")
    with pytest.raises(hb.InputError, match="row 3, block 1"):
        hb.cast(broken, "nvfp4", contract=hb.contracts.modelopt(mode="quantize_mxfp4_to_nvfp4_lossless"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "magic"}, "unknown algorithm 'magic'; known: hybrid, optimal, requantize, verbatim"),
        ({"algorithm": "verbatim", "m": "left"}, "unknown m 'left'; known: midpoint, search"),
        ({"m": "search"}, "only algorithm='verbatim' takes m"),
        ({"share": "row"}, "unknown share 'row'; known: expert, tensor"),
        ({"share": "expert"}, r"share='expert' needs a stack .* shape \(8, 128\); use share='tensor'"),
        ({"contract": "qwantize"}, "stores no NVFP4 global scale"),
        ({"contract": "ocp"}, "contract ocp has no nvfp4"),
        ({"contract": "nobody"}, "unknown contract 'nobody'"),
    ],
)
def test_options(q: hb.QuantizedTensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(hb.HalfbyteError, match=message):
        hb.cast(q, "nvfp4", **options)


def test_targets(q: hb.QuantizedTensor) -> None:
    with pytest.raises(hb.UnknownNameError, match="unknown target of a cast 'int4'; known: bf16"):
        hb.cast(q, "int4")
    with pytest.raises(hb.UnsupportedError, match="no cast from mxfp4 to mxfp4; it takes nvfp4"):
        hb.cast(q, "mxfp4")
    with pytest.raises(hb.UnsupportedError, match="no cast from mxfp8 to nvfp4; it takes mxfp4"):
        hb.cast(hb.quantize(gaussian(2, 32), "mxfp8"), "nvfp4")
    with pytest.raises(hb.UnsupportedError, match="has no algorithm to choose"):
        hb.cast(q, "bfloat16", algorithm="optimal")
    with pytest.raises(hb.UnsupportedError, match="no global scale to share"):
        hb.cast([q, q], TARGETS["bf16"])
    with pytest.raises(hb.UnsupportedError, match="blocks of 16, not 32"):
        hb.cast(q, hb.get_format("nvfp4", block=32))


def test_lists(q: hb.QuantizedTensor) -> None:
    with pytest.raises(hb.InputError, match="a list of them that is not empty"):
        hb.cast([], "nvfp4")
    stacks = [source(np.zeros((n, 2, 1)), np.ones((n, 2, 32))) for n in (2, 3)]
    with pytest.raises(hb.InputError, match="the same number of experts, not 2 and 3"):
        hb.cast(stacks, "nvfp4", share="expert")


def test_a_contract_that_cannot_hold_the_scale() -> None:
    """compressed-tensors stores 1/g, which is 2^135 for the smallest blocks."""
    tiny = source(np.full((1, 1), -127), np.full((1, 32), 7))
    with pytest.raises(
        hb.UnsupportedError, match=r"float32 cannot hold for a global scale of .* stores the multiplier"
    ):
        hb.cast(tiny, "nvfp4", contract="compressed_tensors")


def test_nvfp4_with_nan_scales_does_not_go_to_mxfp4() -> None:
    q = hb.quantize(np.zeros((1, 32), np.float32), "nvfp4", "modelopt")
    with pytest.raises(hb.InputError, match=r"w of shape \(1, 32\) decodes to NaN or Inf near row 0"):
        hb.cast(q, "mxfp4", name="w")
    with pytest.raises(hb.UnknownNameError, match="algorithm of nvfp4 to mxfp4 'hybrid'; known: optimal, requantize"):
        hb.cast(hb.quantize(gaussian(1, 32), "nvfp4"), "mxfp4", algorithm="hybrid")


def test_a_peer_cast_has_no_other_algorithm(q: hb.QuantizedTensor) -> None:
    contract = hb.contracts.modelopt(mode="quantize_mxfp4_to_nvfp4")
    with pytest.raises(hb.UnsupportedError, match="is a cast itself; leave algorithm out"):
        hb.cast(q, "nvfp4", algorithm="optimal", contract=contract)
    with pytest.raises(hb.UnsupportedError, match="k_max belongs to the mode"):
        hb.contracts.modelopt(k_max=3)


# --- out ---


@pytest.mark.parametrize("spread", [3, 25])
@pytest.mark.parametrize("algorithm", ["optimal", "hybrid", "verbatim", "requantize"])
def test_out_is_overwritten_with_the_same_bytes(spread: int, algorithm: str) -> None:
    q = random_source(np.random.default_rng(1), spread)
    wanted, report = hb.cast(q, "nvfp4", algorithm=algorithm)
    out = hb.quantize(gaussian(8, 128), "nvfp4")
    result, same = hb.cast(q, "nvfp4", algorithm=algorithm, out=out)
    assert result.codes is out.codes
    assert result.scales is out.scales
    assert_same_bits(result.codes, wanted.codes)
    assert_same_bits(result.scales, wanted.scales)
    assert_same_bits(hb.dequantize(result), hb.dequantize(wanted))
    assert same == report


def test_out_for_a_stack_of_experts() -> None:
    q = random_source(np.random.default_rng(2), 30, (3, 4, 64))
    wanted, _ = hb.cast(q, "nvfp4", share="expert")
    out = hb.quantize(gaussian(3, 4, 64), "nvfp4")
    result, _ = hb.cast(q, "nvfp4", share="expert", out=out)
    assert result.codes is out.codes
    assert_same_bits(hb.dequantize(result), hb.dequantize(wanted))


def test_out_that_does_not_fit_is_refused(q: hb.QuantizedTensor) -> None:
    with pytest.raises(
        hb.InputError, match=r"out holds nvfp4 of shape \(8, 64\), but the result is nvfp4 of \(8, 128\)"
    ):
        hb.cast(q, "nvfp4", out=hb.quantize(gaussian(8, 64), "nvfp4"))
    with pytest.raises(hb.InputError, match="out holds mxfp4"):
        hb.cast(q, "nvfp4", out=hb.quantize(gaussian(8, 128), "mxfp4"))
    out = hb.quantize(gaussian(8, 128), "nvfp4")
    with pytest.raises(hb.InputError, match="out takes one tensor, not a list of 2"):
        hb.cast([q, q], "nvfp4", out=out)
    overlapping = dataclasses.replace(out, codes=q.codes)
    with pytest.raises(hb.InputError, match="out overlaps the source"):
        hb.cast(q, "nvfp4", out=overlapping)
    frozen = np.asarray(out.scales).copy()
    frozen.flags.writeable = False
    with pytest.raises(hb.InputError, match="contiguous, writable"):
        hb.cast(q, "nvfp4", out=dataclasses.replace(out, scales=frozen))
    with pytest.raises(hb.UnsupportedError, match="a cast to bfloat16 takes no out"):
        hb.cast(q, "bfloat16", out=out)
