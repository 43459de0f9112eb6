"""search_global_scale(): find a tensor scale with a smaller error than the usual one."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

from halfbyte.arrays import Array, to_numpy
from halfbyte.backends.headroom import chooser, headrooms
from halfbyte.codec.bits import DTYPES, widen
from halfbyte.contracts import Contract
from halfbyte.errors import InputError, UnsupportedError
from halfbyte.foreign_arrays import needs_conversion, to_operand
from halfbyte.methods import Method
from halfbyte.quantize import dequantize, quantize
from halfbyte.request import resolve, stores_scale
from halfbyte.subnormals import are_flushed, subnormals_kept
from halfbyte.types import QuantizedTensor


@dataclass(frozen=True)
class GlobalScaleSearch:
    """The result of a search over the tensor scale."""

    global_amax: float
    """The best amax: pass it to `quantize` as `global_amax`."""
    squared_error: float
    """Sum of squared errors with the best amax."""
    plain_squared_error: float
    """Sum of squared errors with the tensor's own amax."""
    tried: int
    quantized: QuantizedTensor
    """The tensor quantized with the best amax."""

    @property
    def gain(self) -> float:
        """The share of the squared error that the search removed; 0 if the tensor's own amax is the best."""
        if self.plain_squared_error == 0:
            return 0.0
        return 1 - self.squared_error / self.plain_squared_error


MOST_STEPS, MOST_OCTAVES = 1 << 16, 256
"""Beyond these, candidates lie closer than float32 tells apart, or outside its range."""


def search_global_scale(
    x: Array,
    contract: str | Contract | None = None,
    method: str | Method | None = None,
    *,
    octaves: float = 1.0,
    steps: int = 16,
    block: int | None = None,
    backend: str = "auto",
    threads: int | None = None,
) -> GlobalScaleSearch:
    """Try tensor scales around the one that the amax gives, and keep the one with the least squared error.

    The amax is multiplied by 2**(octaves·i/steps) for i from -steps/4 to steps. Most candidates are larger than the
    amax, because a smaller one clips. Block scales are E4M3 values, eight per octave; another tensor scale shifts the
    products that they can form. The headrooms that Optimal chooses from are candidates too. Errors are summed in
    float64. The tensor's own amax is a candidate and wins ties, so the result is never worse than `quantize` with the
    same method.

    Tensors with NaN or Inf raise: they have no error to minimise.

    >>> x = np.random.default_rng(0).standard_normal((32, 256)).astype(np.float32)
    >>> found = search_global_scale(x, method="optimal")
    >>> found.squared_error <= found.plain_squared_error
    True
    """
    if are_flushed():
        with subnormals_kept():
            return search_global_scale(
                x, contract, method, octaves=octaves, steps=steps, block=block, backend=backend, threads=threads
            )
    request = resolve("nvfp4", contract, method, block=block)
    if request.contract.transform.columnwise or request.contract.transform.hadamard:
        raise UnsupportedError(
            f"{request.contract} transforms the tensor, so its decoded values do not stand for x; search on a contract "
            "without a transform"
        )
    if not stores_scale(request.rule) or getattr(request.rule, "constant_factor", None) is not None:
        raise UnsupportedError(f"search_global_scale: contract {request.contract} has no tensor scale to choose")
    if request.scaling != "tensor":
        raise UnsupportedError(
            f"search_global_scale chooses one scale per tensor, and contract {request.contract} has one per row; give "
            "the contract without row scaling"
        )
    if needs_conversion(x):
        x = to_operand(x)
    array = to_numpy(x)
    if array.dtype not in DTYPES.values():
        raise InputError(f"search_global_scale takes float32, float16 or bfloat16, not {array.dtype}")
    values = widen(array).astype(np.float64)
    if not values.size:
        raise InputError(
            f"search_global_scale: a tensor of shape {values.shape} has no elements, so no error to reduce"
        )
    if not np.isfinite(values).all():
        raise InputError("search_global_scale needs finite values; the tensor holds NaN or Inf")
    if not (isinstance(steps, Integral) and 1 <= steps <= MOST_STEPS):
        raise InputError(f"steps must be a whole number from 1 to {MOST_STEPS:,}, not {steps!r}")
    if not (isinstance(octaves, Real) and 0 < octaves <= MOST_OCTAVES):
        raise InputError(f"octaves must be a positive number of at most {MOST_OCTAVES}, not {octaves!r}")
    amax = np.float32(np.abs(values).max())
    grid = [octaves * step / steps for step in (*range(-(steps // 4), 0), *range(1, steps + 1))]
    own = headrooms(chooser(request), 0)
    factors = dict.fromkeys([1.0, *(float(np.float64(2) ** power) for power in grid), *own])  # 1 first: it wins ties
    best: tuple[float, np.float32, QuantizedTensor] | None = None
    plain = 0.0
    for factor in factors:
        tried = np.float32(amax * np.float64(factor))
        if not np.isfinite(tried) or (tried == 0 and amax != 0):
            continue
        q = quantize(x, "nvfp4", contract, method, block=block, global_amax=tried, backend=backend, threads=threads)
        decoded = to_numpy(dequantize(q, backend=backend, threads=threads)).astype(np.float64)
        error = float(np.square(decoded - values).sum())
        if factor == 1:
            plain = error
        if best is None or error < best[0]:
            best = (error, tried, q)
    if best is None:
        raise InputError("the tensor's amax leaves no scale to try")
    return GlobalScaleSearch(float(best[1]), best[0], plain, len(factors), best[2])
