"""What rounding to a format costs each column of a matrix, on the CPU or on a GPU, with the same bits.

Rows are summed in order in float64. The matrix stays; each call scales its columns by powers of two and rounds it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from halfbyte.contracts import Contract
from halfbyte.formats import BlockFormat
from halfbyte.quantize import dequantize, quantize
from halfbyte.smoothing import powers

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

STRIP = 1 << 17
"""Numbers of a matrix that are rounded at once on the CPU: what is made of them stays in the cache."""


class Errors(Protocol):
    """The errors of one matrix."""

    def __call__(self, exponents: npt.NDArray[Any]) -> F64:
        """(K,): Σ over rows of the squared error of column·2^exponent, times the row's weight."""


class HostErrors:
    """On the CPU, by one thread."""

    def __init__(self, values: F32, largest: F32, weights: F64 | None, format: BlockFormat, contract: Contract) -> None:
        """largest: of each column, from which the tensor scale is made. weights: one per row; None: all 1."""
        self.values, self.largest = values, largest
        self.weights = None if weights is None else np.ascontiguousarray(weights.reshape(-1))
        self.format, self.contract = format, contract
        self.rows = max(1, STRIP // max(1, values.shape[1]))

    def __call__(self, exponents: npt.NDArray[Any]) -> F64:
        factors = powers(exponents)
        amax = amax_of(self.largest, factors)
        width = self.values.shape[1]
        if self.format.has_global and amax == 0:
            return np.zeros(width)
        sums = np.zeros((self.rows + 1, width))
        """The sum so far, and the squares that are added to it in order."""
        for start in range(0, len(self.values), self.rows):
            scaled = self.values[start : start + self.rows] * factors
            lost = np.asarray(dequantize(self._rounded(scaled, amax), threads=1), np.float32)
            lost -= scaled
            squares = sums[1 : 1 + len(lost)]
            np.copyto(squares, lost)
            squares *= squares
            if self.weights is not None:
                squares *= self.weights[start : start + len(lost), None]
            sums[0] = sums[: 1 + len(lost)].sum(axis=0)
        return np.array(sums[0])

    def _rounded(self, scaled: F32, amax: np.float32) -> Any:
        if not self.format.has_global:
            return quantize(scaled, self.format, self.contract, threads=1)
        return quantize(scaled, self.format, self.contract, "amax", global_amax=amax, threads=1)


class DeviceErrors:
    """On a GPU."""

    def __init__(self, host: HostErrors, device: str) -> None:
        import torch

        self.host, self.device = host, device
        self.values = torch.from_numpy(np.ascontiguousarray(host.values)).to(device)
        self.weights = None if host.weights is None else torch.from_numpy(host.weights).to(device)

    def __call__(self, exponents: npt.NDArray[Any]) -> F64:
        import torch

        from halfbyte.backends.gpu import squared_differences

        host, factors = self.host, powers(exponents)
        amax = amax_of(host.largest, factors)
        if host.format.has_global and amax == 0:
            return np.zeros(self.values.shape[1])
        scaled = self.values * torch.from_numpy(factors).to(self.device)
        if host.format.has_global:
            found = quantize(scaled, host.format, host.contract, "amax", global_amax=float(amax))
        else:
            found = quantize(scaled, host.format, host.contract)
        rounded = torch.as_tensor(dequantize(found, torch.float32))
        return np.asarray(squared_differences(scaled, rounded, self.weights).cpu().numpy(), np.float64)


def amax_of(largest: F32, factors: F32) -> np.float32:
    """The largest magnitude of scaled columns."""
    return np.float32((largest * factors).max(initial=0))
