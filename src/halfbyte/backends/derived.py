"""Arrays that kernels derive from a method, computed once per method: scaled weights, Hessian triangles, their bounds.

The results are cached under the method. A method that holds arrays is equal only to itself, so no method can get the
results of another one. The cached results are freed together with the method.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np

from halfbyte.codec.bits import F32, I32
from halfbyte.methods import Hessian, Optimal

ROUNDING = 4e-6
"""Bound on the rounding error of a float32 sum over sixteen elements, as a share of Σ|h·r·r|. For 32: twice this."""


@dataclass(frozen=True)
class Quadratics:
    """The matrices of a Hessian in the form for kernels, scaled so that the largest entry is in [1, 2)."""

    triangles: F32
    """(columns, n·(n + 1)/2): upper triangles row by row, doubled off the diagonal."""
    bounds: F32
    """(columns, 3): see `quadratic_bounds`."""


_QUADRATICS: weakref.WeakKeyDictionary[Hessian, Quadratics] = weakref.WeakKeyDictionary()


def quadratics(method: Hessian) -> Quadratics:
    """The matrices of a Hessian in the form for kernels.

    One method serves many chunks of a tensor, so the result is cached for as long as the method lives.
    """
    if method not in _QUADRATICS:
        scaled = np.ldexp(method.matrices, -exponent_of_largest(np.abs(method.matrices))).astype(np.float32)
        _QUADRATICS[method] = Quadratics(triangles(scaled), quadratic_bounds(scaled))
    return _QUADRATICS[method]


def scaled_weights(method: Optimal, width: int) -> F32 | None:
    """One weight per column of a matrix padded to `width`, the largest in [1, 2). None if the method has no weights."""
    given = method.channel_weights
    if given is None:
        return None
    weights = np.zeros(width, np.float32)
    weights[: given.size] = np.ldexp(given, -exponent_of_largest(given))
    return weights


def triangles(matrices: F32) -> F32:
    """Upper triangles of (columns, n, n) row by row, doubled off the diagonal: (columns, n·(n + 1)/2)."""
    rows, columns = np.triu_indices(matrices.shape[1])
    factor = np.where(rows == columns, 1, 2).astype(np.float32)
    return np.ascontiguousarray(matrices[:, rows, columns] * factor)


def quadratic_bounds(matrices: F32) -> F32:
    """Three bounds for each matrix H, with which kernels leave out scales that cannot win.

    1. An upper bound on the square root of the largest eigenvalue.
    2. A number that, times `ROUNDING` and ‖r‖², bounds the difference between a float32 sum of rᵀHr and the exact form
       of a semidefinite matrix. For that it is at least the trace.
    3. A bound on the smallest eigenvalue.

    If there are few activations, the smallest eigenvalue of H is zero except for roundings, so it can be a negative
    number −d. Then H + d·I is semidefinite, and its largest eigenvalue is larger by d. rᵀHr is smaller than the form of
    H + d·I by d·‖r‖², and this difference is part of the second bound. If the smallest eigenvalue is far below zero, no
    scale is left out: the first bound is −1.
    """
    size, exact = matrices.shape[-1], matrices.astype(np.float64)
    values = np.linalg.eigvalsh(exact)
    trace = np.trace(exact, axis1=1, axis2=2)
    below = np.maximum(1e-12 * np.abs(values).max(axis=1) - values[:, 0], 0)
    root = np.sqrt(np.maximum(values[:, -1] + below, 0)) * (1 + 1e-6)
    root = np.where(below > 1e-5 * values[:, -1], -1, root)
    off = ((trace + size * below) + below / ROUNDING) * (1 + 1e-6)
    smallest = np.maximum(values[:, 0] - 1e-6 * trace, 0)
    return np.ascontiguousarray(np.stack([root, off, smallest], axis=1).astype(np.float32))


def exponent_of_largest(values: F32) -> I32:
    """floor(log2) of the largest entry; 0 if no entry is positive."""
    return np.asarray(np.frexp(np.float32(values.max() if values.max() > 0 else 1))[1] - 1, np.int32)
