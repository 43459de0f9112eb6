"""What kernels need of a method's arrays, derived once per method: scaled weights, Hessian triangles and their bounds.

Methods that hold arrays are equal to themselves alone, so no method ever gets what was derived from another one. What
is kept goes when the method goes.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np

from halfbyte.codec.bits import F32, I32
from halfbyte.methods import Hessian, Optimal

ROUNDING = 4e-6
"""Share of Σ|h·r·r| that float32 sums over sixteen elements stay within; kernels take twice that for 32."""


@dataclass(frozen=True)
class Quadratics:
    """The matrices of a Hessian as kernels take them, scaled so that the largest entry lies in [1, 2)."""

    triangles: F32
    """(columns, n·(n + 1)/2): upper triangles row by row, doubled off the diagonal."""
    bounds: F32
    """(columns, 3): see `quadratic_bounds`."""


_QUADRATICS: weakref.WeakKeyDictionary[Hessian, Quadratics] = weakref.WeakKeyDictionary()


def quadratics(method: Hessian) -> Quadratics:
    """What the kernels need of a Hessian. Tensors come in chunks, matrices do not: it is kept as long as the method."""
    if method not in _QUADRATICS:
        scaled = np.ldexp(method.matrices, -exponent_of_largest(np.abs(method.matrices))).astype(np.float32)
        _QUADRATICS[method] = Quadratics(triangles(scaled), quadratic_bounds(scaled))
    return _QUADRATICS[method]


def scaled_weights(method: Optimal, width: int) -> F32 | None:
    """Weights for every column of a matrix padded to `width`, the largest in [1, 2); None where the method has none."""
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
    """For each matrix H: bounds on the root of its largest eigenvalue, on what rᵀHr may be off, on its smallest one.

    With them kernels leave out scales that cannot win. The second, times `ROUNDING` and ‖r‖², bounds how far a float32
    sum of rᵀHr may lie from the true form of a semidefinite matrix: for that it is at least the trace. Few activations
    give a matrix whose smallest eigenvalue is zero but for roundings. If it is −d, then H + d·I is semidefinite, its
    largest eigenvalue is larger by d, and rᵀHr is smaller than its form by d·‖r‖², which counts among what the form may
    be off. Far below zero nothing is left out: the root is −1.
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
    """floor(log2) of the largest entry; 0 where none is positive."""
    return np.asarray(np.frexp(np.float32(values.max() if values.max() > 0 else 1))[1] - 1, np.int32)
