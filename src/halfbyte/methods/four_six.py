"""Four over six: scale each block so that its largest magnitude becomes 6, or 4, whichever gives the smaller error.

E2M1 has no value between 4 and 6. If many numbers of a block are near 5/6 of its largest magnitude, a scale 1.5 times
as large, which maps the largest magnitude to 4, gives a smaller error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from halfbyte.errors import InputError, UnknownNameError, unknown_name
from halfbyte.methods.spec import Method, refuse_arrays

BlockError = Literal["mae", "mse", "abs_max"]


@dataclass(frozen=True)
class FourSix(Method):
    """Map the amax of a block to 6 or to 4, whichever gives the smaller error; a tie keeps 6.

    `error`: mean absolute ("mae"), mean squared ("mse") or largest ("abs_max"; only fouroversix has it).
    `e4m3_max`: the E4M3 value that the tensor's amax is scaled to. 448 is the format's largest; 256 leaves room to
    multiply every block scale by 1.5.
    `fast_error`: measure the error in the scaled domain (one product per element) instead of on decoded values.
    """

    error: BlockError = "mae"
    e4m3_max: int = 448
    fast_error: bool = False
    name: ClassVar[str] = "four_six"

    def __post_init__(self) -> None:
        refuse_arrays(self)
        if self.error not in get_args(BlockError):
            raise unknown_name("4over6 error", self.error, get_args(BlockError))
        if self.e4m3_max not in (448, 256):
            raise UnknownNameError(f"e4m3_max is 448 or 256, not {self.e4m3_max!r}")
        if not isinstance(self.fast_error, bool):
            raise InputError(f"fast_error of FourSix is True or False, not {self.fast_error!r}")
