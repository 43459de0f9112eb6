"""The CUDA C++ kernels that look up tables: when a device can use them, and their launches. choose.py names them.

The kernels (cuda/*.cu) look up errors and codes of bfloat16 in tables, which a small kernel builds from the tensor's
numbers before. The bits are those of the Triton kernels. `HALFBYTE_CUDA=0` turns them off.
"""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from halfbyte.backends.gpu.choose import ChosenKernel
from halfbyte.backends.gpu.cuda.compile import SOURCES, CudaKernel
from halfbyte.backends.gpu.driver.commands import Address, Command, Slot
from halfbyte.backends.gpu.driver.cuda import shared_memory_of
from halfbyte.backends.numbering import METRICS
from halfbyte.errors import BackendError

if TYPE_CHECKING:
    import torch

__all__ = [
    "SOURCES", "TABLE_KERNELS", "Form", "TableKernel", "commands", "definitions_of", "kernels", "setting", "usable",
]  # fmt: skip

OLDEST = (9, 0)
"""Compute capability with packed 16-bit maxima, without which the tables gain nothing."""

SMALLEST_GROUP = 1 << 13
"""Blocks per group, on average, below which building and loading the tables costs more than they save."""

EVERY_SIZE = False
"""Whether the kernels serve tensors of every size; for tests."""

MOST_GROUPS = 1024
"""The tables of this many groups take less than 100 MB."""

THREADS = 1024
QUEUE_BYTES = 16
"""Shared memory per thread besides the tables: two places in its warp's queue."""


@dataclass(frozen=True)
class TableKernel:
    """A file of cuda/, its kernels, and the memory that the tables take."""

    source: str
    builder: str
    """The kernel that writes the tables."""
    function: str
    table_bytes: int
    copied_bytes: int
    """The part of the tables that may lie in shared memory twice."""
    build_grid: int
    build_threads: int
    smallest: int
    """Blocks from which on the tables save more than building them costs (measured on an H200)."""

    def shared_bytes(self, copies: int) -> int:
        return self.table_bytes + (copies - 1) * self.copied_bytes

    def launched_bytes(self, copies: int) -> int:
        """Shared memory with the warps' queues."""
        return self.shared_bytes(copies) + THREADS * QUEUE_BYTES


TABLE_KERNELS = {
    "four_six": TableKernel("four_six.cu", "build_four_six", "quantize_four_six", 66304, 0, 26, 640, 3 << 18),
    "optimal": TableKernel("optimal.cu", "build_optimal", "quantize_optimal", 86080, 83968, 42, 128, 1 << 18),
}


NUMBERS_AND_TABLES = (Address(Slot.SMALL), Address(Slot.TABLES))
"""What a builder gets."""

OPERAND = (Address(Slot.X), Address(Slot.CODES), Address(Slot.SCALES), *NUMBERS_AND_TABLES, Address(Slot.X))
"""The addresses of the struct Operand of cuda/blocks.cuh. Five sizes follow: blocks, columns, row_quads, groups,
group_blocks."""

SIZES = 5


@dataclass(frozen=True)
class Form:
    """How blocks lie: what a kernel is compiled for besides the contract's formulas."""

    rows: bool = False
    """A block's row and column matter."""
    swizzled: bool = False
    grouped: bool = False
    """Several tensor-level scales."""
    listed: bool = False
    """Groups are separate allocations."""
    copies: int = 1
    """How often the rows of a table lie in shared memory."""


def usable(name: str, device: torch.device, blocks: int, groups: int) -> bool:
    """Whether a device has what a kernel needs, and enough to do for each of the groups' tables."""
    if device.type != "cuda" or os.environ.get("HALFBYTE_CUDA") == "0" or groups > MOST_GROUPS:
        return False
    enough = max(TABLE_KERNELS[name].smallest, groups * SMALLEST_GROUP if groups > 1 else 0)
    return (EVERY_SIZE or blocks >= enough) and _properties(device.index or 0)[0] >= OLDEST


def setting() -> object:
    """What `usable` reads besides its arguments."""
    return EVERY_SIZE, os.environ.get("HALFBYTE_CUDA")


@functools.cache
def _properties(index: int) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors."""
    import torch

    found = torch.cuda.get_device_properties(index)
    return (found.major, found.minor), found.multi_processor_count


def definitions_of(kernel: ChosenKernel, form: Form) -> tuple[str, ...]:
    """The constants that the CUDA kernel of a choice is compiled with."""
    table = _table_kernel(kernel)
    chosen = {
        "THREADS": THREADS, "BUILD_THREADS": table.build_threads, "TABLE_BYTES": table.table_bytes,
        "SHARED_BYTES": table.shared_bytes(form.copies), "COPIES": form.copies,
        "ROWS": int(form.rows), "SWIZZLED": int(form.swizzled), "GROUPED": int(form.grouped),
        "LISTED": int(form.listed),
    }  # fmt: skip
    more: tuple[str, ...] = ()
    if kernel.table == "four_six":
        kind, metric, top = (kernel.constants[name] for name in ("KIND", "METRIC", "TOP"))
        more = (f"-DKIND={kind}", f"-DSQUARED={int(metric == METRICS.index('mse'))}", f"-DTOP={top}f")
    return (*(f"-D{key}={value}" for key, value in chosen.items()), *more)


def _table_kernel(kernel: ChosenKernel) -> TableKernel:
    if kernel.table is None:
        raise TypeError("no CUDA kernel serves this")
    return TABLE_KERNELS[kernel.table]


def commands(
    kernel: ChosenKernel, sizes: tuple[int, int, int, int, int], form: Form, device: torch.device
) -> tuple[list[Command], int] | None:
    """A launch that writes tables and one that uses them, and the bytes of the tables. `sizes`: those of the Operand.

    None, and a warning once, where they cannot be compiled.
    """
    (major, minor), multiprocessors = _properties(device.index or 0)
    build, quantize = kernels(kernel, form, shared_memory_of(device.index or 0))
    try:
        for needed in (build, quantize):
            needed.image(f"sm_{major}{minor}")
    except BackendError as error:
        _warn_once(str(error))
        return None
    table, blocks, groups = _table_kernel(kernel), sizes[0], sizes[3]
    grid = min(multiprocessors, -(-blocks // THREADS))
    first = Command(build, (table.build_grid, groups), NUMBERS_AND_TABLES)
    second = Command(quantize, (grid, 1), (*OPERAND, *sizes), overlaps=True)
    return [first, second], groups * table.table_bytes


def kernels(kernel: ChosenKernel, form: Form, shared: int) -> tuple[CudaKernel, CudaKernel]:
    """The builder and the kernel that uses the tables, for a device with so much shared memory per block of threads."""
    table = _table_kernel(kernel)
    form = replace(form, copies=2 if table.copied_bytes and table.launched_bytes(2) <= shared else 1)
    definitions, bytes_ = definitions_of(kernel, form), table.launched_bytes(form.copies)
    build = CudaKernel(table.source, table.builder, definitions, table.build_threads, 0, len(NUMBERS_AND_TABLES))
    return build, CudaKernel(table.source, table.function, definitions, THREADS, bytes_, len(OPERAND) + SIZES)


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"Triton's kernels serve instead of CUDA's, with the same bits but slower: {reason}", stacklevel=2)
