"""Inputs of some tokens as they are, and the largest magnitude of every input: for smoothing and input scales."""

from __future__ import annotations

import torch

from halfbyte.statistics.linear import F32, SAMPLED

SEED = 0


class Sample:
    """Draws tokens at random, each as likely as any other; the same ones in every run over the same windows."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.largest = torch.zeros(width, device=device)
        self._rows = torch.zeros((0, width), device=device)
        self._draws = torch.zeros(0)
        self._generator = torch.Generator().manual_seed(SEED)

    def add(self, x: torch.Tensor) -> None:
        """Take in inputs (tokens, K)."""
        self.largest = torch.maximum(self.largest, x.abs().amax(dim=0))
        draws = torch.cat([self._draws, torch.rand(len(x), generator=self._generator)])
        kept = torch.sort(torch.topk(draws, min(SAMPLED, len(draws))).indices).values
        if len(kept) and int(kept[-1]) >= len(self._draws):
            old = kept[kept < len(self._draws)]
            new = kept[kept >= len(self._draws)] - len(self._draws)
            self._rows = torch.cat([self._rows[old.to(x.device)], x[new.to(x.device)].float()])
        self._draws = draws[kept]

    def arrays(self) -> dict[str, F32]:
        """As fields of LinearStatistics."""
        return {
            "channel_amax": self.largest.float().cpu().numpy(),
            "sample": self._rows.contiguous().cpu().numpy(),
        }
