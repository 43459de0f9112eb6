"""The CUDA driver: contexts, modules, and launches of whole programs. Loads no framework.

A program's launches happen in one call of the compiled library (native/cuda_launch.cpp), which fills in the slots and
calls cuLaunchKernelEx. If the library was not built, the same words are read by Python, which is slower.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass

from halfbyte.backends.cpu.library import library_path
from halfbyte.backends.gpu.driver.commands import Address, Image, Kernel, Program
from halfbyte.errors import BackendError

DYNAMIC_SHARED_MEMORY = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
MOST_SHARED_MEMORY = 97
"""CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"""
SHARED_FOR_ALL = 48 << 10
"""Bytes of dynamic shared memory that every kernel may have without asking."""
PROGRAMMATIC_STREAM_SERIALIZATION = 6
BUFFER_POINTER, BUFFER_SIZE = 1, 2
"""CU_LAUNCH_PARAM_BUFFER_POINTER and CU_LAUNCH_PARAM_BUFFER_SIZE"""
SLOTS = 6

Launcher = Callable[..., int]
"""(address of the words, stream, the six slots) -> the driver's status."""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, with a value that is one number."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class Configuration(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("threads", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


class Entries(ctypes.Structure):
    """The functions of the driver that the compiled library calls: struct Entries of native/cuda_launch.cpp."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("launch", "get_current", "push", "pop")]


@dataclass(frozen=True)
class Function:
    """A kernel in a device's context."""

    handle: int
    threads: int
    shared: int
    words: int


@functools.cache
def driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendError(f"the NVIDIA driver was not found: {error}") from error


@functools.cache
def entries() -> Entries:
    names = ("cuLaunchKernelEx", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")
    return Entries(*(ctypes.cast(getattr(driver(), name), ctypes.c_void_p).value for name in names))


def check(status: int, what: str) -> None:
    """Raise the driver's own words for an error."""
    if status == 0:
        return
    text = ctypes.c_char_p()
    driver().cuGetErrorString(status, ctypes.byref(text))
    raise BackendError(f"{what}: {(text.value or b'unknown error').decode()} ({status})")


@functools.cache
def context_of(index: int) -> int:
    """The primary context of a device, which PyTorch uses as well. It is retained for the life of the process."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check(driver().cuInit(0), "starting the driver")
    check(driver().cuDeviceGet(ctypes.byref(device), index), f"finding device {index}")
    check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"opening device {index}")
    if context.value is None:
        raise BackendError(f"device {index} has no context")
    return context.value


@functools.cache
def shared_memory_of(index: int) -> int:
    """Bytes of shared memory that a block of threads can get on a device."""
    device, found = ctypes.c_int(), ctypes.c_int()
    check(driver().cuInit(0), "starting the driver")
    check(driver().cuDeviceGet(ctypes.byref(device), index), f"finding device {index}")
    status = driver().cuDeviceGetAttribute(ctypes.byref(found), MOST_SHARED_MEMORY, device)
    check(status, f"asking device {index} for its shared memory")
    return found.value


_LOCK = threading.RLock()
_FUNCTIONS: dict[tuple[int, Kernel], Function] = {}


def function_of(index: int, architecture: str, kernel: Kernel) -> Function:
    """A kernel on a device, compiled and loaded when it is first asked for."""
    with _LOCK:
        found = _FUNCTIONS.get((index, kernel))
        if found is None:
            found = _FUNCTIONS[index, kernel] = load(index, kernel.image(architecture))
        return found


def load(index: int, image: Image) -> Function:
    """Load an image into a device's context. The thread's own context is what it was before, afterwards."""
    module, handle, left = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    check(driver().cuCtxPushCurrent_v2(ctypes.c_void_p(context_of(index))), f"using device {index}")
    try:
        check(driver().cuModuleLoadData(ctypes.byref(module), image.code), f"loading {image.name}")
        status = driver().cuModuleGetFunction(ctypes.byref(handle), module, image.name.encode())
        check(status, f"finding {image.name}")
        if image.shared > SHARED_FOR_ALL:
            status = driver().cuFuncSetAttribute(handle, DYNAMIC_SHARED_MEMORY, image.shared)
            check(status, f"giving {image.name} {image.shared} bytes of shared memory")
    finally:
        driver().cuCtxPopCurrent_v2(ctypes.byref(left))
    return Function(handle.value or 0, image.threads, image.shared, image.words)


def encode(
    program: Program, context: int, functions: list[Function], entry_table: int
) -> ctypes.Array[ctypes.c_uint64]:
    """The words that a launcher reads. native/cuda_launch.cpp says what each one means."""
    words = [entry_table, context, len(program.commands)]
    for command, function in zip(program.commands, functions, strict=True):
        padding = function.words - len(command.arguments)
        words += [function.handle, *command.grid, function.threads, function.shared, int(command.overlaps)]
        words.append(function.words)
        for argument in (*command.arguments, *(0,) * padding):
            words += [argument.slot, argument.offset] if isinstance(argument, Address) else [0, argument]
    return (ctypes.c_uint64 * len(words))(*words)


@functools.cache
def launcher() -> Launcher:
    """The compiled library's function, or Python's."""
    path = library_path()
    # A launch is short: threads that let go of Python's lock for it would wait longer to get it back.
    found = None if path is None else getattr(ctypes.PyDLL(str(path)), "hb_cuda_launch", None)
    if found is None:
        return launch_words
    found.argtypes = [ctypes.c_uint64] * (2 + SLOTS)
    found.restype = ctypes.c_int
    launch: Launcher = found
    return launch


def launch_words(address: int, stream: int, *slots: int) -> int:
    """What hb_cuda_launch of native/cuda_launch.cpp does, for installations without it."""
    words = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64))
    values, context, left = (0, *slots), ctypes.c_void_p(words[1]), ctypes.c_void_p()
    current = ctypes.c_void_p()
    status = int(driver().cuCtxGetCurrent(ctypes.byref(current)))
    foreign = status == 0 and current.value != context.value
    if foreign:
        status = int(driver().cuCtxPushCurrent_v2(context))
    if status != 0:
        return status
    at = 3
    for _ in range(words[2]):
        handle, x, y, threads, shared, overlaps, count = words[at : at + 7]
        pairs, at = words[at + 7 : at + 7 + 2 * count], at + 7 + 2 * count
        parameters = (values[slot] + offset for slot, offset in zip(pairs[::2], pairs[1::2], strict=True))
        buffer = (ctypes.c_uint64 * count)(*parameters)
        size = ctypes.c_size_t(8 * count)
        extra = (ctypes.c_void_p * 5)(BUFFER_POINTER, ctypes.addressof(buffer), BUFFER_SIZE, ctypes.addressof(size), 0)
        attribute = Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        configuration = Configuration((x, y, 1), (threads, 1, 1), shared, stream, ctypes.pointer(attribute), overlaps)
        status = driver().cuLaunchKernelEx(ctypes.byref(configuration), ctypes.c_void_p(handle), None, extra)
        if status != 0:
            break
    if foreign:
        driver().cuCtxPopCurrent_v2(ctypes.byref(left))
    return int(status)
