"""Casts where the tensor lies: the same bytes and report as on the host, and None for what the host has to do.

No card is needed: tensors of the CPU stand in for those of a card, and numpy for the kernel that moves the blocks.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte.casting import device
from halfbyte.casting.window import BIAS, power_table
from halfbyte.testing import assert_same_bits
from tests.casting.sources import random_source, source

Asked = list[int]


def on_torch(q: hb.QuantizedTensor) -> hb.QuantizedTensor:
    codes, scales = (torch.from_numpy(np.array(part)) for part in (q.codes, q.scales))
    return dataclasses.replace(q, codes=codes, scales=scales)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Let every torch tensor count as one on a card; the anchors that the kernel was called with."""
    anchors: Asked = []

    def moved(codes: torch.Tensor, scales: torch.Tensor, anchor: int) -> tuple[torch.Tensor, torch.Tensor, None]:
        anchors.append(anchor)
        return codes.clone(), torch.from_numpy(power_table(anchor - BIAS)[scales.numpy()].repeat(2, axis=-1)), None

    monkeypatch.setattr(device, "choose_backend", lambda *_, **__: SimpleNamespace(takes_tensors=True))
    monkeypatch.setattr(device, "cast_device_blocks", moved)
    return anchors


def assert_same_as_on_the_host(q: hb.QuantizedTensor, **arguments: Any) -> hb.CastReport:
    wanted, report = hb.cast(q, "nvfp4", **arguments)
    assert isinstance(report, hb.CastReport)
    result, same = hb.cast(on_torch(q), "nvfp4", **arguments)
    assert same == report
    for name in ("codes", "scales", "global_scale", "stored_scale"):
        assert_same_bits(np.asarray(getattr(result, name)), np.asarray(getattr(wanted, name)))
    assert (result.shape, result.contract) == (wanted.shape, wanted.contract)
    return report


@pytest.mark.parametrize("algorithm", ["optimal", "hybrid", "verbatim"])
@pytest.mark.parametrize("spread", [0, 5, 17])
@pytest.mark.parametrize("shape", [(8, 128), (3, 64), (2, 4, 96), (1, 64)])
def test_what_fits_one_window_stays_there(asked: Asked, algorithm: str, spread: int, shape: tuple[int, ...]) -> None:
    q = random_source(np.random.default_rng(spread), spread, shape, top=-3)
    report = assert_same_as_on_the_host(q, algorithm=algorithm)
    assert report.m is not None
    assert asked == [BIAS + report.m]


def test_zero_blocks_count_only_if_their_scale_is_outside(asked: Asked) -> None:
    """-0.0 counts as zero. A zero block in the window's reach is kept; beyond it, the host has to snap its scale."""
    codes = np.random.default_rng(0).integers(1, 8, (2, 128))
    codes[0, 32:64], codes[1, :32] = 8, 0
    codes[1, 33:64] = 0  # one element is enough, in either half
    codes[1, 64:95] = 0
    report = assert_same_as_on_the_host(source(np.array([[0, -5, -2, -9], [-1, -17, -3, 0]]), codes))
    assert (report.zero, len(asked)) == (2, 1)
    report = assert_same_as_on_the_host(source(np.array([[0, -25, -2, -9], [1, -4, -3, 0]]), codes))
    assert (report.zero, len(asked)) == (2, 1), "on the host"
    report = assert_same_as_on_the_host(source(np.array([[0, 9, -2, -9], [1, -4, -3, 0]]), codes))
    assert (report.zero, len(asked)) == (2, 1), "on the host too"
    with pytest.raises(hb.InputError, match="row 0, block 1"):
        hb.cast(on_torch(source(np.array([[0, 128, -2, -9], [1, -4, -3, 0]]), codes)), "nvfp4")
    report = assert_same_as_on_the_host(source(np.full((2, 4), 3), np.zeros((2, 128), np.int64)))
    assert report.zero == 8
    assert report.k_min is None
    smallest = source(np.array([[-127, 0]]), np.append(np.full(32, 7), np.zeros(32, np.int64))[None])
    report = assert_same_as_on_the_host(dataclasses.replace(smallest, scales=np.zeros((1, 2), np.uint8)))
    assert (report.k_min, report.k_max, report.zero) == (-127, -127, 1)


@pytest.mark.parametrize("contract", ["modelopt", "compressed_tensors", "torchao"])
def test_contracts_that_read_negative_zero_otherwise(asked: Asked, contract: str) -> None:
    for codes in (np.full((1, 32), 3), np.array([[8, *31 * [3]]])):
        assert_same_as_on_the_host(source(np.array([[2]]), codes), contract=contract)
    assert len(asked) == 2


@pytest.mark.parametrize("top", [114, 116, 120, 124])
def test_values_that_overflow_under_the_contract_are_measured_on_the_host(asked: Asked, top: int) -> None:
    q = random_source(np.random.default_rng(1), 4, (4, 64), top=top)
    kept = {name: assert_same_as_on_the_host(q, contract=name) for name in ("modelopt", "transformer_engine")}
    assert kept["modelopt"].lossless
    assert len(asked) == 1 + kept["transformer_engine"].lossless


def test_what_the_host_has_to_do(asked: Asked) -> None:
    rng = np.random.default_rng(2)
    narrow = random_source(rng, 5, (4, 4, 64))
    for q, arguments in (
        (random_source(rng, 18), {}),
        (narrow, {"algorithm": "requantize"}),
        (narrow, {"share": "expert"}),
        (random_source(rng, 5, (4, 48)), {}),
        (random_source(rng, 5, (4, 33)), {}),
        (random_source(rng, 5, (4, 63)), {}),
        (hb.quantize(rng.standard_normal((4, 64)).astype(np.float32), "mxfp4", block=16), {}),
    ):
        assert_same_as_on_the_host(q, **arguments)
    several = [on_torch(random_source(rng, 5)) for _ in range(2)]
    hb.cast(several, "nvfp4")
    nan = random_source(rng, 5)
    np.asarray(nan.scales)[0, 1] = 255
    with pytest.raises(hb.HalfbyteError, match="NaN"):
        hb.cast(on_torch(nan), "nvfp4")
    assert asked == []


def test_a_stack_could_have_one_scale_per_expert(asked: Asked) -> None:
    report = assert_same_as_on_the_host(random_source(np.random.default_rng(3), 9, (3, 4, 64)))
    assert [(cost.share, cost.scales, cost.exact_blocks) for cost in report.costs] == [
        ("tensor", 1, 24),
        ("expert", 3, 24),
    ]
    assert len(asked) == 1
