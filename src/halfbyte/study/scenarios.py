"""The scenarios of the study: tensors that are easy or hard for a format with block scales, made with fixed seeds."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.errors import unknown_name

F32 = npt.NDArray[np.float32]
Generator = np.random.Generator
Make = Callable[[Generator, tuple[int, ...]], npt.NDArray[np.floating]]

BLOCK = 32
SQUARE = (1024, 1024)


@dataclass(frozen=True)
class Scenario:
    """A named tensor. `tensor` is a pure function of the name."""

    name: str
    about: str
    shape: tuple[int, ...]
    make: Make

    def tensor(self) -> F32:
        """The tensor in float32. If the last axis is shorter than a block, the last axes are joined."""
        rng = np.random.default_rng([zlib.crc32(self.name.encode()), 4])
        values = self.make(rng, self.shape).astype(np.float32)
        return values if values.shape[-1] >= BLOCK else values.reshape(values.shape[0], -1)


def normal(std: float = 1.0) -> Make:
    return lambda rng, shape: rng.standard_normal(shape, np.float32) * np.float32(std)


def uniform(bound: float) -> Make:
    return lambda rng, shape: (2 * rng.random(shape, np.float32) - 1) * np.float32(bound)


def blocks_of_spread(spread: int) -> Make:
    """Normal blocks scaled so that their exponents run over 0 to `spread`, both ends present."""

    def make(rng: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating]:
        x = rng.standard_normal((int(np.prod(shape)) // BLOCK, BLOCK))
        exponents = rng.integers(0, spread + 1, len(x))
        exponents[:2] = 0, spread
        amax = 3.1 + 2.8 * rng.random(len(x))  # an amax in (3, 6] gives the wanted block exponent
        x *= (amax / np.abs(x).max(axis=1) * 2.0 ** (exponents - spread // 2))[:, None]
        return np.asarray(x.reshape(shape))

    return make


def mixed_scales(rng: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating]:
    """Normal blocks, each times a power of two drawn evenly from 25 octaves."""
    scale = 2.0 ** rng.uniform(-20, 5, int(np.prod(shape)) // BLOCK)
    return np.asarray((rng.standard_normal((scale.size, BLOCK)) * scale[:, None]).reshape(shape))


def signs(rng: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    return np.where(rng.random(shape) < 0.5, -1.0, 1.0)


def heavy_tail(rng: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating]:
    return rng.standard_t(3, shape)


def rare_outliers(rng: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating]:
    return np.where(rng.random(shape) < 1e-3, 100.0, 1.0) * rng.standard_normal(shape)


def narrow_range(rng: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating]:
    return rng.uniform(0.9, 1.1, shape) * signs(rng, shape)


def mostly_zeros(rng: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating]:
    return np.where(rng.random(shape) < 0.99, 0.0, rng.standard_normal(shape))


def bimodal_magnitudes(rng: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating]:
    return np.where(rng.random(shape) < 0.5, 0.01, 1.0) * (1 + 0.1 * rng.standard_normal(shape))


def pareto(rng: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating]:
    return (1 + rng.pareto(1.5, shape)) * signs(rng, shape)


def row_outliers(rng: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating]:
    x = rng.standard_normal(shape) * 0.02
    x[rng.choice(shape[0], shape[0] // 64, replace=False)] *= 100
    return x


def column_outliers(rng: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating]:
    x = rng.standard_normal(shape) * 0.02
    x[:, rng.choice(shape[1], shape[1] // 64, replace=False)] *= 100
    return x


def single_outlier(rng: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating]:
    x = rng.standard_normal(shape) * 0.005
    x.reshape(-1)[rng.integers(x.size)] = 1e4
    return x


def saturating(rng: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating]:
    """Values clipped at ±6; a third of the values are clipped."""
    return np.clip(6 * rng.standard_normal(shape), -6, 6)


def bimodal_signs(rng: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating]:
    return signs(rng, shape) + 0.05 * rng.standard_normal(shape)


def constant(rng: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating]:
    return np.full(shape, 0.7)


def embedding(rng: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating]:
    """Rows with different norms, like the embeddings of frequent and rare tokens."""
    return rng.standard_normal(shape) * 0.05 * np.exp(0.5 * rng.standard_normal((shape[0], 1)))


def gain(rng: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating]:
    return 1 + 0.1 * rng.standard_normal(shape)


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("uniform", "uniform in ±1", SQUARE, uniform(1.0)),
        Scenario("gaussian", "normal, standard deviation 1", SQUARE, normal()),
        Scenario("heavy-tail", "Student's t with 3 degrees of freedom", SQUARE, heavy_tail),
        Scenario("rare-outliers", "normal, one in 1000 times 100", SQUARE, rare_outliers),
        Scenario("mixed-scales", "normal blocks over 25 octaves", SQUARE, mixed_scales),
        Scenario("narrow-range", "magnitudes 0.9 to 1.1", SQUARE, narrow_range),
        Scenario("llm-weight", "normal, standard deviation 0.02", SQUARE, normal(0.02)),
        Scenario("mostly-zeros", "one in 100 is not zero", SQUARE, mostly_zeros),
        Scenario("spread-15", "block exponents over 15", SQUARE, blocks_of_spread(15)),
        Scenario("spread-17", "block exponents over 17: just all verbatim", SQUARE, blocks_of_spread(17)),
        Scenario("spread-18", "block exponents over 18: one too many", SQUARE, blocks_of_spread(18)),
        Scenario("spread-50", "block exponents over 50", SQUARE, blocks_of_spread(50)),
        Scenario("bimodal-magnitudes", "half near 1, half near 0.01", SQUARE, bimodal_magnitudes),
        Scenario("pareto", "Pareto with index 1.5", SQUARE, pareto),
        Scenario("row-outliers", "one row in 64 times 100", SQUARE, row_outliers),
        Scenario("column-outliers", "one column in 64 times 100", SQUARE, column_outliers),
        Scenario("single-outlier", "one 1e4 among standard deviation 0.005", SQUARE, single_outlier),
        Scenario("subnormal-heavy", "normal, standard deviation 1e-8", SQUARE, normal(1e-8)),
        Scenario("saturating", "clipped at ±6", SQUARE, saturating),
        Scenario("bimodal-signs", "near +1 or near -1", SQUARE, bimodal_signs),
        Scenario("constant", "0.7 everywhere", SQUARE, constant),
        Scenario("qkv", "attention projection, 4096x4096", (4096, 4096), normal(0.02)),
        Scenario("mlp-gate-up", "MLP projection, 1024x4096", (1024, 4096), normal(0.015)),
        Scenario("embedding", "2048x1024, uneven rows", (2048, 1024), embedding),
        Scenario("layernorm-gain", "4096 gains near 1", (1, 4096), gain),
        Scenario("conv", "64x64x4x4 kernel", (64, 64, 4, 4), normal(0.05)),
        Scenario("large-flat", "1024x4096, uniform in ±0.01", (1024, 4096), uniform(0.01)),
    )
}


def get_scenario(name: str) -> Scenario:
    """A scenario by name."""
    if name not in SCENARIOS:
        raise unknown_name("scenario", name, SCENARIOS)
    return SCENARIOS[name]
