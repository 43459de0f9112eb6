"""The ways that a call of the CPU backend can take. All give the same bits, so tests compare each with the reference.

A small call is one function of the library, which computes by formulas or builds tables; any other call goes the long
way, through the kernels' own functions. Which way is taken depends on the size alone, and tests are small.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from halfbyte import prepared
from halfbyte.backends.cpu import recipe
from halfbyte.backends.cpu.whole import WholeCall, WholeDecode

WAYS = ("by formulas", "by tables", "the long way")


@contextlib.contextmanager
def way(name: str) -> Iterator[None]:
    """Calls in this block take the named way, if the request can take it."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "the long way":
            for kind in (WholeCall, WholeDecode):
                patch.setattr(kind, "serves", lambda self, size: False)
        else:
            patch.setattr(recipe, "WORTH_TABLES", 0 if name == "by tables" else 1 << 30)
            patch.setattr(prepared, "_KEPT", {})
        yield
