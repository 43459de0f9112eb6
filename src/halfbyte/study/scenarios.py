"""The scenarios of the study: the 27 of the public MXFP4 to NVFP4 study, and four of ours. Seeds are ours.

The public study is that of Model-Optimizer's pull request 1364 (April 2026). Its definitions are used here word for
word; it drew its numbers with torch on a GPU, so figures agree up to sampling noise (`published.py` has them).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.codec.bits import BFLOAT16
from halfbyte.errors import unknown_name

Floats = npt.NDArray[np.floating]
Generator = np.random.Generator
Make = Callable[[Generator, tuple[int, ...]], Floats]

SEED = 1
SHAPE = (256, 1024)
GROUPS = 16
"""Groups of rows, each with a power of two of its own."""
BLOCK = 32


@dataclass(frozen=True)
class Scenario:
    """A named tensor. `tensor` is a pure function of the name."""

    name: str
    about: str
    shape: tuple[int, ...]
    make: Make
    public: bool = True
    """Whether the public study has it."""

    def tensor(self) -> npt.NDArray[np.generic]:
        """The tensor in bfloat16. If the last axis is shorter than a block, the last axes are joined."""
        rng = np.random.default_rng([zlib.crc32(self.name.encode()), SEED])
        values = self.make(rng, self.shape).astype(np.float32).astype(BFLOAT16)
        return values if values.shape[-1] >= BLOCK else values.reshape(values.shape[0], -1)


def normal(std: float = 1.0, mean: float = 0.0) -> Make:
    return lambda rng, shape: mean + std * rng.standard_normal(shape, np.float32)


def uniform(rng: Generator, shape: tuple[int, ...]) -> Floats:
    return rng.uniform(-1, 1, shape)


def signs(rng: Generator, shape: tuple[int, ...]) -> Floats:
    return np.where(rng.random(shape) < 0.5, -1.0, 1.0)


def some_times(std: float, probability: float, factor: float) -> Make:
    """Normal numbers, each of which is multiplied by the factor with this probability."""

    def make(rng: Generator, shape: tuple[int, ...]) -> Floats:
        x = std * rng.standard_normal(shape, np.float32)
        return np.where(rng.random(shape, np.float32) < probability, factor * x, x)

    return make


def rows_times(std: float, rows: int, factor: float) -> Make:
    """Normal numbers; this many random rows are multiplied by the factor."""

    def make(rng: Generator, shape: tuple[int, ...]) -> Floats:
        x = std * rng.standard_normal(shape, np.float32)
        x[rng.choice(shape[0], rows, replace=False)] *= factor
        return x

    return make


def groups_of_rows(std: float, lowest: int, spread: int) -> Make:
    """Normal numbers in sixteen groups of rows; group i is multiplied by 2^(lowest + floor(spread·i/15))."""

    def make(rng: Generator, shape: tuple[int, ...]) -> Floats:
        group = np.arange(shape[0]) * GROUPS // shape[0]
        scale = np.ldexp(1.0, lowest + spread * group // (GROUPS - 1))
        return np.asarray(std * rng.standard_normal(shape) * scale[:, None])

    return make


def spread_rows(spread: int) -> Make:
    return groups_of_rows(0.5, -(spread // 2), spread)


def heavy_tail(rng: Generator, shape: tuple[int, ...]) -> Floats:
    return rng.standard_normal(shape) * np.abs(rng.standard_normal(shape))


def rare_outliers(rng: Generator, shape: tuple[int, ...]) -> Floats:
    x = 0.05 * rng.standard_normal(shape)
    return np.where(rng.random(shape) < 1e-3, 100 * signs(rng, shape), x)


def mostly_zeros(rng: Generator, shape: tuple[int, ...]) -> Floats:
    return np.where(rng.random(shape) < 0.01, 0.5 * rng.standard_normal(shape), 0.0)


def bimodal_magnitudes(rng: Generator, shape: tuple[int, ...]) -> Floats:
    return np.where(rng.random(shape) < 0.5, 8.0, 0.01) * rng.standard_normal(shape)


def pareto(rng: Generator, shape: tuple[int, ...]) -> Floats:
    u = np.maximum(rng.random(shape), 1e-6)
    return np.asarray(0.05 * (u ** (-1 / 1.5) - 1) * signs(rng, shape))


def row_outliers(rng: Generator, shape: tuple[int, ...]) -> Floats:
    x = 0.01 * rng.standard_normal(shape)
    rows, columns = rng.choice(shape[0], 4, replace=False), rng.choice(shape[1], 16, replace=False)
    x[np.ix_(rows, columns)] = 30 * signs(rng, (4, 16))
    return x


def column_outliers(rng: Generator, shape: tuple[int, ...]) -> Floats:
    x = 0.01 * rng.standard_normal(shape)
    x[:, rng.choice(shape[1], 8, replace=False)] *= 200
    return x


def single_outlier(rng: Generator, shape: tuple[int, ...]) -> Floats:
    x = 0.005 * rng.standard_normal(shape)
    x[shape[0] // 2, shape[1] // 2] = 1e4
    return x


def saturating(rng: Generator, shape: tuple[int, ...]) -> Floats:
    return np.clip(rng.standard_normal(shape), -6, 6)


def bimodal_signs(rng: Generator, shape: tuple[int, ...]) -> Floats:
    return 3 * signs(rng, shape) + 0.1 * rng.standard_normal(shape)


def constant(rng: Generator, shape: tuple[int, ...]) -> Floats:
    return np.full(shape, 1.5)


def blocks_of_spread(spread: int) -> Make:
    """Normal blocks scaled so that their exponents run over 0 to `spread`, both ends present."""

    def make(rng: Generator, shape: tuple[int, ...]) -> Floats:
        x = rng.standard_normal((int(np.prod(shape)) // BLOCK, BLOCK))
        exponents = rng.integers(0, spread + 1, len(x))
        exponents[:2] = 0, spread
        amax = 3.1 + 2.8 * rng.random(len(x))  # an amax in (3, 6] gives the wanted block exponent
        x *= (amax / np.abs(x).max(axis=1) * np.ldexp(1.0, exponents - spread // 2))[:, None]
        return np.asarray(x.reshape(shape))

    return make


def mixed_blocks(rng: Generator, shape: tuple[int, ...]) -> Floats:
    """Normal blocks, each times a power of two drawn evenly from 25 octaves."""
    scale = 2.0 ** rng.uniform(-20, 5, int(np.prod(shape)) // BLOCK)
    return np.asarray((rng.standard_normal((scale.size, BLOCK)) * scale[:, None]).reshape(shape))


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("uniform", "U(−1, 1)", SHAPE, uniform),
        Scenario("gaussian", "N", SHAPE, normal()),
        Scenario("heavy-tail", "N·|N|", SHAPE, heavy_tail),
        Scenario("rare-outliers", "0.05 N; one in 1000 becomes ±100", SHAPE, rare_outliers),
        Scenario("mixed-scales", "0.3 N; groups of rows over 25 octaves", SHAPE, groups_of_rows(0.3, -12, 25)),
        Scenario("narrow-range", "1 + 0.5 N", SHAPE, normal(0.5, 1.0)),
        Scenario("llm-weight", "N/32; one in 10,000 times 50", SHAPE, some_times(1024**-0.5, 1e-4, 50)),
        Scenario("mostly-zeros", "0; one in 100 is 0.5 N", SHAPE, mostly_zeros),
        *(
            Scenario(f"spread-{spread}", f"0.5 N; groups of rows over {spread} octaves", SHAPE, spread_rows(spread))
            for spread in (15, 17, 18, 50)
        ),
        Scenario("bimodal-magnitudes", "0.01 N; half of them 8 N", SHAPE, bimodal_magnitudes),
        Scenario("pareto", "±0.05·(u^(−1/1.5) − 1), u at least 1e-6", SHAPE, pareto),
        Scenario("row-outliers", "0.01 N; in 4 rows the same 16 columns become ±30", SHAPE, row_outliers),
        Scenario("column-outliers", "0.01 N; 8 columns times 200", SHAPE, column_outliers),
        Scenario("single-outlier", "0.005 N; the middle element is 1e4", SHAPE, single_outlier),
        Scenario("subnormal-heavy", "1e-8 N", SHAPE, normal(1e-8)),
        Scenario("saturating", "N with magnitudes cut at 6", SHAPE, saturating),
        Scenario("bimodal-signs", "±3 plus 0.1 N", SHAPE, bimodal_signs),
        Scenario("constant", "1.5 everywhere", SHAPE, constant),
        Scenario("qkv", "4096x4096, N/64; one in 20,000 times 30", (4096, 4096), some_times(4096**-0.5, 5e-5, 30)),
        Scenario("mlp-gate-up", "1024x4096, N/64; 32 rows times 5", (1024, 4096), rows_times(4096**-0.5, 32, 5)),
        Scenario("embedding", "2048x1024, 0.5 N; 8 rows times 20", (2048, 1024), rows_times(0.5, 8, 20)),
        Scenario("layernorm-gain", "32x1024, 1 + 0.05 N", (32, 1024), normal(0.05, 1.0)),
        Scenario("conv", "64x64x4x4 kernel, 0.1 N", (64, 64, 4, 4), normal(0.1)),
        Scenario("large-flat", "1024x4096, 0.02 N", (1024, 4096), normal(0.02)),
        Scenario("blocks-17", "each block an exponent of 0 to 17: just all fit", SHAPE, blocks_of_spread(17), False),
        Scenario("blocks-18", "each block an exponent of 0 to 18: one too many", SHAPE, blocks_of_spread(18), False),
        Scenario("blocks-50", "each block an exponent of 0 to 50", SHAPE, blocks_of_spread(50), False),
        Scenario("blocks-mixed", "normal blocks over 25 octaves", SHAPE, mixed_blocks, False),
    )
}


def get_scenario(name: str) -> Scenario:
    """A scenario by name."""
    if name not in SCENARIOS:
        raise unknown_name("scenario", name, SCENARIOS)
    return SCENARIOS[name]
