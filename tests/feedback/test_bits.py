"""The compiled kernel against the reference, bit for bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.contracts import CONTRACTS, Contract, DecodeRule
from halfbyte.errors import HalfbyteError
from halfbyte.feedback import prepare
from halfbyte.testing import assert_same_bits
from tests.feedback.problems import Layer, layer

FORMATS = ("nvfp4", "mxfp4")


def served() -> list[tuple[str, str]]:
    """(format, contract) for every contract that quantizes a format in plain blocks."""
    found = []
    for format, (name, make) in product(FORMATS, CONTRACTS.items()):
        contract = make()
        rule = contract.rules.get(format)
        if rule is None or isinstance(rule, DecodeRule) or contract.transform.hadamard or contract.transform.columnwise:
            continue
        found.append((format, name))
    return found


def both(given: Layer, format: str, contract: str | Contract | None, **options: Any) -> None:
    """Solve by both backends and compare."""
    moments = given.second_moment
    slow = hb.gptq(given.weight, moments, format, contract, backend="reference", **options)
    fast = hb.gptq(given.weight, moments, format, contract, backend="cpu", **options)
    assert_same_bits(fast.codes, slow.codes)
    assert_same_bits(fast.scales, slow.scales)
    for part in ("global_scale", "stored_scale"):
        if getattr(slow, part) is not None:
            assert_same_bits(getattr(fast, part), getattr(slow, part))
    assert fast.method == slow.method


@pytest.mark.parametrize(("format", "contract"), served())
def test_every_contract(format: str, contract: str) -> None:
    given = layer(rows=37, width=96)
    both(given, format, contract, descent=1)


@pytest.mark.parametrize("format", FORMATS)
def test_a_contract_with_its_own_search_takes_the_reference(format: str) -> None:
    given, contract = layer(rows=5, width=32), hb.contracts.qwantize(mode=f"{format}/optimal_hessian")
    with pytest.raises(HalfbyteError, match="scale search of its own"):
        hb.gptq(given.weight, given.second_moment, format, contract, backend="cpu")
    auto = hb.gptq(given.weight, given.second_moment, format, contract)
    slow = hb.gptq(given.weight, given.second_moment, format, contract, backend="reference")
    assert_same_bits(auto.codes, slow.codes)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 65, 130])
def test_numbers_of_rows(format: str, rows: int) -> None:
    both(layer(rows=rows, width=64), format, None)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("width", [32, 96, 224])
@pytest.mark.parametrize("order", ["falling", "given"])
def test_widths_and_orders(format: str, width: int, order: str) -> None:
    both(layer(rows=20, width=width), format, None, order=order, damping=0.01)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("descent", [0, 2])
def test_cross_moments_and_descent(format: str, descent: int) -> None:
    given = layer(rows=30, width=96)
    both(given, format, None, cross_moment=given.cross_moment, asymmetry=0.75, descent=descent)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dead", [1, 5, 32, 64])
def test_dead_inputs(format: str, dead: int) -> None:
    both(layer(rows=20, width=64, dead=dead), format, None)


def test_row_scaling() -> None:
    both(layer(rows=70, width=64), "nvfp4", hb.contracts.transformer_engine(row_scaled_nvfp4=True))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_zeros_and_single_large_numbers(format: str) -> None:
    given = layer(rows=20, width=64)
    given.weight[3] = 0
    given.weight[5, :32] = 0
    given.weight[7, 9] = 40
    given.weight[8, 10] = -1e-30
    both(given, format, None)
    both(given, format, "torchao")


@pytest.mark.parametrize("amax", [1e-38, 1e-20, 1e-3, 1e3, 1e25])
def test_an_amax_far_from_the_weights(amax: float) -> None:
    """A few of these are beyond the range of the kernel, which leaves rows or the tensor to the reference."""
    both(layer(rows=9, width=64), "nvfp4", None, global_amax=amax)


@pytest.mark.parametrize("scale", [1e-38, 1e-44, 1e30, 1e36])
def test_mx_at_the_ends_of_the_range(scale: float) -> None:
    given = layer(rows=9, width=64)
    with np.errstate(over="ignore"):
        both(given._replace(weight=(given.weight * np.float32(scale)).astype(np.float32)), "mxfp4", None)


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_instruction_set(format: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", isa)
    given = layer(rows=50, width=96)
    try:
        hb.quantize(given.weight, "nvfp4", backend="cpu")
    except HalfbyteError:
        return  # this machine does not have it
    both(given, format, None, cross_moment=given.cross_moment, descent=1)


@pytest.mark.parametrize("format", FORMATS)
def test_any_cut_into_rows_and_any_number_of_threads(format: str) -> None:
    given = layer(rows=300, width=256)
    factor = prepare(given.second_moment, hb.get_format(format).block)
    amax = float(np.abs(given.weight).max()) if format == "nvfp4" else None
    whole = hb.gptq(given.weight, factor, format, global_amax=amax, threads=1)
    threaded = hb.gptq(given.weight, factor, format, global_amax=amax, threads=3)
    assert_same_bits(threaded.codes, whole.codes)
    for step in (1, 13, 64, 170):
        parts = [
            hb.gptq(given.weight[at : at + step], factor, format, global_amax=amax)
            for at in range(0, min(len(given.weight), 3 * step), step)
        ]
        codes = np.concatenate([np.asarray(part.codes) for part in parts])
        scales = np.concatenate([np.asarray(part.scales) for part in parts])
        assert_same_bits(codes, np.asarray(whole.codes)[: len(codes)])
        assert_same_bits(scales, np.asarray(whole.scales)[: len(scales)])
