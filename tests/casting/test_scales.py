"""Global scales under every contract that stores one: exact words, limits of float32, and whole messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.casting import scales
from halfbyte.casting.scales import GlobalScale, hold, nvfp4_rule, power, result_contract, scale_of
from halfbyte.formats import E2M1, E4M3
from halfbyte.testing import assert_same_bits
from tests.casting.sources import random_source

TORCHAO, MODELOPT = hb.contracts.torchao(), hb.contracts.modelopt()
TE, CT = hb.contracts.transformer_engine(), hb.contracts.compressed_tensors()
F = np.float32


@pytest.mark.parametrize(
    ("value", "m"), [(1.0, 0), (2.0**-8, -8), (2.0**-149, -149), (2.0**127, 127), (3.0, None), (1 + 2.0**-23, None)]
)
def test_the_exponent_of_a_power_of_two(value: float, m: int | None) -> None:
    assert GlobalScale(F(value), F(value), TORCHAO).exponent == m


def test_how_contracts_store_a_scale() -> None:
    """The multiplier, 2688 times it, or its reciprocal."""
    for contract, stored in ((TORCHAO, 0.25), (MODELOPT, 0.25), (TE, 672.0), (CT, 4.0)):
        scale = hold(0.25, contract)
        assert (scale.multiplier, scale.stored, scale.contract) == (F(0.25), F(stored), contract)
        assert (type(scale.multiplier), type(scale.stored)) == (F, F)
        assert power(-2, contract) == scale
    third = hold(1 / 3, CT)
    assert third.stored == F(1) / F(1 / 3)
    assert third.multiplier == F(1) / third.stored


def test_what_a_scale_decodes() -> None:
    decoded = hold(0.1, TORCHAO).decoded()
    assert decoded.shape == (126, 8)
    wanted = E2M1.magnitudes[None] * (E4M3.magnitudes[1:, None] * F(0.1))
    assert_same_bits(decoded, wanted.astype(np.float64))


@pytest.mark.parametrize(
    ("contract", "good", "bad"),
    [
        (TORCHAO, [2.0**-149, 2.0**127], [0.0, -1.0, np.inf, np.nan, 2.0**128, 2.0**-151]),
        (CT, [2.0**-127, 2.0**126], [2.0**-129, np.inf]),
        (TE, [2.0**-149, 2.0**116], [2.0**117]),
    ],
)
def test_what_float32_can_hold(contract: Any, good: list[float], bad: list[float]) -> None:
    for value in good:
        assert hold(value, contract).multiplier == value
    stores = {"torchao": "multiplier", "compressed_tensors": "encode factor", "transformer_engine": "amax"}
    for value in bad:
        with np.errstate(all="ignore"), pytest.raises(hb.UnsupportedError) as caught:
            hold(value, contract)
        with np.errstate(over="ignore"):
            said = f"{float(F(value)):g}"
        assert str(caught.value) == (
            f"contract {contract.name} stores the {stores[contract.name]}, which float32 cannot hold for a global "
            f"scale of {said}; choose a contract that stores the multiplier (modelopt, torchao)"
        )


def test_contracts_that_hold_no_cast() -> None:
    qwantize = hb.contracts.qwantize()
    with pytest.raises(hb.UnsupportedError) as caught:
        nvfp4_rule(qwantize)
    assert str(caught.value) == (
        f"contract {qwantize} stores no NVFP4 global scale, so it cannot hold a cast tensor; use one that does, such "
        "as modelopt, torchao, compressed_tensors or transformer_engine"
    )
    rule: Any = TORCHAO.rules["nvfp4"]
    constant = replace(TORCHAO, rules={"nvfp4": replace(rule, constant_factor=1.0)})
    with pytest.raises(hb.UnsupportedError, match="stores no NVFP4 global scale"):
        nvfp4_rule(constant)
    other = replace(TORCHAO, rules={"nvfp4": replace(rule, stored_as="amax")})
    with pytest.raises(hb.UnsupportedError) as caught:
        nvfp4_rule(other)
    assert str(caught.value) == (
        f"contract {other} decodes NVFP4 by a formula of its own, so a cast cannot know which values it keeps; use a "
        "contract of halfbyte, or cast to bfloat16 and quantize the result"
    )
    assert nvfp4_rule(TORCHAO) is TORCHAO.rules["nvfp4"]


def test_the_contract_of_a_result_reads_zeros_as_the_source_does() -> None:
    q = random_source(np.random.default_rng(0), 3)
    assert result_contract(None, q).name == "torchao"
    assert result_contract(None, replace(q, contract=hb.contracts.gguf())).name == "modelopt"
    assert result_contract("compressed_tensors", q) == CT
    assert result_contract(TE, q) is TE


def test_a_quantizers_scale_under_another_contract() -> None:
    x = np.linspace(-3, 3, 64, dtype=np.float32).reshape(2, 32)
    for contract in (MODELOPT, TE, CT):
        q = hb.quantize(x, "nvfp4", contract)
        own = scale_of(q, contract)
        assert_same_bits(np.asarray(own.multiplier), np.asarray(q.global_scale).reshape(()))
        assert_same_bits(np.asarray(own.stored), np.asarray(q.stored_scale).reshape(()))
        under = scale_of(q, TORCHAO)
        assert under == hold(F(np.asarray(q.global_scale).reshape(())), TORCHAO)
        assert under.contract is TORCHAO
    zero = scale_of(hb.quantize(np.zeros((1, 32), np.float32), "nvfp4", MODELOPT), TORCHAO)
    assert zero == GlobalScale(F(0), F(0), TORCHAO)
    rows = hb.quantize(x, "nvfp4", hb.contracts.transformer_engine(row_scaled_nvfp4=True))
    with pytest.raises(hb.UnsupportedError) as caught:
        scale_of(rows, TORCHAO)
    assert str(caught.value) == f"contract {rows.contract} gives every row a global scale; a cast tensor has one"


@pytest.mark.parametrize("factor", [0.0, -1.0, np.inf, np.nan])
def test_a_multiplier_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """An invented contract, whose stored word gives another multiplier than the one that was wanted."""

    def broken(stored: Any, top: Any) -> Any:
        return stored * F(factor)

    rule: Any = TORCHAO.rules["nvfp4"]
    invented = replace(TORCHAO, rules={"nvfp4": replace(rule, multiplier=broken)})
    monkeypatch.setattr(scales, "DECODES", [*scales.DECODES, (rule.stored_as, broken, rule.decode)])
    with pytest.raises(
        hb.UnsupportedError, match="stores the multiplier, which float32 cannot hold for a global scale of 2;"
    ):
        hold(2.0, invented)
