"""Find the compiled kernels, load them with ctypes, and run them on threads over ranges. No numerics here."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy.typing as npt

from halfbyte.backends.cpu import structs
from halfbyte.backends.threads import thread_count
from halfbyte.errors import InputError, unknown_name

ISAS = {"portable": 0, "avx2": 1, "avx512": 2}

RANGE_BYTES = 1 << 18
"""The smallest input, in bytes, that is worth a thread: below this a second thread costs more than it saves."""


def library_path() -> Path | None:
    """The path of the compiled library: in the package, or where an editable install puts it."""
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    folders = [Path(__file__).parent, Path(sysconfig.get_path("platlib")) / "halfbyte" / "backends" / "cpu"]
    found = [folder / f"libhalfbyte_cpu{suffix}" for folder in folders]
    return next((path for path in found if path.exists()), None)


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled library, or None with one clear warning if the package was installed without a compiler."""
    path = library_path()
    if path is None:
        warnings.warn(
            "halfbyte runs its slow numpy reference: the compiled kernels are missing, because no C++ compiler was "
            "there when it was installed. Install one (or a wheel) and reinstall halfbyte.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    library = ctypes.CDLL(str(path))
    for name, structure in structs.STRUCTURES.items():
        size = getattr(library, f"hb_sizeof_{name}", None)
        if size is not None:
            size.restype = ctypes.c_int64
        if size is None or size() != ctypes.sizeof(structure):
            raise ImportError(f"{path} was built from other sources than this package; reinstall halfbyte")
    for name in (
        "hb_plain",
        "hb_mxfp8",
        "hb_mx_search",
        "hb_cast",
        "hb_plain_tiles",
        "hb_general",
        "hb_list_ends",
        "hb_feedback",
        "hb_read_amax",
        "hb_read_to_device",
        "hb_encoding_room",
    ):
        getattr(library, name).restype = ctypes.c_int64
    library.hb_amax.restype = library.hb_four_six.restype = ctypes.c_uint32
    address: Any = ctypes.c_void_p
    count: Any = ctypes.c_int64
    library.hb_quantize.argtypes = [address, ctypes.c_int, address, count, count, ctypes.c_float] + [address] * 4
    library.hb_dequantize.argtypes = [address, ctypes.c_int, address, address, count, address, address]
    library.hb_build_flags.restype = ctypes.c_char_p
    library.hb_multiply_add.restype = library.hb_compare_rows.restype = ctypes.c_float
    return library


def choose_isa(library: ctypes.CDLL) -> int:
    """The widest instruction set of this machine, or the one that HALFBYTE_ISA names. It never changes a bit."""
    best = _best_isa(library)
    wanted = os.environ.get("HALFBYTE_ISA")
    if wanted is None:
        return best
    if wanted not in ISAS:
        raise unknown_name("instruction set in HALFBYTE_ISA", wanted, ISAS)
    if ISAS[wanted] > best:
        raise InputError(f"HALFBYTE_ISA={wanted}, but this machine does not have it")
    return ISAS[wanted]


@functools.cache
def _best_isa(library: ctypes.CDLL) -> int:
    return int(library.hb_best_isa())


def native() -> tuple[ctypes.CDLL, int]:
    """The library and the instruction set to use. Callers must have asked `supports` before."""
    library = load_library()
    if library is None:
        raise ImportError("the compiled kernels are not installed")
    return library, choose_isa(library)


@functools.cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="halfbyte")


def over_ranges(run: Callable[[int, int], Any], count: int, bytes_each: int, threads: int | None) -> list[Any]:
    """Call run(start, stop) on threads, with ranges that cover `count` items. Returns the results in order.

    The threads run at the same time, because ctypes releases the GIL.
    """
    workers = min(thread_count(threads), max(1, count * bytes_each // RANGE_BYTES), count)
    if workers <= 1:
        return [run(0, count)]
    edges = [count * i // workers for i in range(workers + 1)]
    return list(_pool(workers).map(run, edges[:-1], edges[1:]))


def one_thread(size: int, threads: int | None) -> bool:
    """Whether `over_ranges` would run an operand of that many bytes on one thread."""
    if threads is None and size < 2 * RANGE_BYTES and "HALFBYTE_THREADS" not in os.environ:
        return True
    return thread_count(threads) == 1 or size < 2 * RANGE_BYTES


def pointer(array: npt.NDArray[Any], offset: int = 0) -> ctypes.c_void_p:
    """Address of a contiguous array plus `offset` bytes. A strided array raises."""
    if not array.flags.c_contiguous:
        raise TypeError("only contiguous arrays go to a kernel")
    return ctypes.c_void_p(array.ctypes.data + offset)
