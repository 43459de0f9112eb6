"""The headroom of hessian and gptq: the one that Optimal chooses for the weight, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.backends.headroom import SMALL
from halfbyte.errors import InputError
from halfbyte.feedback import prepare
from halfbyte.methods import Method, method_from, parse_method
from halfbyte.testing import assert_same_bits
from tests.backends.test_headroom import CONTRACTS, sample
from tests.feedback.problems import layer

PARTS = ("codes", "scales", "global_scale", "stored_scale")
BY_ROW = hb.contracts.transformer_engine(row_scaled_nvfp4=True)


def moments(width: int, seed: int = 0) -> np.ndarray:
    return layer(seed, rows=1, width=width, tokens=2 * width).second_moment


def blocks(h: np.ndarray) -> np.ndarray:
    found = np.stack([h[i : i + 16, i : i + 16] for i in range(0, len(h), 16)])
    return np.asarray((found + found.swapaxes(1, 2)) / 2)


def scale(q: hb.QuantizedTensor) -> np.ndarray:
    assert q.global_scale is not None
    return np.asarray(q.global_scale)


def stored(q: hb.QuantizedTensor) -> np.ndarray:
    assert q.stored_scale is not None
    return np.asarray(q.stored_scale)


def both(x: np.ndarray, h: np.ndarray, contract: Any, backend: str, **headroom: Any) -> list[hb.QuantizedTensor]:
    """By hessian and by gptq."""
    hessian = hb.Hessian(blocks(h), **headroom)
    return [
        hb.quantize(x, "nvfp4", contract, hessian, backend=backend),
        hb.gptq(x, h, "nvfp4", contract, backend=backend, **headroom),
    ]


def squared(x: np.ndarray, contract: Any, method: Method, amax: Any = None) -> float:
    return float(hb.quantize(x, "nvfp4", contract, method, global_amax=amax).error(x).squared)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CONTRACTS), st.sampled_from(["gauss", "uniform", "wide", "heavy", "low"]), st.integers(0, 99))
def test_it_is_the_choice_of_optimal_and_never_worse_by_its_objective(contract: str, kind: str, seed: int) -> None:
    x, h = sample(kind, (5, 64), seed), moments(64)
    optimal = hb.quantize(x, "nvfp4", contract, "optimal")
    plain = hb.quantize(x, "nvfp4", contract, "amax")
    for q in both(x, h, contract, "auto"):
        assert_same_bits(scale(q), scale(optimal))
    ratio = float(scale(optimal) / scale(plain))
    headroom = min((1.0, 1.75, 2.0), key=lambda one: abs(one - ratio))
    raised = np.float32(headroom * np.float64(np.abs(x).max()))
    chosen = squared(x, contract, hb.Optimal(), raised)
    assert chosen <= squared(x, contract, hb.Optimal(headroom=1)) * (1 + 1e-6)


@pytest.mark.parametrize("contract", [*CONTRACTS, BY_ROW], ids=str)
@pytest.mark.parametrize("headroom", [None, 1.5, (1, 1.25)])
def test_the_cpu_has_the_bits_of_the_reference(contract: Any, headroom: Any) -> None:
    x, h = sample("uniform", (6, 64)), moments(64)
    slow, fast = (both(x, h, contract, backend, headroom=headroom) for backend in ("reference", "cpu"))
    for wanted, found in zip(slow, fast, strict=True):
        for part in PARTS:
            if getattr(wanted, part) is not None:
                assert_same_bits(getattr(found, part), getattr(wanted, part))
        assert_same_bits(scale(found), scale(hb.quantize(x, "nvfp4", contract, hb.Optimal(headroom=headroom))))


def test_on_uniform_weights_each_method_is_ahead_of_the_one_before() -> None:
    """Without headroom, gptq was behind optimal there."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1 / 16, 1 / 16, (128, 256)).astype(np.float32)
    inputs = rng.standard_normal((2048, 256)).astype(np.float32)
    wanted = inputs @ x.T

    def error(q: hb.QuantizedTensor) -> float:
        return float(np.linalg.norm(inputs @ np.asarray(q.dequantize()).T - wanted) / np.linalg.norm(wanted))

    h = inputs.T @ inputs / len(inputs)
    optimal = error(hb.quantize(x, "nvfp4", method="optimal"))
    hessian, gptq = map(error, both(x, h, None, "auto"))
    alone = [error(q) for q in both(x, h, None, "auto", headroom=1)]
    assert hessian < 1.001 * optimal
    assert gptq < 0.98 * optimal
    assert hessian < 0.9 * alone[0]
    assert gptq < 0.9 * alone[1]


@pytest.mark.parametrize("contract", ["transformer_engine", BY_ROW], ids=str)
def test_a_given_amax_and_headroom_1_raise_nothing(contract: Any) -> None:
    x, h = sample("uniform", (6, 64)), moments(64)
    amax: Any = np.abs(x).max(axis=1) if contract is BY_ROW else float(np.abs(x).max())
    given = [
        hb.quantize(x, "nvfp4", contract, hb.Hessian(blocks(h)), global_amax=amax),
        hb.gptq(x, h, "nvfp4", contract, global_amax=amax),
    ]
    chosen = both(x, h, contract, "auto")
    for q, wanted, other in zip(both(x, h, contract, "auto", headroom=1), given, chosen, strict=True):
        for part in PARTS:
            assert_same_bits(getattr(q, part), getattr(wanted, part))
        assert not np.array_equal(scale(q), scale(other))


def test_a_sample_decides_for_larger_tensors() -> None:
    """Weights that 4over6 with 256 wrote: 448/256 loses nothing on them, and uniform ones: 2 is better than 1."""
    given = sample("gauss", (96, 1024))
    written = np.asarray(hb.dequantize(hb.quantize(given, "nvfp4", method=hb.FourSix("mse", 256))))
    h = moments(1024)
    factor = prepare(h)
    for x, headroom in ((written, 1.75), (sample("uniform", (96, 1024)), 2.0)):
        assert x.size > SMALL
        amax = stored(hb.quantize(x, "nvfp4"))
        wanted = np.asarray(headroom * amax.astype(np.float64), np.float32)
        assert_same_bits(stored(hb.quantize(x, "nvfp4", method=hb.Hessian(blocks(h)))), wanted)
        assert_same_bits(stored(hb.gptq(x, factor, "nvfp4")), wanted)


def test_weights_without_error_have_none() -> None:
    """All zeros; and a matrix of no rows."""
    for rows in (3, 0):
        x = np.zeros((rows, 64), np.float32)
        for q in both(x, np.eye(64, dtype=np.float32), None, "auto"):
            assert_same_bits(scale(q), scale(hb.quantize(x, "nvfp4", method="amax")))


def test_spellings_and_records() -> None:
    h = blocks(np.eye(32, dtype=np.float32))
    made = method_from("hessian:descent:headroom=1", h=h)
    assert isinstance(made, hb.Hessian)
    assert (made.codes, made.headroom, made.spelling) == ("descent", (1.0,), "hessian:descent:headroom=1")
    kind, given = parse_method("gptq:damping=0.01:headroom=1,1.5")
    assert kind(**given) == hb.Gptq(damping=0.01, headroom=(1.5, 1))
    q = hb.gptq(np.ones((1, 32), np.float32), np.eye(32), "nvfp4", headroom=2)
    assert q.method == hb.Gptq(headroom=2)


@pytest.mark.parametrize("headroom", [0.5, 65, (), "much"])
def test_headrooms_that_are_none(headroom: Any) -> None:
    with pytest.raises(InputError, match="headroom of Gptq is a number from 1 to 64"):
        hb.gptq(np.ones((1, 32), np.float32), np.eye(32), "nvfp4", headroom=headroom)
    with pytest.raises(InputError, match="headroom of Hessian is a number from 1 to 64"):
        hb.Hessian(blocks(np.eye(32, dtype=np.float32)), headroom=headroom)


@pytest.mark.parametrize(
    "option", [{"headroom": 1}, {"damping": 0.1}, {"order": "given"}, {"asymmetry": 1.0}, {"descent": 2}]
)
def test_a_factor_refuses_other_options_than_its_own(option: dict[str, Any]) -> None:
    """They were ignored without a word."""
    weight, second = sample("uniform", (8, 32)), moments(32)
    factor = prepare(second, 16, hb.Gptq(headroom=1))
    own = r"^weight: a Factor has its own options, Gptq\(.*headroom=\(1\.0,\)\); leave asymmetry, damping, order"
    with pytest.raises(InputError, match=own):
        hb.gptq(weight, factor, "nvfp4", **(option | {"descent": option.get("descent", 1)}))
    same = hb.gptq(weight, factor, "nvfp4", headroom=1)
    assert_same_bits(same.codes, hb.gptq(weight, factor, "nvfp4").codes)
    assert_same_bits(same.codes, hb.gptq(weight, second, "nvfp4", headroom=1).codes)
