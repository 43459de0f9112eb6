"""Hidden states of all windows, in batches: in memory up to a limit, beyond it in a file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator

import numpy as np
import torch

from halfbyte.calibration.parallel import Workers

MEMORY = 8 << 30
"""Bytes of hidden states that are kept in memory."""
BATCH_ON_GPU = 32768
"""Tokens that a GPU takes at once. The CPU takes one window at a time."""


def batches_of(tokens: torch.Tensor, device: torch.device, apart: bool = False) -> list[torch.Tensor]:
    """Windows (windows, length) in the batches in which a device takes them. apart: one by one on every device."""
    size = 1 if apart or device.type == "cpu" else max(1, BATCH_ON_GPU // tokens.shape[1])
    return list(torch.split(tokens, size))


class States:
    """One tensor (windows, length, width) per batch."""

    def __init__(
        self, embed: Callable[[torch.Tensor], torch.Tensor], batches: list[torch.Tensor], limit: int = MEMORY
    ) -> None:
        self.count = len(batches)
        self._places: list[slice] = []
        self._kept: torch.Tensor | None = None
        self._in_file = False
        self.device = torch.device("cpu")
        total, start = sum(len(one) for one in batches), 0
        for one in batches:
            states = embed(one)
            if self._kept is None:
                self.device = states.device
                self._kept = self._memory((total, *states.shape[1:]), limit)
            self._places.append(slice(start, start + len(one)))
            start += len(one)
            self[len(self._places) - 1] = states

    def _memory(self, shape: tuple[int, ...], limit: int) -> torch.Tensor:
        size = 4 * int(np.prod(shape))
        if size <= limit:
            return torch.empty(shape, dtype=torch.float32, device=self.device)
        self._in_file = True
        with tempfile.TemporaryFile(prefix="halfbyte-states-") as file:  # it lives as long as the mapping
            return torch.from_numpy(np.memmap(file, np.float32, "w+", shape=shape))

    @property
    def tokens(self) -> int:
        return 0 if self._kept is None else self._kept.shape[0] * self._kept.shape[1]

    @property
    def width(self) -> int:
        return 0 if self._kept is None else self._kept.shape[2]

    @property
    def in_memory(self) -> int:
        """Bytes, without those in a file."""
        return 0 if self._kept is None or self._in_file else self._kept.nbytes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> torch.Tensor:
        assert self._kept is not None
        return self._kept[self._places[number]].to(self.device)

    def __setitem__(self, number: int, states: torch.Tensor) -> None:
        assert self._kept is not None
        self._kept[self._places[number]].copy_(states)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[number] for number in range(self.count))

    def replace(self, function: Callable[[torch.Tensor], torch.Tensor], workers: Workers | None = None) -> None:
        """Put the function of every batch in its place."""
        workers = workers or Workers(1)
        workers.each(self.count, lambda number: function(self[number]), self.__setitem__)
