"""Every option of the public calls with values of other types: it works, or halfbyte says what is wrong."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte.contracts import CONTRACTS
from halfbyte.errors import HalfbyteError

WRONG: tuple[Any, ...] = (
    np.zeros(3), np.array(3), np.array(["a", "b"]), torch.zeros(3), torch.tensor(2), [1, 2], [], (1, 2), {}, {"a": 1},
    {1: np.zeros(2)}, {1}, "x", "", b"x", True, None, float("nan"), float("inf"), -float("inf"), 10**30, 10**400, 2**63,
    -1, 0, 1.5, 1j, int, np.float32(2), np.int64(2), np.bool_(True), range(3),
)  # fmt: skip
X = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
Q, M = hb.quantize(X, "nvfp4"), hb.quantize(X, "mxfp4")
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "quantize": (hb.quantize, (X, "nvfp4")),
    "dequantize": (hb.dequantize, (Q,)),
    "cast": (hb.cast, (M, "nvfp4")),
    "gptq": (hb.gptq, (X, np.eye(64, dtype=np.float32), "nvfp4")),
    "error": (hb.error, (Q, X)),
    "fake_quant": (hb.fake_quant, (torch.from_numpy(X), "nvfp4")),
    "search_global_scale": (hb.search_global_scale, (X,)),
    "hessian_from_activations": (hb.hessian_from_activations, (X,)),
    "get_format": (hb.get_format, ("nvfp4",)),
    "to": (Q.to, ("cpu",)),
}
METHODS: dict[type, Mapping[str, Any]] = {
    hb.FourSix: {}, hb.Sweep: {}, hb.Optimal: {}, hb.Gptq: {}, hb.Hessian: {"h": np.eye(16)[None]},
}  # fmt: skip


def works_or_says_why(call: Callable[[], object]) -> None:
    """Any other error is one of Python, numpy or torch, and fails the test."""
    with suppress(HalfbyteError):
        call()


@pytest.mark.parametrize("name", CALLS)
def test_arguments(name: str) -> None:
    function, given = CALLS[name]
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    for position, parameter in enumerate(names):
        for value in WRONG:
            arguments, named = list(given), {}
            if position < len(arguments):
                arguments[position] = value
            else:
                named[parameter] = value
            works_or_says_why(lambda: function(*arguments, **named))  # noqa: B023


@pytest.mark.parametrize("name", CONTRACTS)
def test_contracts(name: str) -> None:
    make = CONTRACTS[name]
    for option in getattr(make, "__kwdefaults__", None) or {}:
        for value in WRONG:
            works_or_says_why(lambda: repr(make(**{option: value})))  # noqa: B023


@pytest.mark.parametrize("method", METHODS)
def test_methods(method: Any) -> None:
    for option in dataclasses.fields(method):
        for value in WRONG:

            def used() -> object:
                made = method(**{**METHODS[method], option.name: value})  # noqa: B023
                return hash(made), made.spelling, repr(made)

            works_or_says_why(used)


def test_what_is_said_of_arrays_and_of_huge_counts() -> None:
    three: Any = np.zeros(3)
    wrong: dict[str, Callable[[], object]] = {
        "scaling_mode of torchao takes a single value, not an array of shape (3,)": lambda: hb.contracts.torchao(
            scaling_mode=three
        ),
        "error of FourSix takes a single value, not an array of shape (3,)": lambda: hb.FourSix(three),
        "descent is a number of sweeps, from 0 to 10,000, not 4294967298": lambda: hb.Gptq(descent=2**32 + 2),
        "steps must be a whole number from 1 to 65,536, not 70000": lambda: hb.search_global_scale(X, steps=70_000),
    }
    for text, call in wrong.items():
        with pytest.raises(hb.InputError) as caught:
            call()
        assert str(caught.value) == text
