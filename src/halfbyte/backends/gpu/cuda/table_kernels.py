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
from halfbyte.backends.gpu.cuda.compile import SOURCES, Function, functions_for, make_current, shared_memory_of
from halfbyte.backends.numbering import METRICS
from halfbyte.errors import BackendError

if TYPE_CHECKING:
    import torch

__all__ = ["SOURCES", "TABLE_KERNELS", "Form", "Operand", "TableKernel", "definitions_of", "launch", "usable"]

OLDEST = (9, 0)
"""Compute capability with packed 16-bit maxima, without which the tables gain nothing."""

SMALLEST_GROUP = 1 << 13
"""Blocks per group, on average, below which building and loading the tables costs more than they save."""

EVERY_SIZE = False
"""Whether the kernels serve tensors of every size; for tests."""

MOST_GROUPS = 1024
"""The tables of this many groups take less than 100 MB."""

QUEUE_BYTES = 16
"""Shared memory per thread besides the tables: two places in its warp's queue."""


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

    def shared_bytes(self, copies: int) -> int:
        return self.table_bytes + (copies - 1) * self.copied_bytes

    def launched_bytes(self, copies: int) -> int:
        """Shared memory with the warps' queues."""
        return self.shared_bytes(copies) + self.threads * QUEUE_BYTES


TABLE_KERNELS = {
    "four_six": TableKernel("four_six.cu", "build_four_six", "quantize_four_six", 66304, 0, 26, 640, 3 << 18),
    "optimal": TableKernel("optimal.cu", "build_optimal", "quantize_optimal", 87056, 83968, 42, 128, 1 << 18),
    "estimate": TableKernel("estimate.cu", None, "quantize_estimate", 3344, 0, 0, 0, 1 << 16),
    "four_six_estimate": TableKernel(
        "four_six_estimate.cu", None, "quantize_four_six_estimate", 0, 0, 0, 0, 1 << 16
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
        "THREADS": table.threads, "DTYPE": kernel.constants["DTYPE"], "BUILD_THREADS": table.build_threads, "TABLE_BYTES": table.table_bytes,
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


def launch(kernel: ChosenKernel, operand: Operand, form: Form, device: torch.device) -> bool:
    """Launch a kernel on the current stream, and before it the one that writes its tables, if it has one.

    False, and a warning once, where they cannot be compiled.
    """
    import torch

    table, index = _table_kernel(kernel), device.index or 0
    make_current(index)
    form = replace(form, copies=_copies(index, table))
    functions = _compiled(index, table, definitions_of(kernel, form), table.launched_bytes(form.copies))
    if functions is None:
        return False
    _, multiprocessors = _properties(index)
    tables = torch.empty(operand.groups * table.table_bytes, dtype=torch.uint8, device=device)
    operand.tables = tables.data_ptr()
    stream = torch.cuda.current_stream(device).cuda_stream
    quantize = functions[-1]
    if table.builder is not None:
        numbers, out = ctypes.c_void_p(operand.numbers), ctypes.c_void_p(operand.tables)
        functions[0].launch((table.build_grid, operand.groups), table.build_threads, 0, stream, numbers, out)
    grid = min(multiprocessors, -(-operand.blocks // table.threads))
    overlaps = table.builder is not None
    quantize.launch((grid, 1), table.threads, table.launched_bytes(form.copies), stream, operand, overlaps=overlaps)
    return True


@functools.cache
def _copies(index: int, table: TableKernel) -> int:
    """How often the rows of a table lie in shared memory: twice where it is large enough."""
    return 2 if table.copied_bytes and table.launched_bytes(2) <= shared_memory_of(index) else 1


@functools.cache
def _compiled(index: int, table: TableKernel, definitions: tuple[str, ...], shared: int) -> tuple[Function, ...] | None:
    (major, minor), _ = _properties(index)
    names = (table.function,) if table.builder is None else (table.builder, table.function)
    try:
        return functions_for(index, f"sm_{major}{minor}", table.source, names, definitions, shared)
    except BackendError as error:
        _warn_once(str(error))
        return None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"Triton's kernels serve instead of CUDA's, with the same bits but slower: {reason}", stacklevel=2)
