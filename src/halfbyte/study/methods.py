"""The method study: the relative error of every NVFP4 method, compared with real-valued scales and Shannon's bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from halfbyte import FourSix, Hessian, Optimal, dequantize, hessian_from_activations, quantize
from halfbyte.arrays import Array, to_numpy
from halfbyte.codec.bits import widen
from halfbyte.errors import InputError
from halfbyte.formats import get_format
from halfbyte.methods import Amax, Method
from halfbyte.study.ideal import ideal_squared_errors, shannon_bound

F32 = npt.NDArray[np.float32]
Matrix = npt.NDArray[np.generic]

BLOCK = 16
CONTRACT = "transformer_engine"
SAMPLE = 1 << 20
"""The number of elements to measure per tensor. Of larger tensors, evenly spaced rows are measured."""

METHODS: dict[str, Method] = {
    "amax": Amax(),
    "4over6 MAE 448": FourSix("mae", 448),
    "4over6 MAE 256": FourSix("mae", 256),
    "4over6 MSE 448": FourSix("mse", 448),
    "4over6 MSE 256": FourSix("mse", 256),
    "optimal": Optimal(),
}
HESSIAN = "hessian"
COLUMNS = (*METHODS, HESSIAN, "ideal scale", "Shannon bound")


@dataclass(frozen=True)
class MethodRow:
    """One tensor under every method."""

    name: str
    shape: tuple[int, ...]
    rows: int
    """The number of rows that were measured: all, or evenly spaced rows of a large tensor."""
    errors: dict[str, float]
    """Relative root mean square error by column name. The column hessian exists only if statistics were given."""
    output_errors: dict[str, float] = field(default_factory=dict)
    """The relative error of the layer's output, sqrt(rᵀHr / xᵀHx) with sums over blocks, if statistics were given."""


def run_methods(
    tensors: Iterable[tuple[str, Matrix]],
    statistics: dict[str, Matrix] | None = None,
    place: Callable[[Matrix], Array] = lambda x: x,
    sample: int = SAMPLE,
    progress: Callable[[MethodRow], None] = lambda row: None,
) -> list[MethodRow]:
    """Measure tensors, one at a time. `statistics`: activations (tokens, K) or Hessians (K/16, 16, 16), by name."""
    rows = []
    for name, x in tensors:
        row = measure_tensor(name, x, (statistics or {}).get(name), place, sample)
        rows.append(row)
        progress(row)
    return rows


def measure_tensor(
    name: str,
    x: Matrix,
    statistics: Matrix | None = None,
    place: Callable[[Matrix], Array] = lambda x: x,
    sample: int = SAMPLE,
) -> MethodRow:
    """Relative errors of one tensor. The tensor scale is always that of the whole tensor."""
    matrix = x.reshape(-1, x.shape[-1])
    if matrix.shape[1] % BLOCK:
        raise InputError(f"{name} of shape {x.shape}: the last axis is not a multiple of {BLOCK}; leave the tensor out")
    amax = float(np.abs(widen(matrix)).max())
    if not np.isfinite(amax) or amax == 0:
        raise InputError(f"{name} of shape {x.shape} holds NaN or Inf, or only zeros: there is no error to measure")
    part = _sampled(matrix, sample)
    values = widen(part).astype(np.float64)
    signal = float((values**2).sum())
    h = None if statistics is None else _hessian(name, statistics, matrix.shape[1])
    methods: dict[str, Method] = dict(METHODS) if h is None else METHODS | {HESSIAN: Hessian(h, codes="descent")}
    errors, output_errors = {}, {}
    for label, method in methods.items():
        given = _with_headroom(place(matrix)) if isinstance(method, Optimal | Hessian) else amax
        q = quantize(place(np.ascontiguousarray(part)), "nvfp4", CONTRACT, method, global_amax=given)
        residual = to_numpy(dequantize(q)).astype(np.float64) - values
        errors[label] = float(np.sqrt((residual**2).sum() / signal)) if signal else 0.0
        if h is not None:
            output_errors[label] = float(np.sqrt(_through(residual, h) / _through(values, h)))
    errors["ideal scale"] = float(np.sqrt(ideal_squared_errors(values.reshape(-1, BLOCK)).sum() / signal))
    errors["Shannon bound"] = shannon_bound(get_format("nvfp4").bits_per_element)
    return MethodRow(name, tuple(x.shape), len(part), errors, output_errors)


def _with_headroom(matrix: Array) -> float:
    """The amax that optimal and hessian store for the whole tensor: a headroom is chosen, which a given amax fixes."""
    stored = quantize(matrix, "nvfp4", CONTRACT, Optimal()).stored_scale
    return float(to_numpy(stored))  # type: ignore[arg-type]


def _sampled(matrix: Matrix, sample: int) -> Matrix:
    """Evenly spaced rows with about `sample` elements in all. A single long row is cut to whole blocks."""
    rows, width = matrix.shape
    step = max(-(-rows * width // sample), 1)
    if rows == 1:
        return matrix[:, : max(min(width, sample) // BLOCK, 1) * BLOCK]
    return matrix[:: min(step, rows)]


def _hessian(name: str, statistics: Matrix, width: int) -> F32:
    """The given Hessians, or Hessians computed from the given activations."""
    if statistics.ndim == 3:
        h = widen(statistics)
    else:
        h = hessian_from_activations(statistics)
    if h.shape != (width // BLOCK, BLOCK, BLOCK):
        raise InputError(
            f"statistics of {name} have shape {statistics.shape}; a width of {width} needs activations "
            f"(tokens, {width}) or Hessians ({width // BLOCK}, {BLOCK}, {BLOCK})"
        )
    return h


def _through(values: npt.NDArray[np.float64], h: F32) -> float:
    """Σ vᵀHv over blocks."""
    blocks = values.reshape(len(values), -1, BLOCK)
    return float(np.einsum("rki,kij,rkj->", blocks, h.astype(np.float64), blocks, optimize=True))
