"""The table of contracts: every entry is complete, documented and compared by value."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte import FORMATS, UnknownNameError, UnsupportedError, contracts
from halfbyte.contracts import CONTRACTS, Contract, get_contract
from halfbyte.contracts.spec import FourSixRule, NVFP4Rule

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "transformer_engine": [{"nvfp4_use_4over6": True}, {"tile": (16, 16)}, {"columnwise": True, "with_rht": True}],
    "miles": [{"env": {"NVTE_NVFP4_4OVER6": "all"}}],
    "modelopt": [{"mode": mode} for mode in ("max", "four_over_six", "fp8_sweep", "fp8_sweep_kernel")],
    "compressed_tensors": [{"minmax": "fp32"}],
    "torchao": [{"two_level": False}, *({"scaling_mode": mode} for mode in ("even", "ceil", "rceil"))],
    "fouroversix": [{"rule": rule} for rule in ("static_4", "mae", "mse", "abs_max")],
    "flashinfer": [{"mode": "te"}, {"mode": "4over6"}, {"mode": "4over6", "per_token": True}, {"ue8m0": True}],
    "vllm": [{"global_scale": 3.0}],
}

ALL = [(name, options) for name in CONTRACTS for options in [{}, *VARIANTS.get(name, [])]]
IDS = [f"{name}-{options}" for name, options in ALL]


def functions(rule: object, path: str = "") -> Iterator[tuple[str, Callable[..., object]]]:
    """Every function in the slots of a rule, also of its 4over6 rule and its search rule."""
    assert dataclasses.is_dataclass(rule)
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if isinstance(value, FourSixRule | NVFP4Rule):
            yield from functions(value, f"{path}{field.name}.")
        elif callable(value) and not dataclasses.is_dataclass(value):
            yield f"{path}{field.name}", value


@pytest.mark.parametrize("name", CONTRACTS)
def test_name_is_the_key(name: str) -> None:
    contract = CONTRACTS[name]()
    assert contract.name == CONTRACTS[name].__name__ == name
    assert getattr(contracts, name) is CONTRACTS[name]


@pytest.mark.parametrize(("name", "options"), ALL, ids=IDS)
def test_every_contract_is_complete(name: str, options: dict[str, Any]) -> None:
    contract = CONTRACTS[name](**options)
    assert contract.name == name
    assert any(character.isdigit() for character in contract.source), "a source names a version or a date"
    assert contract.rules
    assert set(contract.rules) <= set(FORMATS)
    assert contract.ragged in ("pad", "refuse")


@pytest.mark.parametrize(("name", "options"), ALL, ids=IDS)
def test_every_function_of_a_rule_opens_with_its_formula(name: str, options: dict[str, Any]) -> None:
    """docs/contracts.md is generated from these lines."""
    for format, rule in CONTRACTS[name](**options).rules.items():
        found = dict(functions(rule))
        assert found, f"{format} has no function at all"
        for slot, function in found.items():
            plain = function.func if isinstance(function, functools.partial) else function
            formula = (inspect.getdoc(plain) or "").split("\n")[0]
            assert formula, f"{name} {format}: {slot} has no formula"
            assert len(formula) <= 110, f"{name} {format}: {slot} is no one-line formula"


@pytest.mark.parametrize(("name", "options"), ALL, ids=IDS)
def test_contracts_are_compared_by_value(name: str, options: dict[str, Any]) -> None:
    assert CONTRACTS[name](**options) == CONTRACTS[name](**options)
    if options:
        assert CONTRACTS[name](**options) != CONTRACTS[name]()  # the options differ, so does the contract
    assert isinstance(hash(CONTRACTS[name](**options)), int)


@pytest.mark.parametrize("name", CONTRACTS)
def test_contract_functions_take_options_by_keyword_only(name: str) -> None:
    parameters = inspect.signature(CONTRACTS[name]).parameters.values()
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)
    assert CONTRACTS[name].__doc__


def test_every_format_has_a_default_contract_that_serves_it() -> None:
    found = {name: get_contract(None, format).name for name, format in FORMATS.items()}
    assert found == {"nvfp4": "transformer_engine", "mxfp4": "ocp", "mxfp8": "ocp"}
    for format in FORMATS.values():
        assert format.name in get_contract(None, format).rules


def test_get_contract() -> None:
    format = FORMATS["nvfp4"]
    given = contracts.torchao(two_level=False)
    assert get_contract(given, format) is given
    assert get_contract("torchao", format) == contracts.torchao()
    with pytest.raises(
        UnknownNameError, match=r"unknown contract 'nvidia'; known: compressed_tensors, flashinfer, .*vllm$"
    ):
        get_contract("nvidia", format)


def test_rule_of_a_format_that_is_missing() -> None:
    with pytest.raises(UnsupportedError, match="contract ocp has no nvfp4; it has mxfp4, mxfp8"):
        contracts.ocp().rule(FORMATS["nvfp4"])


def test_contracts_are_frozen() -> None:
    contract: Contract = contracts.ocp()
    with pytest.raises(AttributeError):
        contract.ragged = "refuse"  # type: ignore[misc]


def test_the_issue_s_peers_are_all_there() -> None:
    training = "transformer_engine modelopt compressed_tensors torchao fouroversix qwantize"
    serving = "flashinfer vllm miles gguf transformers"
    assert set(CONTRACTS) >= {*training.split(), *serving.split(), "ocp"}


def test_which_contracts_scale_by_row() -> None:
    x = np.ones((4, 32), np.float32)
    taken = set()
    for name in CONTRACTS:
        with contextlib.suppress(hb.UnsupportedError):
            hb.quantize(x, "nvfp4", name, scaling="row")
            taken.add(name)
    assert taken == {"transformer_engine"}
