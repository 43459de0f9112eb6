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


def checked_headroom(headroom: object, of: str = "Optimal") -> tuple[float, ...] | None:
    """Headrooms in ascending order, without repeats: finite numbers of at least 1."""
    if headroom is None:
        return None
    given = tuple(headroom) if isinstance(headroom, tuple | list) else (headroom,)
    if not given or not all(isinstance(h, int | float | np.floating) and LEAST <= h <= MOST for h in given):
        raise InputError(
            f"headroom of {of} is a number from {LEAST} to {MOST}, several of them, or None, not {headroom!r}"
        )
    return tuple(sorted({float(h) for h in given}))


LEAST, MOST = 1, 64
"""The headrooms that may be asked for. Beyond 8, small blocks would lose most of their scales."""


@dataclass(frozen=True, eq=False)
class Optimal(Method):
    """The scale of the format with the least squared error. If two are equal, the smaller scale wins.

    `weights`: one non-negative weight per position of the last axis (a diagonal Hessian, an importance matrix). With
    weights, the weighted squared error is minimised. All-zero blocks, and blocks with NaN or Inf, keep the scale of
    `amax`. The weights are copied.

    `headroom`: by how much the tensor's amax is multiplied before the contract derives the tensor scale of NVFP4 from
    it. Block scales can then exceed the one that the amax itself needs. One number of at least 1, or several, of which
    the best for the tensor is taken (docs/methods.md). None: 1 and 2; also 448/256, if the contract's 4over6 has it and
    the tensor is small or a sample of its blocks speaks for it. An amax that the caller gives is used as it is.
    """

    weights: object = None
    headroom: float | tuple[float, ...] | None = None
    name: ClassVar[str] = "optimal"
    everywhere: ClassVar[bool] = True
    one_row: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "headroom", checked_headroom(self.headroom))
        if self.weights is None:
            return
        weights = checked_weights(self.weights, "weights of Optimal")
        if weights.ndim != 1:
            raise InputError("weights of Optimal are one-dimensional: one for each position of the last axis")
        object.__setattr__(self, "weights", frozen_copy(weights))

    def __eq__(self, other: object) -> bool:
        plain = isinstance(other, Optimal) and self.weights is None and other.weights is None
        return (plain and self.headroom == other.headroom) or self is other  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((Optimal, self.headroom)) if self.weights is None else object.__hash__(self)

    def check_width(self, width: int, block: int) -> None:
        weights = self.channel_weights
        if weights is not None and weights.size != width:
            raise InputError(f"Optimal has {weights.size} weights, but the last axis has {width} elements")

    @property
    def channel_weights(self) -> npt.NDArray[np.float32] | None:
        """The weights as an array."""
        return None if self.weights is None else np.asarray(self.weights, dtype=np.float32)
