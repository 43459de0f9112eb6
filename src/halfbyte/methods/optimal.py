"""The best scale of a block: by definition, every scale that the format can represent is tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from halfbyte.errors import InputError
from halfbyte.methods.spec import Method, frozen_copy, numbers


def checked_weights(weights: object, what: str) -> npt.NDArray[np.float32]:
    """Weights as float32: finite and not negative."""
    array = numbers(weights, np.float32, what)
    if array.size == 0 or not np.isfinite(array).all() or (array < 0).any():
        raise InputError(f"{what} must be finite, not negative and not empty")
    return array


@dataclass(frozen=True, eq=False)
class Optimal(Method):
    """The scale of the format with the least squared error. If two are equal, the smaller scale wins.

    `weights`: one non-negative weight per position of the last axis (a diagonal Hessian, an importance matrix). With
    weights, the weighted squared error is minimised. All-zero blocks, and blocks with NaN or Inf, keep the scale of
    `amax`. The weights are copied.
    """

    weights: object = None
    name: ClassVar[str] = "optimal"
    everywhere: ClassVar[bool] = True
    one_row: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.weights is None:
            return
        weights = checked_weights(self.weights, "weights of Optimal")
        if weights.ndim != 1:
            raise InputError("weights of Optimal are one-dimensional: one for each position of the last axis")
        object.__setattr__(self, "weights", frozen_copy(weights))

    def __eq__(self, other: object) -> bool:
        both = isinstance(other, Optimal) and self.weights is None and other.weights is None
        return both or self is other

    def __hash__(self) -> int:
        return hash(Optimal) if self.weights is None else object.__hash__(self)

    def check_width(self, width: int, block: int) -> None:
        weights = self.channel_weights
        if weights is not None and weights.size != width:
            raise InputError(f"Optimal has {weights.size} weights, but the last axis has {width} elements")

    @property
    def channel_weights(self) -> npt.NDArray[np.float32] | None:
        """The weights as an array."""
        return None if self.weights is None else np.asarray(self.weights, dtype=np.float32)
