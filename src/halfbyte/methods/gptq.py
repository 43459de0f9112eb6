"""GPTQ: codes chosen column after column, each rounding error made good by the columns that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from halfbyte.errors import InputError, unknown_name
from halfbyte.methods.optimal import checked_headroom
from halfbyte.methods.spec import Method, refuse_arrays

ORDERS = ("falling", "given")
MOST_SWEEPS = 10_000
"""Codes settle after a few; each takes as long as the feedback itself."""


@dataclass(frozen=True)
class Gptq(Method):
    """Feedback of rounding errors through the second moments of a layer's inputs (docs/gptq.md).

    It is a record of options: `hb.gptq` and `halfbyte convert --method gptq` compute it, because it needs statistics.

    `damping`: share of the mean second moment that is added to the diagonal. `order`: "falling" decides the blocks with
    the largest second moments first; "given" goes from left to right. `asymmetry`: how far the target moves towards the
    outputs of the unquantized model, if there are cross moments. `descent`: sweeps of single steps after the feedback.
    `headroom`: by how much the amax is multiplied that NVFP4's tensor scale comes from, as in `Optimal`; None, or
    several: what `Optimal` would choose for the weight.
    """

    damping: float = 0.05
    order: Literal["falling", "given"] = "falling"
    asymmetry: float = 0.5
    descent: int = 0
    headroom: float | tuple[float, ...] | None = None
    name: ClassVar[str] = "gptq"
    needs: ClassVar[str] = "second moments of the inputs: hb.gptq(weight, second_moment, …) takes them"

    def __post_init__(self) -> None:
        refuse_arrays(self)
        if self.order not in ORDERS:
            raise unknown_name("order of blocks", self.order, ORDERS)
        for name, most in (("damping", 1.0), ("asymmetry", 2.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                raise InputError(f"{name} must be a number from 0 to {most:g}, not {value!r}")
            if not math.isfinite(value):
                raise InputError(f"{name} must be finite, not {value!r}")
        whole = isinstance(self.descent, int) and not isinstance(self.descent, bool)
        if not whole or not 0 <= self.descent <= MOST_SWEEPS:
            raise InputError(f"descent is a number of sweeps, from 0 to {MOST_SWEEPS:,}, not {self.descent!r}")
        object.__setattr__(self, "headroom", checked_headroom(self.headroom, "Gptq"))
