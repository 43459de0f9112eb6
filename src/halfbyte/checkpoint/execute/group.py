"""Units that share a tensor scale, while workers find it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from halfbyte.casting.optimal import Choice
from halfbyte.casting.window import Exponents, join
from halfbyte.checkpoint.execute.engine import TensorScales
from halfbyte.checkpoint.execute.writer import Stopped


@dataclass
class Group:
    """Units that share a tensor scale, and the scale once it is known."""

    modules: tuple[str, ...]
    ready: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    claimed: bool = False
    pending: int = 0
    """Pieces whose amax is still to come."""
    amax: np.float32 = np.float32(0)
    exponents: Exponents | None = None
    """MXFP4: those of the blocks that are not zero."""
    choice: Choice | None = None
    """MXFP4: the global scale that the cast chose."""
    scales: TensorScales | None = None
    bad: bool = False
    """Some member has values that no scale fits: none of the units is written."""

    def add(self, amax: np.float32, exponents: Exponents | None = None) -> None:
        """Take in what one piece found. NaN stays NaN."""
        with self.lock:
            self.amax = np.maximum(self.amax, amax)
            self.exponents = join([self.exponents, exponents])

    def wait(self, stop: threading.Event) -> None:
        while not self.ready.wait(0.2):
            if stop.is_set():
                raise Stopped
