"""GPTQ as its paper has it, in float64: the inverse of H, its upper Cholesky factor, columns one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import halfbyte as hb

F64 = npt.NDArray[np.float64]
Scales = Callable[[F64, int], Any]
"""(updated weights of a block, number of the block) → a QuantizedTensor whose scales are taken."""


def textbook(weight: Any, h: Any, scales: Scales, damping: float = 0.05, block: int = 16) -> F64:
    """The decoded weight. Codes are the nearest under the scales of each block."""
    w, moments = np.asarray(weight, np.float64).copy(), np.asarray(h, np.float64).copy()
    width = w.shape[1]
    moments[np.diag_indices(width)] += damping * np.diag(moments).mean()
    lower = np.linalg.cholesky(np.linalg.inv(moments))
    upper = lower.T
    grid = np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
    out = np.zeros_like(w)
    for number in range(width // block):
        first = number * block
        q = scales(w[:, first : first + block], number)
        step = hb.get_format("nvfp4").scale.values[np.asarray(q.scales)[:, 0]].astype(np.float64)
        step = step * float(q.global_scale)
        for j in range(first, first + block):
            near = np.abs(w[:, j, None] / step[:, None] - grid).argmin(axis=1)
            out[:, j] = grid[near] * step
            error = (w[:, j] - out[:, j]) / upper[j, j]
            w[:, j + 1 :] -= np.outer(error, upper[j, j + 1 :])
    return out
