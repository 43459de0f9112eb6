"""Sums over tokens for the statistics of one input: float32 products per window, float64 sums over windows."""

from __future__ import annotations

import torch

from halfbyte.calibration.sample import Sample
from halfbyte.statistics import LinearStatistics
from halfbyte.statistics.linear import BLOCK

QUANTILE = 0.99
"""Of the tokens of a window, by their largest magnitude: the robust range."""


STRIP = 256
"""Columns of x·xᵀ that are computed at once: only what is not the mirror image of another."""

Products = tuple[torch.Tensor, torch.Tensor | None]
"""Sums of x·xᵀ and, if wanted, of (x_float − x)·xᵀ over tokens."""


def second_moments(x: torch.Tensor) -> torch.Tensor:
    """xᵀ·x of (tokens, K), exactly symmetric."""
    width = x.shape[1]
    if x.device.type != "cpu" or width < 2 * STRIP:
        return x.T @ x
    found = torch.empty((width, width), dtype=x.dtype)
    for start in range(0, width, STRIP):
        stop = min(width, start + STRIP)
        torch.mm(x[:, start:].T, x[:, start:stop], out=found[start:, start:stop])
        found[start:stop, stop:] = found[stop:, start:stop].T
    return found


def products_of(x: torch.Tensor, kind: str, unquantized: torch.Tensor | None = None) -> Products:
    """The sums over the tokens of inputs (tokens, K) that `Moments.add` adds."""
    x = x.float()
    if kind == "full":
        total = second_moments(x)
    elif kind == "blocks":
        cut = x.reshape(len(x), -1, BLOCK).transpose(0, 1)
        total = cut.transpose(1, 2) @ cut
    else:
        total = x.square().sum(dim=0, dtype=torch.float64)
    return total, None if unquantized is None else (unquantized.float() - x).T @ x


class Moments:
    """Collects the inputs of one linear layer, window by window."""

    def __init__(self, width: int, kind: str, device: torch.device, cross: bool = False) -> None:
        self.kind, self.width = kind, width
        shapes = {"full": (width, width), "blocks": (width // BLOCK, BLOCK, BLOCK), "diagonal": (width,)}
        self.total = torch.zeros(shapes[kind], dtype=torch.float64, device=device)
        self.cross = torch.zeros(shapes["full"], dtype=torch.float64, device=device) if cross else None
        self.sample = None if cross else Sample(width, device)
        self.tokens = 0
        self.amax = torch.zeros((), device=device)
        self.range = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, x: torch.Tensor, unquantized: torch.Tensor | None = None, products: Products | None = None) -> None:
        """Add inputs (tokens, K). unquantized: the inputs of the same tokens in the unquantized model. products: what
        `products_of` gave for them, if a thread has computed it before."""
        x = x.float()
        total, cross = products_of(x, self.kind, unquantized) if products is None else products
        self.total += total
        if self.cross is not None and cross is not None:
            self.cross += cross
        if self.sample is not None:
            self.sample.add(x)
        largest = x.abs().amax(dim=1)
        self.amax = torch.maximum(self.amax, largest.max())
        self.range += len(x) * torch.quantile(largest.double(), QUANTILE)
        self.tokens += len(x)

    def means(self) -> Products:
        """The mean of x·xᵀ (or its blocks, or its diagonal) and of (x_float − x)·xᵀ, in float64, where they are."""
        count = max(1, self.tokens)
        return self.total / count, None if self.cross is None else self.cross / count

    def finish(self) -> LinearStatistics:
        """The means."""
        count = max(1, self.tokens)
        mean = (self.total / count).float().cpu().numpy()
        part = {"full": "second_moment", "blocks": "blocks", "diagonal": "diagonal"}[self.kind]
        cross = None if self.cross is None else (self.cross / count).float().cpu().numpy()
        return LinearStatistics(
            tokens=self.tokens,
            width=self.width,
            input_amax=float(self.amax),
            input_range=float(self.range) / count if self.tokens else None,
            cross_moment=cross,
            **{part: mean},
            **({} if self.sample is None else self.sample.arrays()),
        )
