"""Processors that flush subnormal numbers to zero: found out, and told not to while halfbyte computes.

`torch.set_flush_denormal(True)`, or loading a library that was built with -ffast-math, sets this mode for a thread and
for all that it starts. Every operation on a small number then gives another result, in numpy and in compiled code.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from halfbyte.errors import UnsupportedError

LEAST, HALF = sys.float_info.min, 0.5
"""The least normal float64. LEAST * HALF == 0 where subnormal numbers are flushed, be it as results or as operands."""
ENVIRONMENT_BYTES = 256
"""More than the floating-point environment of any processor takes."""
DEFAULT = ctypes.c_void_p(-1)
"""FE_DFL_ENV of glibc and musl."""


def are_flushed() -> bool:
    """Whether this thread flushes subnormal numbers."""
    return LEAST * HALF == 0.0


@contextmanager
def subnormals_kept() -> Iterator[None]:
    """Subnormal numbers count in this thread, and in threads that it starts; afterwards all is as it was."""
    if not are_flushed():
        yield
        return
    library, saved = _library(), (ctypes.c_char * ENVIRONMENT_BYTES)()
    if library is not None:
        library.fegetenv(saved)
        library.fesetenv(DEFAULT)
    if library is None or are_flushed():
        raise UnsupportedError(
            "this thread flushes subnormal numbers to zero, which changes results, and it cannot be told not to; turn "
            "that off first: torch.set_flush_denormal(False), or leave out the library that turned it on"
        )
    try:
        yield
    finally:
        library.fesetenv(saved)


@functools.cache
def _library() -> Any:
    """What has C's fenv.h; None if nothing here has."""
    for name in (None, "libm.so.6"):
        try:
            found = ctypes.PyDLL(name)
            found.fegetenv, found.fesetenv  # noqa: B018  # AttributeError: not there
        except (OSError, AttributeError):
            continue
        return found
    return None
