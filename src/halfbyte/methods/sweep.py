"""Model-Optimizer's sweep: every positive E4M3 scale is tried on every block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from halfbyte.errors import InputError
from halfbyte.methods.spec import Method, refuse_arrays


@dataclass(frozen=True)
class Sweep(Method):
    """Try all 126 positive E4M3 scales in ascending order and keep the first with the least squared error.

    `fused`: use the candidate scales of Model-Optimizer's fused kernel, which skip a rounding to E4M3, instead of those
    of its eager search.
    """

    fused: bool = False
    name: ClassVar[str] = "sweep"

    def __post_init__(self) -> None:
        refuse_arrays(self)
        if not isinstance(self.fused, bool):
            raise InputError(f"fused of Sweep is True or False, not {self.fused!r}")
