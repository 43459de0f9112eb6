"""The peers' own searches, and the searches of the general kernel, equal the reference bit for bit, also near ties.

The reference is slow, because it tries every scale. So contracts that use the same kernel code share the inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest

import halfbyte as hb
from halfbyte import contracts
from halfbyte.backends.cpu.peer_searches import sweep_tables
from halfbyte.backends.cpu.structs import as_array
from halfbyte.contracts import NVFP4Rule
from halfbyte.contracts.spec import Scaling, TensorScale
from halfbyte.testing import assert_same_bits
from tests.backends.cases import DTYPES, EXACT, METHODS, Case, every_case, has_own_kernel, peer_cases
from tests.backends.cpu.test_screening import DATA, SHAPE
from tests.backends.test_bits import SEARCHED_INPUTS, check, each_isa, isa
from tests.samples import F32

__all__ = ["isa"]  # the fixture

Codes = Literal["nearest", "descent"]

FULL = ("transformer_engine()", "fouroversix()", "qwantize()")
"""A contract that multiplies, one that wraps, one that divides and rounds ties down: tested with every objective."""
ONE_OF_EACH = (*FULL, "modelopt()", "ocp()", "gguf()")
QUADRATIC = ("hessian", "descent")


def general_cases() -> Iterator[tuple[Case, str]]:
    """Cases of the general kernel, each with a dtype. A few cases get all dtypes, most get one."""
    for number, case in enumerate(every_case() + peer_cases()):
        name = repr(case.contract)
        if case.method in QUADRATIC and name not in ONE_OF_EACH:
            continue
        if case.contract.transform.columnwise or (case.method == "weighted" and name not in FULL):
            continue
        if case.method == "descent" and case.scaling == "row" and case.block == 32:
            continue
        wanted = list(DTYPES) if name in FULL and case.method not in QUADRATIC else [list(DTYPES)[number % 3]]
        if name == "qwantize()" and case.method == "hessian":
            wanted = ["fp32"]
        for dtype in wanted:
            if case.method in EXACT and not has_own_kernel(case, dtype):
                yield case, dtype


GENERAL = [pytest.param(case, dtype, id=f"{case}-{dtype}") for case, dtype in general_cases()]
SWEEPS = [case for case in peer_cases() if "sweep" in case.method]
QWANTIZE = [case for case in peer_cases() if case.contract.name == "qwantize"]


def test_every_way_through_the_general_kernel_is_compared() -> None:
    cases = [case for case, _ in general_cases()]
    assert {case.method for case in cases} == set(EXACT)
    assert {(case.format, case.block) for case in cases} == {
        ("nvfp4", 16), ("nvfp4", 32), ("mxfp4", 16), ("mxfp4", 32), ("mxfp8", 32)
    }  # fmt: skip
    assert {case.method for case in cases if case.scaling == "row"} == set(EXACT)
    assert {name for name in FULL for case in cases if repr(case.contract) == name} == set(FULL)


@each_isa
@pytest.mark.parametrize(("case", "dtype"), GENERAL)
def test_the_general_search_gives_the_bits_of_the_reference(case: Case, dtype: str, isa: str) -> None:
    names = ["block scales", "ties"] if case.method in QUADRATIC else SEARCHED_INPUTS
    if (case.format, case.method) == ("mxfp8", "descent"):  # 253 steps of the grid
        names = ["single block"]
    check(case, dtype, names, least=min(2, len(names)))


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SWEEPS, ids=str)
def test_the_sweep_gives_the_bits_of_the_reference(case: Case, dtype: str, isa: str) -> None:
    check(case, dtype, [*SEARCHED_INPUTS, "outlier", "2**-60", "nonfinite", "signed zeros"])


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", QWANTIZE, ids=str)
def test_the_search_of_qwantize_gives_the_bits_of_the_reference(case: Case, dtype: str, isa: str) -> None:
    check(case, dtype, [*SEARCHED_INPUTS, "tiny", "huge", "wide", "subnormal", "finite bits", "nonfinite", "2**60"])


# --- near ties ---

NEAR = {
    "fouroversix": ("nvfp4", contracts.fouroversix(), ("mae 256", "mse 256", "abs_max 256")),
    "modelopt": ("nvfp4", contracts.modelopt(), ("mse 256", "sweep", "sweep fused")),
    "qwantize nvfp4": ("nvfp4", contracts.qwantize(mode="nvfp4/optimal"), ("optimal", "hessian")),
    "qwantize mxfp4": ("mxfp4", contracts.qwantize(mode="mxfp4/optimal"), ("optimal", "hessian")),
}


@functools.cache
def near_ties(name: str, peer: str, label: str, block: int) -> hb.QuantizedTensor:
    """What the reference makes of them: once for all instruction sets."""
    format, contract, _ = NEAR[peer]
    method = METHODS[label](SHAPE[1], block)
    return hb.quantize(DATA[name].astype(np.float32), format, contract, method, block, backend="reference")


@each_isa
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("peer", NEAR)
@pytest.mark.parametrize("name", DATA)
def test_near_ties_are_decided_as_the_reference_decides(name: str, peer: str, block: int, isa: str) -> None:
    format, contract, labels = NEAR[peer]
    x = DATA[name].astype(np.float32)
    for label in labels:
        method = METHODS[label](SHAPE[1], block)
        got = hb.quantize(x, format, contract, method, block, backend="cpu")
        wanted = near_ties(name, peer, label, block)
        assert_same_bits(got.scales, wanted.scales, inputs=x)
        assert_same_bits(got.codes, wanted.codes, inputs=x)


# --- Hessians and weights of every kind ---


def odd_hessians(block: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Hessians: zero, the identity, one with eigenvalues below zero (as far as one may), and one of rank one."""
    random = np.random.default_rng(block).normal(size=(block, block))
    rank_two = random[:, :2] @ random[:, :2].T
    below = rank_two - 9e-4 * np.linalg.eigvalsh(rank_two).max() * np.eye(block)
    matrices = [0 * random, np.eye(block), below, np.outer(random[0], random[0])]
    return np.asarray(matrices, np.float32)


@functools.cache
def bound_nothing(format: str, block: int, scaling: Scaling, codes: Codes) -> tuple[F32, hb.QuantizedTensor]:
    """The operand, and what the reference makes of it: once for all instruction sets."""
    x = np.random.default_rng(1).normal(size=(9, 4 * block)).astype(np.float32)
    method = hb.Hessian(odd_hessians(block), codes)
    return x, hb.quantize(x, format, method=method, block=block, scaling=scaling, backend="reference")


@each_isa
@pytest.mark.parametrize("codes", ["nearest", "descent"])
@pytest.mark.parametrize(
    ("format", "block", "scaling"),
    [
        ("nvfp4", 16, "tensor"),
        ("nvfp4", 16, "row"),
        ("nvfp4", 32, "tensor"),
        ("mxfp4", 16, "tensor"),
        ("mxfp4", 32, "tensor"),
    ],
)
def test_hessians_that_bound_nothing(format: str, block: int, scaling: Scaling, codes: Codes, isa: str) -> None:
    x, wanted = bound_nothing(format, block, scaling, codes)
    method = hb.Hessian(odd_hessians(block), codes)
    got = hb.quantize(x, format, method=method, block=block, scaling=scaling, backend="cpu")
    assert_same_bits(got.scales, wanted.scales)
    assert_same_bits(got.codes, wanted.codes)


@each_isa
@pytest.mark.parametrize(
    ("format", "block", "scaling"), [("nvfp4", 16, "row"), ("nvfp4", 32, "tensor"), ("mxfp4", 32, "tensor")]
)
def test_columns_without_any_weight(format: str, block: int, scaling: Scaling, isa: str) -> None:
    x = np.random.default_rng(1).normal(size=(9, 128)).astype(np.float32)
    given = np.where(np.arange(128) // 32 % 2, 1, 0).astype(np.float32)
    got, wanted = (
        hb.quantize(x, format, method=hb.Optimal(given), block=block, scaling=scaling, backend=b)
        for b in ("cpu", "reference")
    )
    assert_same_bits(got.scales, wanted.scales)
    assert_same_bits(got.codes, wanted.codes)


def test_two_hessians_at_a_time_are_two() -> None:
    """Numbers derived from a Hessian are cached while it lives. Another Hessian must not get them."""
    x = np.random.default_rng(5).normal(size=(16, 64)).astype(np.float32)
    first, second = (hb.Hessian(hb.hessian_from_activations(x[::step] ** 3)) for step in (1, -2))
    assert first != second
    for method in (first, second, first):
        got, wanted = (hb.quantize(x, "nvfp4", method=method, backend=b) for b in ("cpu", "reference"))
        assert_same_bits(got.scales, wanted.scales)
        assert_same_bits(got.codes, wanted.codes)


# --- what the quick sweep relies on ---


def tables_for(amax: float, method: hb.Sweep) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.float32]], int, int]:
    rule = contracts.modelopt(mode="fp8_sweep").rules["nvfp4"]
    assert isinstance(rule, NVFP4Rule)
    one = np.array([amax], np.float32)
    t = TensorScale(one, one / np.float32(2688), np.float32(6), np.float32(2688), "fp32")
    tables = sweep_tables(rule, t, method)
    return as_array(tables.scale, np.float32).copy(), int(tables.ascending), int(tables.regular)


@pytest.mark.parametrize("fused", [False, True])
def test_scales_of_the_sweep_are_e4m3_values_times_one_number(fused: bool) -> None:
    """This must hold for every amax that weights can have. The kernel allows four units in the last place."""
    for amax in np.exp2(np.random.default_rng(3).uniform(-20, 20, 300)):
        scale, ascending, regular = tables_for(float(amax), hb.Sweep(fused=fused))
        assert (ascending, regular) == (1, 1)
        assert scale[0] > 0


def test_a_sweep_of_a_tiny_tensor_is_not_taken_for_a_regular_one() -> None:
    """If amax/6 is below 2**-24, Model-Optimizer uses 1 instead, and most scales become 0."""
    scale, ascending, regular = tables_for(2.0**-30, hb.Sweep())
    assert (scale == 0).any()
    assert (ascending, regular) == (0, 0)
    x = np.random.default_rng(2).normal(size=(8, 64)).astype(np.float32) * np.float32(2.0**-34)
    got, wanted = (hb.quantize(x, "nvfp4", "modelopt", hb.Sweep(), backend=b) for b in ("cpu", "reference"))
    assert_same_bits(got.scales, wanted.scales)
    assert_same_bits(got.codes, wanted.codes)


# --- codes that wrap ---


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_beyond_seven_wrap_as_in_the_reference(dtype: str, isa: str) -> None:
    """With a given amax that is far too small, every element is beyond the largest code, by any number of octaves."""
    generator = np.random.default_rng(12)
    x = (generator.normal(size=(32, 64)) * np.exp2(generator.integers(-6, 6, (32, 64)))).astype(DTYPES[dtype])
    seen = set()
    for amax in (30.0, 1.0, 2.0**-4, 2.0**-8):
        for tile in (None, (16, 16)):
            for method in (hb.Amax(), hb.FourSix("mse", 256), hb.FourSix("abs_max", 256)):
                got, wanted = (
                    hb.quantize(x, "nvfp4", "fouroversix", method, tile=tile, global_amax=amax, backend=b)
                    for b in ("cpu", "reference")
                )
                assert_same_bits(got.codes, wanted.codes, inputs=x)
                assert_same_bits(got.scales, wanted.scales, inputs=x)
                positive = np.stack([np.asarray(got.codes) & 15, np.asarray(got.codes) >> 4], axis=-1).reshape(x.shape)
                seen |= set(positive[np.asarray(x, np.float32) > 0].tolist())
    assert seen == set(range(16)), "positive elements whose codes wrap have the sign bit"
