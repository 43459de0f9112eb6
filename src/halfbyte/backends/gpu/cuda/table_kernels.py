"""The CUDA C++ kernels: when a device can use them, and their launches. choose.py names them.

For bfloat16 the kernels (cuda/*.cu) look up errors and codes in tables, which a small kernel builds from the tensor's
numbers before. For other dtypes they estimate errors. The bits are those of the Triton kernels. `HALFBYTE_CUDA=0` turns
them off.
"""

from __future__ import annotations

import ctypes
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
    "SOURCES", "TABLE_KERNELS", "Form", "Operand", "TableKernel", "commands", "definitions_of", "kernels", "setting",
    "usable",
]  # fmt: skip

OLDEST = (9, 0)
"""Compute capability with packed 16-bit maxima, without which the tables gain nothing."""

SMALLEST_GROUP = 1 << 13
"""Blocks per group, on average, below which building and loading the tables costs more than they save."""

EVERY_SIZE = False
"""Whether the kernels serve tensors of every size; for tests."""

MOST_GROUPS = 1024
"""The tables of this many groups take less than 100 MB."""

QUEUE_BYTES = 16
"""Shared memory per thread besides the tables: two places in its warp's queue, or in each of them."""


@dataclass(frozen=True)
class TableKernel:
    """A file of cuda/, its kernels, and the memory that the tables take."""

    source: str
    builder: str | None
    """The kernel that writes the tables; None: the kernel needs none, or writes them itself."""
    function: str
    table_bytes: int
    copied_bytes: int
    """The part of the tables that may lie in shared memory twice."""
    build_grid: int
    build_threads: int
    smallest: int
    """Blocks from which on the tables save more than building them costs (measured on an H200)."""
    threads: int = 1024
    queues: int = 1
    """Of a warp."""

    def shared_bytes(self, copies: int) -> int:
        return self.table_bytes + (copies - 1) * self.copied_bytes

    def launched_bytes(self, copies: int) -> int:
        """Shared memory with the warps' queues."""
        return self.shared_bytes(copies) + self.threads * QUEUE_BYTES * self.queues


TABLE_KERNELS = {
    "four_six": TableKernel("four_six.cu", "build_four_six", "quantize_four_six", 66304, 0, 26, 640, 3 << 18),
    "optimal": TableKernel("optimal.cu", "build_optimal", "quantize_optimal", 87056, 83968, 58, 128, 1 << 18),
    "estimate": TableKernel("estimate.cu", None, "quantize_estimate", 3344, 0, 0, 0, 1 << 16, 512),
    "estimate_halves": TableKernel("estimate.cu", None, "quantize_estimate", 3344, 0, 0, 0, 1 << 16, 640, 2),
    "four_six_estimate": TableKernel(
        "four_six_estimate.cu", None, "quantize_four_six_estimate", 1024, 0, 0, 0, 1 << 16, 512
    ),
}

CONTRACT = (
    "PRE", "ELEMENT", "STATISTICS", "LARGEST", "SMALLEST", "FOR_ZERO", "FOR_ZERO_BYTE", "TIE", "SIGN", "NAN_CODE",
    "ZERO_INPUT", "WRAPS", "FIRST",
)  # fmt: skip
"""Constants of a choice that the searches are compiled with (cuda/contract.cuh)."""


class Operand(ctypes.Structure):
    """The struct Operand of cuda/blocks.cuh."""

    _fields_ = [
        ("x", ctypes.c_void_p), ("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("numbers", ctypes.c_void_p),
        ("tables", ctypes.c_void_p), ("listed", ctypes.c_void_p), ("blocks", ctypes.c_longlong),
        ("columns", ctypes.c_longlong), ("row_quads", ctypes.c_longlong), ("groups", ctypes.c_longlong),
        ("group_blocks", ctypes.c_longlong),
    ]  # fmt: skip


NUMBERS_AND_TABLES = (Address(Slot.SMALL), Address(Slot.TABLES))
"""What a builder gets."""

OPERAND = {
    "x": Address(Slot.X), "codes": Address(Slot.CODES), "scales": Address(Slot.SCALES), "numbers": Address(Slot.SMALL),
    "tables": Address(Slot.TABLES), "listed": Address(Slot.X),
}  # fmt: skip
"""The addresses of an Operand."""


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

    def __post_init__(self) -> None:
        if self.listed and not self.grouped:
            raise ValueError("the address of a separate allocation is looked up by its group")


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
        "THREADS": table.threads, "DTYPE": kernel.constants["DTYPE"], "BUILD_THREADS": table.build_threads,
        "BUILD_BLOCKS": table.build_grid, "TABLE_BYTES": table.table_bytes,
        "SHARED_BYTES": table.shared_bytes(form.copies), "COPIES": form.copies,
        "ROWS": int(form.rows), "SWIZZLED": int(form.swizzled), "GROUPED": int(form.grouped),
        "LISTED": int(form.listed),
    }  # fmt: skip
    more: tuple[str, ...] = ()
    if "KIND" in kernel.constants:
        kind, metric, top = (kernel.constants[name] for name in ("KIND", "METRIC", "TOP"))
        more = (f"-DKIND={kind}", f"-DSQUARED={int(metric == METRICS.index('mse'))}", f"-DTOP={top}f")
    else:
        more = tuple(f"-D{name}={_literal(kernel.constants[name])}" for name in CONTRACT)
    return (*(f"-D{key}={value}" for key, value in chosen.items()), *more)


def _literal(number: float) -> str:
    """A number in C++."""
    return f"{number!r}f" if isinstance(number, float) else str(int(number))


def _table_kernel(kernel: ChosenKernel) -> TableKernel:
    if kernel.table is None:
        raise TypeError("no CUDA kernel serves this")
    return TABLE_KERNELS[kernel.table]


def commands(
    kernel: ChosenKernel, sizes: dict[str, int], form: Form, device: torch.device
) -> tuple[list[Command], int] | None:
    """A launch of a kernel, before it one that writes its tables if it has one, and the bytes of the tables.

    sizes: the numbers of the Operand. None, and a warning once, where the kernels cannot be compiled.
    """
    (major, minor), multiprocessors = _properties(device.index or 0)
    build, quantize = kernels(kernel, form, shared_memory_of(device.index or 0))
    try:
        for needed in (build, quantize):
            if needed is not None:
                needed.image(f"sm_{major}{minor}")
    except BackendError as error:
        _warn_once(str(error))
        return None
    table, groups = _table_kernel(kernel), sizes["groups"]
    grid = min(multiprocessors, -(-sizes["blocks"] // table.threads))
    places: dict[str, Address | int] = {**OPERAND, **sizes}
    operand = tuple(places[name] for name, *_ in Operand._fields_)
    if build is None:
        return [Command(quantize, (grid, 1), operand)], groups * table.table_bytes
    first = Command(build, (table.build_grid, groups), NUMBERS_AND_TABLES)
    return [first, Command(quantize, (grid, 1), operand, overlaps=True)], groups * table.table_bytes


def kernels(kernel: ChosenKernel, form: Form, shared: int) -> tuple[CudaKernel | None, CudaKernel]:
    """The builder, if there is one, and the kernel itself, for a device with so much shared memory per block."""
    table = _table_kernel(kernel)
    form = replace(form, copies=2 if table.copied_bytes and table.launched_bytes(2) <= shared else 1)
    definitions, bytes_ = definitions_of(kernel, form), table.launched_bytes(form.copies)
    build = None
    if table.builder is not None:
        words = len(NUMBERS_AND_TABLES)
        build = CudaKernel(table.source, table.builder, definitions, table.build_threads, 0, words)
    return build, CudaKernel(table.source, table.function, definitions, table.threads, bytes_, len(Operand._fields_))


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"Triton's kernels serve instead of CUDA's, with the same bits but slower: {reason}", stacklevel=2)
