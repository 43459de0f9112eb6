"""Sums over tokens for the statistics of one input: float32 products per window, float64 sums over windows."""

from __future__ import annotations

import torch

from halfbyte.calibration.sample import Sample
from halfbyte.statistics import LinearStatistics
from halfbyte.statistics.linear import BLOCK

QUANTILE = 0.99
"""Of the tokens of a window, by their largest magnitude: the robust range."""


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

    def add(self, x: torch.Tensor, unquantized: torch.Tensor | None = None) -> None:
        """Add inputs (tokens, K). unquantized: the inputs of the same tokens in the unquantized model."""
        x = x.float()
        if self.kind == "full":
            self.total += (x.T @ x).double()
        elif self.kind == "blocks":
            cut = x.reshape(len(x), -1, BLOCK).transpose(0, 1)
            self.total += (cut.transpose(1, 2) @ cut).double()
        else:
            self.total += x.square().sum(dim=0, dtype=torch.float64)
        if self.cross is not None and unquantized is not None:
            self.cross += ((unquantized.float() - x).T @ x).double()
        if self.sample is not None:
            self.sample.add(x)
        largest = x.abs().amax(dim=1)
        self.amax = torch.maximum(self.amax, largest.max())
        self.range += len(x) * torch.quantile(largest.double(), QUANTILE)
        self.tokens += len(x)

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
