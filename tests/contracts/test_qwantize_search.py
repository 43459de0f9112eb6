"""qwantize's searches: the installed package and halfbyte choose the same bytes on new inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import qwantize as peer
import torch

import halfbyte as hb
from halfbyte.conform.peer_intermediates import fused_hessian
from halfbyte.contracts.searches.qwantize import (
    _as_at_the_start,
    _best_so_far,
    _ten_times_best,
    fused_multiply_add,
    search_bounds,
    search_e4m3,
    search_e8m0,
    squared_error,
)
from halfbyte.testing import assert_same_bits
from tests.samples import E2M1_VALUES, F32, codes_of, e2m1, f32, float8, gaussian

Matrix = npt.NDArray[Any]
Generator = np.random.Generator

ROWS = 12  # four or more: with fewer rows, the peer's BLAS adds the naive scale's Hessian error in another order
FORMATS = [("nvfp4", 16), ("nvfp4", 32), ("mxfp4", 16), ("mxfp4", 32)]
SCALE = {"nvfp4": "e4m3", "mxfp4": "e8m0"}
DTYPES: dict[str, Any] = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: the peer's tensors are small, and with several threads it mostly waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def same_residuals(generator: Generator, shape: tuple[int, int]) -> Matrix:
    """Sparse blocks in ratios of 6 : 3 : 1.5, a little off the grid, so that several scales have equal residuals."""
    values = generator.choice([6, 3, 1.5, -6, -3], shape) * (1 + 2.0**-6 * generator.integers(-2, 3, (shape[0], 1)))
    return np.where(generator.random(shape) < 0.4, values, 0)


def on_ties(generator: Generator, shape: tuple[int, int]) -> Matrix:
    """Half-way points between E2M1 values, times E4M3 numbers."""
    middles = np.convolve(E2M1_VALUES, [0.5, 0.5], "valid")
    signs = generator.choice([-1, 1], shape)
    return np.asarray(signs * generator.choice([*middles, 6], shape) * generator.integers(8, 16, (shape[0], 1)) / 8)


def with_outliers(generator: Generator, shape: tuple[int, int]) -> Matrix:
    return generator.normal(size=shape) * np.where(generator.random(shape) < 0.03, 100, 1)


def with_signed_zeros(generator: Generator, shape: tuple[int, int]) -> Matrix:
    x = generator.normal(size=shape)
    x[0], x[1] = 0.0, -0.0
    return np.where(generator.random(shape) < 0.5, generator.choice([0.0, -0.0], shape), x)


def with_nonfinite(generator: Generator, shape: tuple[int, int]) -> Matrix:
    special = generator.choice([np.nan, np.inf, -np.inf, 1e-40], shape)
    return np.where(generator.random(shape) < 0.02, special, generator.normal(size=shape))


INPUTS: dict[str, Callable[[Generator, tuple[int, int]], Matrix]] = {
    "gaussian": lambda generator, shape: generator.normal(size=shape),
    "heavy": lambda generator, shape: generator.standard_t(2, shape),
    "integers": lambda generator, shape: generator.integers(-7, 8, shape).astype(np.float64),
    "tiny": lambda generator, shape: generator.normal(size=shape) * np.exp2(generator.uniform(-148, -8, (shape[0], 1))),
    "huge": lambda generator, shape: generator.normal(size=shape) * np.exp2(generator.uniform(8, 14, (shape[0], 1))),
    "overflowing squares": lambda generator, shape: generator.normal(size=shape) * 1e36,
    "wide": lambda generator, shape: generator.normal(size=shape) * np.exp2(generator.uniform(-12, 12, shape)),
    "zeros": lambda generator, shape: np.zeros(shape),
    "sparse": lambda generator, shape: generator.normal(size=shape) * (generator.random(shape) < 0.15),
    "signed zeros": with_signed_zeros,
    "outliers": with_outliers,
    "on ties": on_ties,
    "same residuals": same_residuals,
    "not finite": with_nonfinite,
}

ACTIVATIONS: dict[str, Callable[[Generator, int], Matrix]] = {
    "gaussian": lambda generator, width: generator.normal(size=(48, width)),
    "outlier columns": lambda generator, width: generator.normal(size=(64, width)) * np.exp(
        2 * generator.normal(size=width)
    ),
    "correlated": lambda generator, width: generator.normal(size=(96, 8)) @ generator.normal(size=(8, width)),
    "one token": lambda generator, width: generator.normal(size=(1, width)),
    "zeros": lambda generator, width: np.zeros((16, width)),
    "large": lambda generator, width: generator.normal(size=(32, width)) * 1e6,
}  # fmt: skip


def draw(name: str, dtype: str, block: int) -> Matrix:
    generator = np.random.default_rng([len(name), block, *name.encode()])
    with np.errstate(over="ignore"):
        return INPUTS[name](generator, (ROWS, 4 * block)).astype(DTYPES[dtype])


def draw_activations(name: str, width: int) -> F32:
    return ACTIVATIONS[name](np.random.default_rng([width, *name.encode()]), width).astype(np.float32)


def assert_same_as_peer(x: Matrix, format: str, block: int, activations: F32 | None = None) -> None:
    """Compare scales, codes (with the sign of zero) and, if every scale has a byte, decoded values."""
    name = "optimal" if activations is None else "optimal_hessian"
    given = {} if activations is None else {"X": torch.from_numpy(activations)}
    blocks = torch.from_numpy(x.astype(np.float32).reshape(len(x), -1, block))
    scales, values, decoded = (
        part.numpy() for part in getattr(peer, f"{format}_{name}")(blocks, return_dequant=True, **given)
    )
    method = None if activations is None else hb.Hessian(fused_hessian(activations, block))
    q = hb.quantize(x, format, hb.contracts.qwantize(mode=f"{format}/{name}"), method, block=block)
    got_scales = float8(np.asarray(q.scales), SCALE[format])
    finite = np.isfinite(scales)
    if format == "mxfp4":  # the peer's NaN scale has no E8M0 byte in the vectors: it is written as 0
        scales = np.where(finite, scales, float8(np.zeros(1, np.uint8), "e8m0"))
    assert_same_bits(got_scales, scales, inputs=x, any_nan=True)
    assert_same_bits(e2m1(codes_of(np.asarray(q.codes))), values.reshape(x.shape), inputs=x)
    if finite.all():
        assert_same_bits(hb.dequantize(q), decoded.reshape(x.shape), inputs=x)


@pytest.mark.parametrize(("format", "block"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INPUTS)
def test_optimal_is_the_peer_s(name: str, dtype: str, format: str, block: int) -> None:
    assert_same_as_peer(draw(name, dtype, block), format, block)


@pytest.mark.parametrize(("format", "block"), FORMATS)
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("name", INPUTS)
def test_hessian_is_the_peer_s(name: str, activations: str, format: str, block: int) -> None:
    """Each pair of input and activations has one dtype, and every input gets all dtypes."""
    dtype = list(DTYPES)[(list(INPUTS).index(name) + list(ACTIVATIONS).index(activations)) % len(DTYPES)]
    assert_same_as_peer(draw(name, dtype, block), format, block, draw_activations(activations, 4 * block))


@pytest.mark.parametrize(("format", "block"), FORMATS)
def test_the_searches_do_search(format: str, block: int) -> None:
    """Otherwise the comparisons above could agree only because both keep the naive bytes."""
    x = gaussian(64, 4 * block)
    naive = np.asarray(hb.quantize(x, format, "qwantize", block=block).scales)
    searched = hb.quantize(x, format, hb.contracts.qwantize(mode=f"{format}/optimal"), block=block)
    assert (naive != np.asarray(searched.scales)).mean() > 0.1
    h = hb.Hessian(hb.hessian_from_activations(gaussian(64, 4 * block, seed=1), block))
    weighted = hb.quantize(x, format, hb.contracts.qwantize(mode=f"{format}/optimal_hessian"), h, block=block)
    assert (np.asarray(searched.scales) != np.asarray(weighted.scales)).mean() > 0.01


def quadratic_errors(q: hb.QuantizedTensor, x: F32, h: F32) -> npt.NDArray[np.float64]:
    """rᵀHr of each block, in float64."""
    r = (np.asarray(hb.dequantize(q), np.float64) - x).reshape(x.shape[0], *h.shape[:2])
    return np.asarray(np.einsum("mji,jik,mjk->mj", r, h.astype(np.float64), r))


@pytest.mark.parametrize(("format", "block"), FORMATS)
def test_pruning_by_squared_error_misses_the_best_for_a_hessian(format: str, block: int) -> None:
    """With one token of ones, rᵀHr = (Σr)². A scale with large errors that cancel wins, but the peer never tries it."""
    x, activations = gaussian(8, 4 * block, seed=3), np.ones((1, 4 * block), np.float32)
    assert_same_as_peer(x, format, block, activations)
    h = fused_hessian(activations, block)
    pruned = hb.quantize(x, format, hb.contracts.qwantize(mode=f"{format}/optimal_hessian"), hb.Hessian(h), block=block)
    exact = hb.quantize(x, format, "qwantize", hb.Hessian(h), block=block)
    theirs, ours = quadratic_errors(pruned, x, h), quadratic_errors(exact, x, h)
    assert (ours <= theirs * (1 + 1e-4) + 1e-9).all()  # never worse, but for float32's roundings
    assert (ours < 0.5 * theirs).any()
    assert ours.sum() < theirs.sum()


@pytest.mark.parametrize("block", [16, 32])
def test_blocks_whose_naive_scale_is_zero_are_given_up(block: int) -> None:
    """All-zero codes cost as much as the naive scale 0, so the peer stops. The smallest scale would be better."""
    x = gaussian(8, 4 * block, seed=7) * np.float32(2e-3)
    x *= np.float32(0.005) / np.abs(x.reshape(8, 4, block)).max(axis=-1).repeat(block, axis=-1)
    assert_same_as_peer(x, "nvfp4", block)
    pruned = hb.quantize(x, "nvfp4", hb.contracts.qwantize(mode="nvfp4/optimal"), block=block)
    exact = hb.quantize(x, "nvfp4", "qwantize", "optimal", block=block)
    assert not np.asarray(hb.dequantize(pruned)).any()
    assert ((hb.dequantize(exact) - x) ** 2).sum() < 0.2 * (x**2).sum()


def test_without_a_mode_optimal_is_the_exact_search() -> None:
    """The peer's bounds are correct for the squared error. So both find the same error, perhaps with another scale."""
    x = gaussian(32, 64, seed=4)
    exact = hb.dequantize(hb.quantize(x, "nvfp4", "qwantize", "optimal"))
    pruned = hb.dequantize(hb.quantize(x, "nvfp4", hb.contracts.qwantize(mode="nvfp4/optimal")))
    errors = [((np.asarray(y, np.float64) - x) ** 2).reshape(32, 4, 16).sum(-1) for y in (exact, pruned)]
    np.testing.assert_allclose(errors[0], errors[1], rtol=1e-5)


def test_modes_preset_their_method() -> None:
    x = gaussian(4, 32)
    by_mode = hb.quantize(x, "nvfp4", hb.contracts.qwantize(mode="nvfp4/optimal"))
    by_name = hb.quantize(x, "nvfp4", hb.contracts.qwantize(mode="nvfp4/optimal"), "optimal")
    assert_same_bits(by_mode.codes, by_name.codes)
    with pytest.raises(hb.UnsupportedError, match=r"needs its matrices: give hb\.Hessian\(h\)"):
        hb.quantize(x, "nvfp4", hb.contracts.qwantize(mode="nvfp4/optimal_hessian"))
    with pytest.raises(hb.UnsupportedError, match="contract qwantize has no mxfp4"):
        hb.quantize(x, "mxfp4", hb.contracts.qwantize(mode="nvfp4/optimal"))


@pytest.mark.parametrize("mode", ["naive", "optimal", "optimal_hessian"])
def test_contracts_are_compared_by_value(mode: str) -> None:
    contract = hb.contracts.qwantize(mode=f"nvfp4/{mode}")
    assert contract == hb.contracts.qwantize(mode=f"nvfp4/{mode}") != hb.contracts.qwantize()
    assert repr(contract) == f"qwantize(mode='nvfp4/{mode}')"


def test_what_the_peer_s_search_lacks_is_refused() -> None:
    x, contract = gaussian(4, 32), hb.contracts.qwantize(mode="mxfp4/optimal")
    with pytest.raises(hb.UnsupportedError, match="no weights"):
        hb.quantize(x, "mxfp4", contract, hb.Optimal(np.ones(32)))
    with pytest.raises(hb.UnsupportedError, match="no codes='descent'"):
        hb.quantize(x, "mxfp4", contract, hb.Hessian(np.eye(32)[None], codes="descent"))
    for search in (search_e4m3, search_e8m0):
        with pytest.raises(hb.UnsupportedError, match="no search for method amax"):
            search(x.reshape(4, 2, 16), np.ones((4, 2, 1), np.uint8), hb.Amax())


def test_bounds_of_a_block_worked_by_hand() -> None:
    """|x| is 3 once and 1 fifteen times, E0 = 4. Lower bound: (3 − √4)/6. The fifth 1 exceeds E0, so upper: 1/0.25."""
    x = f32(3, *[1] * 15)
    bounds = search_bounds(x, f32(4)[0])
    assert [bounds.lower, bounds.upper, bounds.searched] == [np.float32(1 / 6), 4, True]
    ends = [np.float32(1 / 6), np.float32(4)]
    beyond = [np.nextafter(ends[0], np.float32(0)), np.nextafter(ends[1], np.float32(9))]
    assert [bool(bounds.hold(scale)) for scale in (*ends, *beyond)] == [True, True, False, False]
    assert not search_bounds(x, squared_error(x)).searched  # all-zero codes would cost no more
    assert not search_bounds(np.zeros(16, np.float32), f32(0)[0]).searched


@pytest.mark.parametrize("block", [16, 32])
def test_sums_run_in_the_order_of_torch(block: int) -> None:
    """A whole search seldom depends on the last bit of a sum, so the sums are compared one by one."""
    x = np.random.default_rng(6).standard_t(3, (500, block)).astype(np.float32)
    assert_same_bits(squared_error(x), torch.from_numpy(x).pow(2).sum(dim=-1).numpy(), inputs=x)
    ascending = np.sort(np.abs(x), axis=-1)
    running = torch.from_numpy(ascending).pow(2).cumsum(dim=-1).numpy()
    for k in range(block - 1):
        bounds = search_bounds(x, running[:, k])  # exactly k + 1 running sums do not exceed this
        assert_same_bits(bounds.upper, ascending[:, k + 1] / np.float32(0.25), inputs=x)
    assert not search_bounds(x, running[:, -1]).searched.any()  # whatever the other order of that sum says


def test_fused_multiply_add_rounds_once() -> None:
    generator = np.random.default_rng(5)
    a, b = (generator.normal(size=2000).astype(np.float32) for _ in range(2))
    c = (-(a * b) * np.exp2(generator.integers(-30, 30, 2000))).astype(np.float32)
    # In float64 this sum falls on a float32 tie, and its second rounding would go the wrong way.
    a, b, c = np.append(a, f32(1 + 2**-12)), np.append(b, f32(2.0**-60)), np.append(c, f32(1 + 2**-23))
    a, b, c = np.append(a, f32(2**-12)), np.append(b, f32(2**-12 * (1 + 2**-23))), np.append(c, f32(1 + 2**-23))
    got = fused_multiply_add(a, b, c)
    for *operands, result in zip(a, b, c, got, strict=True):
        exact = Fraction(float(operands[0])) * Fraction(float(operands[1])) + Fraction(float(operands[2]))
        error = abs(Fraction(float(result)) - exact)
        for neighbour in (np.nextafter(result, np.float32(np.inf)), np.nextafter(result, np.float32(-np.inf))):
            assert error <= abs(Fraction(float(neighbour)) - exact)


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("tokens", [1, 48, 64, 192])
def test_hessian_of_activations_is_the_peer_s(tokens: int, block: int) -> None:
    activations = gaussian(tokens, 2 * block, seed=tokens)
    parts = [torch.from_numpy(activations[:, start : start + block]) for start in (0, block)]
    expected = np.stack([torch.zeros(block, block).addmm_(part.T, part).numpy() for part in parts])
    assert_same_bits(fused_hessian(activations, block), expected)


def test_fused_multiply_add_on_ties_with_a_tiny_addend() -> None:
    """The product lies on a float32 tie, and the addend is too small for float64 to see: it decides all the same."""
    step = 2.0**-12
    a = np.array([1 + step, 1 + 3 * step, -(1 + step), 3 * (1 + step), 2**-9 + step * 2**-9], np.float32)
    b = np.array([1 + step, 1 + step, 1 + step, 1 + step, 1 + step], np.float32)
    product = a.astype(np.float64) * b
    for tiny in (2.0**-80, -(2.0**-80), 2.0**-126, -(2.0**-149)):
        got = fused_multiply_add(a, b, np.full(5, tiny, np.float32))
        neighbours = product.astype(np.float32)
        for value, exact, found in zip(neighbours, product, got, strict=True):
            low, high = (float(value), float(np.nextafter(value, np.float32(np.inf))))
            if low > exact:
                low, high = float(np.nextafter(value, np.float32(-np.inf))), float(value)
            if exact - low == high - exact:
                assert found == (high if tiny > 0 else low)
            else:
                assert found == value
    exact = fused_multiply_add(a, b, np.zeros(5, np.float32))
    assert_same_bits(exact, product.astype(np.float32))  # without an addend ties go to even
    ties = np.isin(product * 2.0**24 % 2, 1)
    assert ties.sum() >= 3, "the products are ties"


def test_a_sum_that_is_odd_is_rounded_as_it_is() -> None:
    """1 + 2^-24 + 2^-52 less something lies beyond the middle of two float32 numbers, whatever its last bits are."""
    a, b = f32(24929), f32(673 * 2.0**-24)  # 1 + 2^-24
    c = f32(2.0**-52 * (1 - 2.0**-10))
    assert fused_multiply_add(a, b, c).tolist() == [1 + 2.0**-23]
    assert fused_multiply_add(-a, b, -c).tolist() == [-1 - 2.0**-23]
    assert fused_multiply_add(a, b, f32(0)).tolist() == [1]
    above_one = f32(1 + 2.0**-23)  # sums that are exact and lie in the middle go to the even neighbour
    assert fused_multiply_add(above_one, f32(1), f32(2.0**-24)).tolist() == [1 + 2.0**-22]
    assert fused_multiply_add(above_one, f32(1), f32(-(2.0**-24))).tolist() == [1]


def test_limits_of_the_clipping_error() -> None:
    best, start = f32(3), f32(7)
    assert [limit(best, start).tolist() for limit in (_best_so_far, _ten_times_best, _as_at_the_start)] == [
        [3],
        [30],
        [7],
    ]
