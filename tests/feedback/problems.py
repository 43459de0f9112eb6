"""Layers with correlated inputs, for the tests of error feedback."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


class Layer(NamedTuple):
    weight: F32
    inputs: F32
    """As the quantized model has them."""
    exact: F32
    """As the unquantized model has them."""

    @property
    def second_moment(self) -> F32:
        x = self.inputs.astype(np.float64)
        return np.asarray(x.T @ x / len(x), np.float32)

    @property
    def cross_moment(self) -> F32:
        x = self.inputs.astype(np.float64)
        return np.asarray((self.exact - x).T @ x / len(x), np.float32)

    def output_error(self, decoded: Any) -> float:
        """Mean squared error of the output on its own inputs, relative."""
        wanted = self.inputs.astype(np.float64) @ self.weight.T.astype(np.float64)
        found = self.inputs.astype(np.float64) @ np.asarray(decoded, np.float64).T
        return float(((found - wanted) ** 2).sum() / (wanted**2).sum())


def layer(
    seed: int = 0, rows: int = 40, width: int = 128, tokens: int = 1024, dead: int = 0, spread: float = 1
) -> Layer:
    """A layer whose inputs are correlated and of very different sizes, the last `dead` of them zero.

    spread: how much they differ in size; 0 is not at all.
    """
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((width, width)) * np.exp(spread * rng.standard_normal(width))
    exact = (rng.standard_normal((tokens, width)) @ mixed / np.sqrt(width)).astype(np.float32)
    if dead:
        exact[:, -dead:] = 0
    inputs = np.float32(0.97) * exact + np.float32(0.05) * rng.standard_normal(exact.shape).astype(np.float32)
    if dead:
        inputs[:, -dead:] = 0
    weight = (0.03 * rng.standard_normal((rows, width))).astype(np.float32)
    return Layer(weight, inputs, exact)
