"""The tensor-level numbers of a call: where they lie in slot SMALL."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.backends.gpu.constants import NUMBERS, WORDS
from halfbyte.backends.gpu.driver.commands import Address, Slot
from halfbyte.codec.blocks import ceil_div

FLOAT = 4
"""Bytes of a float32."""

ALIGNED = 8
"""Float32 numbers in 32 bytes."""


@dataclass(frozen=True)
class Small:
    """Where things lie in slot SMALL: for each group the prepared numbers, the stored scale, the multiplier; parts.

    The prepared numbers come first. All places are counted in float32 numbers.
    """

    groups: int
    parts: int = 0
    """Partial amaxes of all groups."""
    scales: int = 0
    """Tensor-level scales whose headroom is chosen."""
    candidates: int = 0
    """Of each of them."""
    samples: int = 0
    """Samples of blocks, each with a total for every candidate."""

    @property
    def stored(self) -> int:
        return self.groups * NUMBERS

    @property
    def multiplier(self) -> int:
        return self.groups * (NUMBERS + 1)

    @property
    def partial(self) -> int:
        return self.groups * (NUMBERS + 2)

    @property
    def least(self) -> int:
        """Beside the partial amaxes, if a headroom is chosen: the smallest amax of a block of each part."""
        return self.partial + self.parts

    @property
    def totals(self) -> int:
        """WORDS int64 for each candidate, at a multiple of 32 bytes."""
        return ceil_div(self.least + self.parts, ALIGNED) * ALIGNED

    @property
    def sampled(self) -> int:
        """The same for each candidate over a sample, at a multiple of 32 bytes."""
        return ceil_div(self.totals + 2 * WORDS * self.scales * self.candidates, ALIGNED) * ALIGNED

    @property
    def candidate_numbers(self) -> int:
        return ceil_div(self.sampled + 2 * WORDS * self.samples * self.candidates, ALIGNED) * ALIGNED

    @property
    def candidate_stored(self) -> int:
        return self.candidate_numbers + self.scales * self.candidates * NUMBERS

    @property
    def candidate_multiplier(self) -> int:
        return self.candidate_stored + self.scales * self.candidates

    @property
    def done(self) -> int:
        """How many programs of a scale have finished: an int32."""
        return self.candidate_multiplier + self.scales * self.candidates

    @property
    def lowest(self) -> int:
        """The smallest amax of a block of all that have a scale: an int32."""
        return self.done + self.scales

    @property
    def floats(self) -> int:
        return ceil_div(self.lowest + self.scales, ALIGNED) * ALIGNED if self.candidates else self.partial + self.parts

    def address(self, place: int) -> Address:
        return Address(Slot.SMALL, FLOAT * place)
