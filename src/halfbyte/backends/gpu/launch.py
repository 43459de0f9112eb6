"""One quantization on a device, as the commands see it: where blocks lie, what is written, the kernels' constants.

The tensors themselves are the slots of a call (driver/commands.py). Only their shapes matter here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halfbyte.backends.gpu.choose import ChosenKernel, KernelKind
from halfbyte.backends.gpu.constants import (
    FLAT,
    GROUP_OF_BLOCK,
    GROUP_OF_PROGRAM,
    LISTED,
    ONE_GROUP,
    ROWS,
    TILES,
    Constants,
)
from halfbyte.backends.gpu.driver.commands import Address, Arguments, Command, Slot
from halfbyte.backends.gpu.driver.triton_kernels import triton_kernel
from halfbyte.backends.gpu.operand import LANES, assembly
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import MXRule
from halfbyte.methods import Hessian, Method, Optimal
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch

SEARCH_LANES = 32
"""Blocks per program of the searches, whose lanes all wait for the one that takes longest."""

SEARCHES = (KernelKind.OPTIMAL, KernelKind.HESSIAN, KernelKind.QWANTIZE, KernelKind.MX_SEARCH, KernelKind.MX_QWANTIZE)


X, CODES, SCALES, NUMBERS = Address(Slot.X), Address(Slot.CODES), Address(Slot.SCALES), Address(Slot.SMALL)
"""The operand (or the table of listed tensors), what is written, and the prepared numbers, which SMALL begins with."""


@dataclass(frozen=True)
class Matrix:
    """The shape of an operand: what its commands depend on."""

    rows: int
    width: int
    row_quads: int
    """The distance between rows, in units of sixteen bytes."""
    contiguous: bool
    unpadded: int | None = None
    """Elements of the tensor itself, if rows and width have been padded."""

    @property
    def elements(self) -> int:
        return self.rows * self.width if self.unpadded is None else self.unpadded


@dataclass(frozen=True)
class Source:
    """Where the blocks of an operand lie, for the kernels."""

    map: int
    groups: int
    """How many tensor-level scales there are."""
    group_blocks: int
    """Blocks that share one."""
    blocks: int
    """All of them; where tensors are listed, programs per tensor."""
    columns: int
    row_quads: int
    """The distance between rows, in units of sixteen bytes."""
    programs: int | None = None
    """Where tensors are listed: programs of all of them."""
    all_blocks: int | None = None
    """Where tensors are listed: blocks of all of them."""


def source_of(x: Matrix, request: Request, group_rows: int, swizzled: bool) -> Source:
    """The blocks of one matrix, with a tensor-level scale for every `group_rows` rows."""
    columns = x.width // request.format.block
    by_rows = swizzled or not x.contiguous or weighs_columns(request.method)
    map_ = TILES if request.tile[0] != 1 else ROWS if by_rows else FLAT
    return Source(map_, x.rows // group_rows, group_rows * columns, x.rows * columns, columns, x.row_quads)


def weighs_columns(method: Method) -> bool:
    """Whether a search has numbers for each column of blocks."""
    return isinstance(method, Hessian) or (isinstance(method, Optimal) and method.weights is not None)


def group_kind(groups: int, group_blocks: int, lanes: int) -> int:
    """Whether a program's blocks share a tensor-level scale."""
    if groups == 1:
        return ONE_GROUP
    return GROUP_OF_PROGRAM if group_blocks % lanes == 0 else GROUP_OF_BLOCK


@dataclass(frozen=True)
class Launch:
    """What the launch of a family's kernels needs."""

    kernel: ChosenKernel
    request: Request
    source: Source
    device: torch.device
    swizzled: bool = False

    @property
    def lanes(self) -> int:
        """Blocks per program."""
        return SEARCH_LANES if self.kernel.family in SEARCHES else LANES

    @property
    def rows(self) -> int:
        return self.source.blocks // self.source.columns

    @functools.cached_property
    def group(self) -> int:
        return group_kind(self.source.groups, self.source.group_blocks, self.lanes)

    @property
    def programs(self) -> int:
        """Programs of a kernel that takes blocks one by one, or tile by tile."""
        source, lanes = self.source, self.lanes
        if source.programs is not None:
            return source.programs
        if source.map == TILES:
            return (self.rows // 16) * ceil_div(source.columns, lanes // 16)
        return ceil_div(source.blocks, lanes)

    @property
    def column_programs(self) -> int:
        """Programs of a kernel that takes one column of blocks each."""
        return self.source.columns * ceil_div(self.rows, self.lanes)

    @property
    def outputs(self) -> tuple[Address, ...]:
        """Codes as words, scale bytes, and for NVFP4 the prepared numbers."""
        return (CODES, SCALES) if isinstance(self.kernel.rule, MXRule) else (CODES, SCALES, NUMBERS)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        source = self.source
        return source.blocks, source.columns, source.row_quads, source.group_blocks

    def constants(self, *left_out: str) -> Constants:
        """What an NVFP4 kernel is compiled with; `left_out`: names that the kernel does not have."""
        shares_numbers = self.group != GROUP_OF_BLOCK or self.source.map == LISTED
        found: Constants = {
            "B": self.lanes, "MAP": self.source.map, "GROUP": self.group, "SWIZZLED": self.swizzled,
            "SHORT": self.kernel.short and shares_numbers, "ASM": assembly(self.device),
            **self.kernel.constants,
        }  # fmt: skip
        for name in left_out:
            del found[name]
        return found

    def command(self, name: str, programs: int, arguments: Arguments, constants: Constants | None = None) -> Command:
        """A launch of one of triton/'s kernels, with a warp for every 32 blocks of a program."""
        chosen = self.constants() if constants is None else constants
        return Command(triton_kernel(name, chosen, int(chosen["B"]) // 32), (programs, 1), arguments)
