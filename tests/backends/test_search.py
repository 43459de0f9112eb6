"""The exact searches, compared with float64: every scale of the format, nearest codes, no shortcut. Also rankings."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import halfbyte as hb
from halfbyte import contracts
from halfbyte.arrays import to_numpy
from tests.samples import E2M1_VALUES, F32, codes_of, e2m1, f32, float8, gaussian

F64 = npt.NDArray[np.float64]

EXCESS = 1e-5
"""The largest allowed relative excess over the float64 optimum, caused by float32 arithmetic."""

ROWS, WIDTH = 24, 256


def distribution(name: str) -> F32:
    generator = np.random.default_rng(11)
    shape = (ROWS, WIDTH)
    match name:
        case "gauss":
            x = generator.normal(size=shape)
        case "uniform":
            x = generator.uniform(-1, 1, shape)
        case "laplace":
            x = generator.laplace(size=shape)
        case "heavy tails":
            x = generator.standard_t(2, size=shape)
        case "block scales":
            x = generator.normal(size=shape) * np.exp2(generator.integers(-9, 3, (ROWS, WIDTH // 16))).repeat(16, 1)
        case "outlier":
            x = generator.normal(size=shape)
            x[1, 5] = 700.0
        case "one sided":
            x = generator.exponential(size=shape)
        case "three values":
            x = generator.choice([0.31, -0.77, 1.0], shape) * generator.uniform(0.5, 2, (ROWS, WIDTH // 16)).repeat(
                16, 1
            )
        case _:
            raise KeyError(name)
    return x.astype(np.float32)


DISTRIBUTIONS = ["gauss", "uniform", "laplace", "heavy tails", "block scales", "outlier", "one sided", "three values"]

CONTRACTS = {
    "transformer_engine": contracts.transformer_engine(),
    "miles": contracts.miles(),
    "modelopt": contracts.modelopt(),
    "compressed_tensors": contracts.compressed_tensors(),
    "vllm": contracts.vllm(),
}
"""Contracts whose candidates include every positive E4M3 scale."""


def nearest(y: F64, grid: F64) -> F64:
    """The nearest value of an ascending grid of magnitudes, with y's sign."""
    middles = (grid[1:] + grid[:-1]) / 2
    return np.copysign(grid[np.searchsorted(middles, np.abs(y))], y)


def brute_force(blocks: F64, steps: F64, grid: F64, weights: F64 | None = None, h: F64 | None = None) -> F64:
    """Least error of every block (rows, columns, 16) over all steps (a scale times the global scale), in float64."""
    best = np.full(blocks.shape[:2], np.inf)
    for step in steps:
        best = np.minimum(best, measure(nearest(blocks / step, grid) * step - blocks, weights, h))
    return best


def measure(r: F64, weights: F64 | None = None, h: F64 | None = None) -> F64:
    if h is not None:
        return np.asarray(np.einsum("mci,cij,mcj->mc", r, h, r))
    return np.asarray((r * r * (1.0 if weights is None else weights.reshape(r.shape[1:]))).sum(axis=-1))


def global_scale_of(q: hb.QuantizedTensor) -> float:
    assert q.global_scale is not None
    return float(to_numpy(q.global_scale).item())


def residual(q: hb.QuantizedTensor, x: F32) -> F64:
    """Decoded minus x by the format's definition, in float64, as blocks."""
    codes, scales = codes_of(to_numpy(q.codes)), float8(to_numpy(q.scales), "e4m3").astype(np.float64)
    g = global_scale_of(q)
    blocks = e2m1(codes).reshape(*scales.shape, -1) * (scales * g)[..., None]
    return np.asarray(blocks - x.reshape(blocks.shape))


def steps_of(q: hb.QuantizedTensor) -> F64:
    """All 126 positive E4M3 scales times the global scale."""
    scales = float8(np.arange(1, 127, dtype=np.uint8), "e4m3").astype(np.float64)
    assert scales.size == 126
    return np.asarray(scales * global_scale_of(q))


def assert_optimal(got: F64, best: F64, what: str) -> None:
    """Every block must be within EXCESS of the optimum. The message names the worst block."""
    assert (best > 0).all(), f"{what}: a block with no error at all has no relative excess"
    excess = got / best - 1
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert excess[worst] < EXCESS, (
        f"{what}: the worst of {excess.size} blocks, {tuple(map(int, worst))}, has an error of {got[worst]:.9g} where "
        f"float64 finds {best[worst]:.9g}: {excess[worst]:.2e} too much, {int((excess >= EXCESS).sum())} blocks fail"
    )
    assert excess.min() > -1e-6, f"{what}: better than the optimum by {-excess.min():.2e}: the brute force is wrong"


@functools.cache
def activations_hessian() -> F32:
    generator = np.random.default_rng(12)
    mixed = generator.normal(size=(512, 24)) @ generator.normal(size=(24, WIDTH))
    return hb.hessian_from_activations((mixed + generator.normal(size=mixed.shape)).astype(np.float32))


@functools.cache
def importances() -> F32:
    return (10 ** np.random.default_rng(13).uniform(-3, 3, WIDTH)).astype(np.float32)


GRID = np.array(E2M1_VALUES)


# --- NVFP4 ---


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("contract", CONTRACTS)
def test_optimal_finds_the_least_squared_error(contract: str, name: str) -> None:
    x = distribution(name)
    q = hb.quantize(x, "nvfp4", CONTRACTS[contract], hb.Optimal(), backend="cpu")
    best = brute_force(x.reshape(ROWS, -1, 16).astype(np.float64), steps_of(q), GRID)
    assert_optimal(measure(residual(q, x)), best, f"{contract}, {name}")


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("contract", ["transformer_engine", "compressed_tensors"])
def test_weighted_optimal_finds_the_least_weighted_error(contract: str, name: str) -> None:
    x, weights = distribution(name), importances()
    q = hb.quantize(x, "nvfp4", CONTRACTS[contract], hb.Optimal(weights), backend="cpu")
    best = brute_force(x.reshape(ROWS, -1, 16).astype(np.float64), steps_of(q), GRID, weights.astype(np.float64))
    assert_optimal(measure(residual(q, x), weights.astype(np.float64)), best, f"{contract}, {name}, weighted")


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("contract", ["transformer_engine", "modelopt"])
def test_hessian_finds_the_least_output_error(contract: str, name: str) -> None:
    x, h = distribution(name), activations_hessian()
    q = hb.quantize(x, "nvfp4", CONTRACTS[contract], hb.Hessian(h), backend="cpu")
    best = brute_force(x.reshape(ROWS, -1, 16).astype(np.float64), steps_of(q), GRID, h=h.astype(np.float64))
    assert_optimal(measure(residual(q, x), h=h.astype(np.float64)), best, f"{contract}, {name}, Hessian")


def test_hessian_finds_scales_that_bounds_of_the_squared_error_exclude() -> None:
    """Only one direction of the weights matters, so the best scale may be far from that of the amax."""
    x = distribution("gauss")
    direction = np.random.default_rng(3).normal(size=(WIDTH // 16, 16))
    h = (direction[:, :, None] * direction[:, None, :] + 1e-3 * np.eye(16)).astype(np.float32)
    q = hb.quantize(x, "nvfp4", method=hb.Hessian(h), backend="cpu")
    best = brute_force(x.reshape(ROWS, -1, 16).astype(np.float64), steps_of(q), GRID, h=h.astype(np.float64))
    assert_optimal(measure(residual(q, x), h=h.astype(np.float64)), best, "rank one")
    plain = hb.quantize(x, "nvfp4", backend="cpu")
    far = np.abs(to_numpy(q.scales).astype(int) - to_numpy(plain.scales)) > 8
    assert far.any(), "no block left its amax's binade: the test shows nothing"


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_optimal_never_loses_to_amax_or_four_over_six(name: str) -> None:
    """Block by block, since all have the same tensor scale."""
    x = distribution(name)
    got = measure(residual(hb.quantize(x, "nvfp4", method=hb.Optimal(headroom=1), backend="cpu"), x))
    for other in (hb.Amax(), hb.FourSix("mae"), hb.FourSix("mse"), hb.FourSix("mse", fast_error=True)):
        theirs = measure(residual(hb.quantize(x, "nvfp4", method=other, backend="cpu"), x))
        assert (got <= theirs * (1 + EXCESS)).all(), f"{other} is better by {(got / theirs).max() - 1:.2e}"
        assert got.sum() < 0.999 * theirs.sum()


@pytest.mark.parametrize("name", ["gauss", "block scales", "heavy tails"])
def test_descent_on_the_codes_is_never_worse_and_mostly_better(name: str) -> None:
    x, h = distribution(name)[:8], activations_hessian()
    kept = hb.quantize(x, "nvfp4", method=hb.Hessian(h))
    moved = hb.quantize(x, "nvfp4", method=hb.Hessian(h, codes="descent"))
    assert to_numpy(kept.scales).tolist() == to_numpy(moved.scales).tolist()
    before = measure(residual(kept, x), h=h.astype(np.float64))
    after = measure(residual(moved, x), h=h.astype(np.float64))
    assert (after <= before * (1 + EXCESS)).all(), f"worse by {(after / before).max() - 1:.2e}"
    assert (after < 0.99 * before).mean() > 0.5


def test_descent_leaves_a_block_with_nan_alone() -> None:
    """E4M3 has a code for NaN, which is not on the grid of the descent."""
    x = gaussian(2, 64)
    x[0, 3] = np.nan
    h = hb.hessian_from_activations(gaussian(96, 64), block=32)
    plain = to_numpy(hb.quantize(x, "mxfp8", backend="reference").codes)
    moved = to_numpy(hb.quantize(x, "mxfp8", method=hb.Hessian(h, codes="descent"), backend="reference").codes)
    assert moved[0, :32].tolist() == plain[0, :32].tolist()
    assert moved[0, 32:].tolist() != plain[0, 32:].tolist()


def second_block(*values: float, method: hb.methods.Method) -> int:
    """Scale byte of the second block. The first block holds 2688, so that the global scale is 1."""
    x = f32(2688, *[0.0] * 15, *values)
    q = hb.quantize(x, "nvfp4", method=method, backend="cpu")
    assert global_scale_of(q) == 1
    return int(to_numpy(q.scales)[1])


SIXES = [6.0] * 16
TWOS_AND_THREES = [2.0, 3.0] * 8


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("values", "scale"),
    [
        (SIXES, 1.0),  # 6·1, 4·1.5, 3·2, 2·3, 1.5·4, 1·6 and 0.5·12 are all exact
        (TWOS_AND_THREES, 0.5),  # 4 and 6 halves; 2 and 3; 1 and 1.5 times 2
        ([3 * 2.0**-9] * 16, 2.0**-9),  # the smallest scale there is
        ([2.0**-40] * 16, 2.0**-9),  # zero under every scale
    ],
)
def test_the_smaller_scale_of_equals(values: list[float], scale: float, backend: str) -> None:
    for method in (hb.Optimal(), hb.Optimal(np.ones(32)), hb.Hessian(np.stack([np.eye(16)] * 2))):
        x = f32(2688, *[0.0] * 15, *values)
        q = hb.quantize(x, "nvfp4", method=method, backend=backend)
        assert global_scale_of(q) == 1
        assert float8(to_numpy(q.scales), "e4m3")[1] == scale, f"{method.name}"


def test_weights_of_zero_leave_the_smallest_scale() -> None:
    assert second_block(*gaussian(16).tolist(), method=hb.Optimal(np.eye(1, 32)[0])) == 1


def test_a_weight_decides() -> None:
    """6 and 0.9375: the scale 1 hits 6 and misses the other by 1/16; 0.9375 hits that and misses 6 by 3/8."""
    values = [6.0, 0.9375, *[0.0] * 14]
    first = hb.Optimal(f32(*[1.0] * 16, 1e6, *[1e-6] * 15))
    second = hb.Optimal(f32(*[1.0] * 16, 1e-6, 1e6, *[1e-6] * 14))
    chosen = [second_block(*values, method=method) for method in (first, second)]
    assert float8(np.array(chosen, np.uint8), "e4m3").tolist() == [1.0, 0.9375]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("contract", "byte"), [("transformer_engine", 0), ("modelopt", 0x38), ("compressed_tensors", 0x20), ("vllm", 0)]
)
def test_zero_blocks_keep_the_byte_of_amax(contract: str, byte: int, backend: str) -> None:
    x = gaussian(3, 64)
    x[:, 16:32], x[1, 32:48] = 0, -0.0
    for method in (hb.Amax(), hb.Optimal(), hb.Optimal(np.ones(64)), hb.Hessian(np.stack([np.eye(16)] * 4))):
        scales = to_numpy(hb.quantize(x, "nvfp4", contract, method, backend=backend).scales)
        assert scales[:, 1].tolist() == [byte] * 3
        assert scales[1, 2] == byte


# --- MX: powers of two ---


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["gauss", "heavy tails", "block scales", "outlier"])
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_optimal_power_of_two(format: str, name: str, weighted: bool) -> None:
    x, weights = distribution(name), importances() if weighted else None
    q = hb.quantize(x, format, method=hb.Optimal(weights))
    grid = GRID if format == "mxfp4" else float8(np.arange(127, dtype=np.uint8), "e4m3").astype(np.float64)
    codes = to_numpy(q.codes)
    values: F32 = e2m1(codes_of(codes)) if format == "mxfp4" else float8(codes, "e4m3")
    blocks = x.reshape(ROWS, -1, 32).astype(np.float64)
    r = values.reshape(blocks.shape) * float8(to_numpy(q.scales), "e8m0").astype(np.float64)[..., None] - blocks
    w = None if weights is None else weights.astype(np.float64)
    best = brute_force(blocks, np.exp2(np.arange(-40.0, 20.0)), grid, w)
    assert_optimal(measure(r, w), best, f"{format}, {name}")


# --- bad input ---

EYES = np.stack([np.eye(16)] * 2)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(31), "Optimal has 31 weights, but the last axis has 32 elements"),
        (np.ones(64), "Optimal has 64 weights"),
        (-np.ones(32), "must be finite, not negative and not empty"),
        (np.full(32, np.nan), "must be finite"),
        (np.full(32, np.inf), "must be finite"),
        (np.ones((1, 32)), "one-dimensional"),
        (np.ones(0), "not empty"),
    ],
)
def test_bad_weights(weights: Any, message: str) -> None:
    with pytest.raises(hb.InputError, match=message):
        hb.quantize(gaussian(2, 32), "nvfp4", method=hb.Optimal(weights))


@pytest.mark.parametrize(
    ("h", "message"),
    [
        (EYES[:1], r"h has shape \(1, 16, 16\), but a last axis of 32 with blocks of 16 needs \(2, 16, 16\)"),
        (np.stack([np.eye(32)]), r"h has shape \(1, 32, 32\)"),
        (np.eye(16), r"it must be \(K/block, block, block\)"),
        (np.ones((2, 16, 8)), r"it must be \(K/block, block, block\)"),
        (EYES * np.nan, "NaN or Inf"),
        (np.where(EYES > 0, np.inf, 0), "NaN or Inf"),
        (EYES + np.triu(np.ones((16, 16)), 1), "not symmetric"),
    ],
)
def test_bad_hessians(h: Any, message: str) -> None:
    with pytest.raises(hb.InputError, match=message):
        hb.quantize(gaussian(2, 32), "nvfp4", method=hb.Hessian(h))


def test_searches_refuse_tiles() -> None:
    for method in (hb.Optimal(), hb.Hessian(EYES)):
        with pytest.raises(hb.UnsupportedError, match="searches blocks of one row"):
            hb.quantize(gaussian(16, 32), "nvfp4", method=method, tile=(16, 16))
