"""How many threads may work on the host."""

from __future__ import annotations

import operator
import os

from halfbyte.errors import InputError


def thread_count(threads: int | None = None) -> int:
    """The number of threads: the argument, or HALFBYTE_THREADS, or the processors that this process may use."""
    if threads is not None:
        return check_threads(threads) or 1
    given = os.environ.get("HALFBYTE_THREADS")
    if given is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    whole = given.strip().isdecimal() and int(given) >= 1
    return check_threads(int(given) if whole else given) or 1


def check_threads(threads: object) -> int | None:
    """A number of threads that a caller gave. None leaves the choice to the backend."""
    if threads is None:
        return None
    try:
        count = 0 if isinstance(threads, bool) else operator.index(threads)  # type: ignore[arg-type]
    except TypeError:
        count = 0
    if count < 1:
        raise InputError(f"the number of threads must be a whole number of at least 1, not {threads!r}")
    return count
