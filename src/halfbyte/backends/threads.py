"""How many threads may work on the host."""

from __future__ import annotations

import operator
import os

from halfbyte.errors import InputError


def thread_count(threads: int | None = None) -> int:
    """The argument, or HALFBYTE_THREADS, or the processors that this process may use."""
    given = threads if threads is not None else os.environ.get("HALFBYTE_THREADS")
    if given is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        count = int(given) if isinstance(given, str) else operator.index(given)
    except (TypeError, ValueError):
        count = 0
    if count < 1 or isinstance(given, bool):
        raise InputError(f"the number of threads must be a whole number of at least 1, not {given!r}")
    return count
