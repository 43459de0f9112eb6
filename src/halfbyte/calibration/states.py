"""Hidden states of all windows: in memory up to a limit, beyond it in a file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable

import numpy as np
import torch

MEMORY = 8 << 30
"""Bytes of hidden states that are kept in memory."""


class States:
    """One tensor per window, all of one shape."""

    def __init__(self, windows: Iterable[torch.Tensor], count: int, limit: int = MEMORY) -> None:
        self._kept: torch.Tensor | None = None
        self.device = torch.device("cpu")
        for number, one in enumerate(windows):
            if self._kept is None:
                self.device = one.device
                self._kept = self._memory((count, *one.shape), limit)
            self._kept[number].copy_(one)
        self.count = count

    def _memory(self, shape: tuple[int, ...], limit: int) -> torch.Tensor:
        size = 4 * int(np.prod(shape))
        if size <= limit:
            return torch.empty(shape, dtype=torch.float32, device=self.device)
        with tempfile.TemporaryFile(prefix="halfbyte-states-") as file:  # it lives as long as the mapping
            return torch.from_numpy(np.memmap(file, np.float32, "w+", shape=shape))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> torch.Tensor:
        assert self._kept is not None
        return self._kept[number].to(self.device)

    def replace(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put the function of every window in its place."""
        assert self._kept is not None
        for number in range(self.count):
            self._kept[number].copy_(function(self[number]))
