"""What is known of the inputs x of one linear layer: means over tokens, and how large they get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.errors import InputError

F32 = npt.NDArray[np.float32]

MOMENTS = ("full", "blocks", "diagonal")
"""How much of the second moments is kept, from most to least."""

BLOCK = 16
"""Inputs per block of `blocks`."""

ARRAYS = ("second_moment", "blocks", "diagonal", "cross_moment", "channel_amax", "sample")
"""The arrays that a folder stores, by the names of the fields."""

SAMPLED = 256
"""Tokens of `sample`, at most."""


@dataclass(frozen=True, eq=False)
class LinearStatistics:
    """Statistics of the inputs of one linear layer of K inputs. Means over tokens, not sums.

    The arrays are checked: of the right shape, finite, no negative number on a diagonal.
    """

    tokens: int
    """Inputs that were seen: tokens, or those of one expert."""
    width: int
    """K."""
    input_amax: float
    """The largest magnitude of an input; 0 if not known."""
    input_range: float | None = None
    """A robust range: the mean over windows of the 0.99 quantile over tokens of a token's largest magnitude."""
    second_moment: F32 | None = None
    """(K, K): the mean of x·xᵀ."""
    blocks: F32 | None = None
    """(K/16, 16, 16): its squares on the diagonal."""
    diagonal: F32 | None = None
    """(K,): its diagonal, the mean of x²."""
    cross_moment: F32 | None = None
    """(K, K): the mean of (x_float − x)·xᵀ, for inputs that come from quantized layers."""
    channel_amax: F32 | None = None
    """(K,): the largest magnitude of each input."""
    sample: F32 | None = None
    """(at most 256, K): the inputs of some tokens, drawn at random."""

    def check(self, name: str, width: int | None = None) -> None:
        """Raise an InputError if an array has the wrong shape or cannot be a mean of squares.

        width: the number of inputs that the layer has by its weight.
        """
        if width is not None and width != self.width:
            raise InputError(
                f"{name}: the statistics are those of {self.width} inputs, but its weight has {width}; they belong to "
                "another model"
            )
        if self.tokens < 0 or self.width < 1:
            raise InputError(f"{name}: statistics of {self.tokens} tokens and {self.width} inputs are none")
        if not np.isfinite(self.input_amax) or self.input_amax < 0:
            raise InputError(f"{name}: input_amax is {self.input_amax}; it must be a finite number, 0 or more")
        if self.input_range is not None and not 0 <= self.input_range < np.inf:
            raise InputError(f"{name}: input_range is {self.input_range}; it must be a finite number, 0 or more")
        shapes = self.shapes(self.width)
        if self.sample is not None and self.sample.ndim == 2:
            shapes["sample"] = (len(self.sample), self.width)
        for part, array in self.arrays():
            if array.dtype != np.float32 or array.shape != shapes[part]:
                raise InputError(
                    f"{name}: {part} is {array.dtype} of shape {array.shape}; {self.width} inputs need float32 of "
                    f"shape {shapes[part]}"
                )
            if not np.isfinite(array.sum(dtype=np.float64)) and not np.isfinite(array).all():
                bad = int((~np.isfinite(array)).sum())
                raise InputError(f"{name}: {part} of shape {array.shape} holds {bad} NaN or Inf; calibrate again")
        diagonal = self.mean_squares()
        if diagonal is not None and (diagonal < 0).any():
            raise InputError(f"{name}: a mean of squares is negative ({diagonal.min()}); the file is damaged")
        if self.channel_amax is not None and (self.channel_amax < 0).any():
            raise InputError(f"{name}: a largest magnitude is negative ({self.channel_amax.min()}); damaged")

    def arrays(self) -> Iterator[tuple[str, F32]]:
        """(field, array) of those that are there."""
        for part in ARRAYS:
            array = getattr(self, part)
            if array is not None:
                yield part, array

    @staticmethod
    def shapes(width: int) -> dict[str, tuple[int, ...]]:
        """The shape of each array, for that many inputs; of the sample, the largest."""
        square = (width, width)
        blocks = (width // BLOCK, BLOCK, BLOCK)
        moments = {"second_moment": square, "blocks": blocks, "diagonal": (width,), "cross_moment": square}
        return {**moments, "channel_amax": (width,), "sample": (SAMPLED, width)}

    def mean_squares(self) -> F32 | None:
        """The mean of x² of each input, from whichever array has it."""
        if self.diagonal is not None:
            return self.diagonal
        if self.second_moment is not None:
            return np.ascontiguousarray(np.diagonal(self.second_moment))
        if self.blocks is not None:
            return np.ascontiguousarray(np.diagonal(self.blocks, axis1=1, axis2=2)).reshape(-1)
        return None

    def divided(self, exponents: npt.NDArray[np.int8]) -> LinearStatistics:
        """The statistics of x / 2^exponents. The largest magnitude is known only if that of each input is."""
        p = np.ldexp(np.float32(1), -exponents.astype(np.int32)).astype(np.float32)
        square = p[:, None] * p
        arrays: dict[str, F32] = {}
        for part, array in self.arrays():
            match part:
                case "second_moment" | "cross_moment":
                    factors = square
                case "blocks":
                    factors = p.reshape(-1, BLOCK, 1) * p.reshape(-1, 1, BLOCK)
                case "diagonal":
                    factors = p * p
                case _:
                    factors = p
            arrays[part] = array * factors
        largest = arrays.get("channel_amax")
        amax = 0.0 if largest is None else float(largest.max(initial=0))
        return LinearStatistics(self.tokens, self.width, amax, None, **arrays)

    def block_moments(self) -> F32 | None:
        """The 16 × 16 squares on the diagonal: stored, or cut from the full matrix. None from a diagonal alone."""
        if self.blocks is not None or self.second_moment is None or self.width % BLOCK:
            return self.blocks
        count = self.width // BLOCK
        squares = self.second_moment.reshape(count, BLOCK, count, BLOCK)
        return np.ascontiguousarray(squares[np.arange(count), :, np.arange(count), :])
