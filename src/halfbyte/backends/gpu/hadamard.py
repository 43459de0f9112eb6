"""The Hadamard transform of an operand, before it is quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfbyte.backends.gpu.constants import Constants
from halfbyte.backends.gpu.driver.commands import Command, Program, Slot
from halfbyte.backends.gpu.driver.run import run
from halfbyte.backends.gpu.driver.triton_kernels import triton_kernel
from halfbyte.backends.gpu.launch import CODES, X
from halfbyte.backends.gpu.operand import LANES, dtype_name_of
from halfbyte.backends.numbering import DTYPE_NUMBERS
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts.hadamard import GROUP, SIGNS

if TYPE_CHECKING:
    import torch

MINUS = sum(1 << index for index, sign in enumerate(SIGNS) if sign < 0)
"""The sign vector as bits."""


def rotated(x: torch.Tensor, random_signs: bool) -> torch.Tensor:
    """A contiguous copy of a (rows, K) matrix with its groups of sixteen transformed; K is a multiple of sixteen."""
    import torch

    rows, width = x.shape
    groups = width // GROUP
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    constants: Constants = {
        "B": LANES, "DTYPE": DTYPE_NUMBERS[dtype_name_of(x.dtype)], "SIGNS": MINUS if random_signs else 0,
        "ROWS_FIRST": abs(x.stride(0)) < abs(x.stride(1)),
    }  # fmt: skip
    kernel = triton_kernel("hadamard.rotate", constants, LANES // 32)
    arguments = (X, CODES, rows, groups, x.stride(0), x.stride(1))
    program = Program((Command(kernel, (ceil_div(rows * groups, LANES), 1), arguments),))
    run(program, x.device, {Slot.X: x.view(torch.int32 if x.dtype == torch.float32 else torch.int16), Slot.CODES: out})
    return out
