"""Which NVFP4 requests the CUDA C++ kernels serve, and their launches. All others, and all without NVRTC, are Triton's.

The kernels (cuda/*.cu) look errors and codes of bfloat16 up in tables that each thread block builds in shared memory
from the tensor's numbers; the bits are those of the Triton kernels. `HALFBYTE_CUDA=0` turns them off.
"""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from halfbyte.backends.gpu.cuda.compile import SOURCES, Function, functions_for, make_current, shared_memory_of
from halfbyte.backends.gpu.rules import FACTORS, PRE_SCALES, four_six_numbers, rule_numbers
from halfbyte.contracts import NVFP4Rule, expressions, reductions
from halfbyte.errors import BackendError
from halfbyte.methods import FourSix, Optimal
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch

__all__ = ["KERNELS", "SOURCES", "Blocks", "Form", "kernel_for", "launch", "usable"]

OLDEST = (9, 0)
"""Compute capability with packed 16-bit maxima, without which the tables gain nothing."""

SMALLEST_GROUP = 1 << 13
"""Blocks that several groups need on average: below, building and loading their tables costs more than they save."""

EVERY_SIZE = False
"""Whether the kernels serve tensors of every size; for tests."""

MOST_GROUPS = 1024
"""Tables of so many take less than 100 MB."""

THREADS = 1024
QUEUE_BYTES = 16
"""Shared memory that a thread needs beside the tables: two places in its warp's queue."""


@dataclass(frozen=True)
class Kernel:
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


KERNELS = {
    "four_six": Kernel("four_six.cu", "build_four_six", "quantize_four_six", 66304, 0, 26, 640, 3 << 18),
    "optimal": Kernel("optimal.cu", "build_optimal", "quantize_optimal", 86080, 83968, 42, 128, 1 << 18),
}


class Blocks(ctypes.Structure):
    """The struct Operand of cuda/blocks.cuh."""

    _fields_ = [
        ("x", ctypes.c_void_p), ("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("numbers", ctypes.c_void_p),
        ("tables", ctypes.c_void_p), ("listed", ctypes.c_void_p), ("blocks", ctypes.c_longlong),
        ("columns", ctypes.c_longlong), ("row_quads", ctypes.c_longlong), ("groups", ctypes.c_longlong),
        ("group_blocks", ctypes.c_longlong),
    ]  # fmt: skip


@dataclass(frozen=True)
class Form:
    """How blocks lie: what a kernel is compiled for beside the contract's formulas."""

    rows: bool = False
    """A block's row and column matter."""
    swizzled: bool = False
    grouped: bool = False
    """Several tensor-level scales."""
    listed: bool = False
    """Each group lies somewhere else."""
    copies: int = 1
    """How often the rows of a table lie in shared memory."""


def kernel_for(rule: NVFP4Rule, request: Request) -> str | None:
    """The name of the kernel whose formulas a request has, or None."""
    if request.dtype != "bf16" or request.format.block != 16 or request.tile != (1, 16):
        return None
    numbers, method = rule_numbers(rule, request), request.method
    if not numbers.short or rule.factor is not FACTORS[0]:
        return None
    if isinstance(method, FourSix) and rule.four_six is not None:
        ordered = rule.four_six.block_sum is reductions.sequential and method.error in ("mae", "mse")
        divided = numbers.blocks["PRE"] == PRE_SCALES.index(expressions.divided_then_factor)
        return "four_six" if ordered and divided else None
    if isinstance(method, Optimal) and method.channel_weights is None:
        folded = numbers.blocks["PRE"] == PRE_SCALES.index(expressions.folded_sixth)
        return "optimal" if folded and "optimal" in KERNELS else None
    return None


def usable(name: str, device: torch.device, blocks: int, groups: int) -> bool:
    """Whether a device has what a kernel needs, and enough to do for each of the groups' tables."""
    if device.type != "cuda" or os.environ.get("HALFBYTE_CUDA") == "0" or groups > MOST_GROUPS:
        return False
    enough = max(KERNELS[name].smallest, groups * SMALLEST_GROUP if groups > 1 else 0)
    return (EVERY_SIZE or blocks >= enough) and _properties(device.index or 0)[0] >= OLDEST


@functools.cache
def _properties(index: int) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors."""
    import torch

    found = torch.cuda.get_device_properties(index)
    return (found.major, found.minor), found.multi_processor_count


def definitions_of(name: str, rule: NVFP4Rule, request: Request, form: Form) -> tuple[str, ...]:
    """The constants that a kernel is compiled with."""
    kernel = KERNELS[name]
    chosen = {
        "THREADS": THREADS, "BUILD_THREADS": kernel.build_threads, "TABLE_BYTES": kernel.table_bytes,
        "SHARED_BYTES": kernel.shared_bytes(form.copies), "COPIES": form.copies,
        "ROWS": int(form.rows), "SWIZZLED": int(form.swizzled), "GROUPED": int(form.grouped),
        "LISTED": int(form.listed),
    }  # fmt: skip
    if isinstance(request.method, FourSix) and rule.four_six is not None:
        more = four_six_numbers(rule.four_six, request.method, request)
        top = float(rule.anchor(request.method))
        return (
            *(f"-D{key}={value}" for key, value in chosen.items()),
            f"-DKIND={more['KIND']}", f"-DSQUARED={more['METRIC']}", f"-DTOP={top}f",
        )  # fmt: skip
    return tuple(f"-D{key}={value}" for key, value in chosen.items())


def launch(name: str, blocks: Blocks, rule: NVFP4Rule, request: Request, form: Form, device: torch.device) -> bool:
    """Launch two kernels on the current stream, one that writes tables and one that uses them.

    False, and a warning once, where they cannot be compiled.
    """
    import torch

    kernel, index = KERNELS[name], device.index or 0
    make_current(index)
    form = replace(form, copies=_copies(index, name))
    functions = _compiled(index, name, definitions_of(name, rule, request, form), kernel.launched_bytes(form.copies))
    if functions is None:
        return False
    _, multiprocessors = _properties(index)
    tables = torch.empty(blocks.groups * kernel.table_bytes, dtype=torch.uint8, device=device)
    blocks.tables = tables.data_ptr()
    stream = torch.cuda.current_stream(device).cuda_stream
    build, quantize = functions
    numbers, out = ctypes.c_void_p(blocks.numbers), ctypes.c_void_p(blocks.tables)
    build.launch((kernel.build_grid, blocks.groups), kernel.build_threads, 0, stream, numbers, out)
    grid = min(multiprocessors, -(-blocks.blocks // THREADS))
    quantize.launch((grid, 1), THREADS, kernel.launched_bytes(form.copies), stream, blocks, overlaps=True)
    return True


@functools.cache
def _copies(index: int, name: str) -> int:
    """Two of the rows, where there are such and shared memory is large enough."""
    kernel = KERNELS[name]
    return 2 if kernel.copied_bytes and kernel.launched_bytes(2) <= shared_memory_of(index) else 1


@functools.cache
def _compiled(index: int, name: str, definitions: tuple[str, ...], shared: int) -> tuple[Function, ...] | None:
    (major, minor), _ = _properties(index)
    kernel = KERNELS[name]
    names = (kernel.builder, kernel.function)
    try:
        return functions_for(index, f"sm_{major}{minor}", kernel.source, names, definitions, shared)
    except BackendError as error:
        _warn_once(str(error))
        return None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"Triton's kernels serve instead of CUDA's, with the same bits but slower: {reason}", stacklevel=2)
