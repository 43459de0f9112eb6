"""Launch of the random Hadamard transform: the operand of a contract that quantizes a rotated copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfbyte.backends.gpu.launch import LANES, options, short_name
from halfbyte.backends.gpu.rules import DTYPE_NUMBERS
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts.hadamard import GROUP, SIGNS

if TYPE_CHECKING:
    import torch

MINUS = sum(1 << index for index, sign in enumerate(SIGNS) if sign < 0)
"""The sign vector as bits."""


def rotated(x: torch.Tensor, random_signs: bool) -> torch.Tensor:
    """A contiguous copy of a (rows, K) matrix with its groups of sixteen transformed; K is a multiple of sixteen."""
    import torch

    from halfbyte.backends.gpu.triton import hadamard as hadamard_kernels

    rows, width = x.shape
    groups = width // GROUP
    integers = torch.int32 if x.dtype == torch.float32 else torch.int16
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    hadamard_kernels.rotate[(ceil_div(rows * groups, LANES),)](
        x.view(integers), out.view(torch.int32), rows, groups, x.stride(0), x.stride(1),
        B=LANES, DTYPE=DTYPE_NUMBERS[short_name(x.dtype)], SIGNS=MINUS if random_signs else 0,
        ROWS_FIRST=abs(x.stride(0)) < abs(x.stride(1)), **options(),
    )  # fmt: skip
    return out
