"""A driver that writes launches down, built from fake_cuda.c, so that launches can be tested without a card."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from halfbyte.backends.gpu import programs
from halfbyte.backends.gpu.driver import cuda

SOURCE = Path(__file__).parent / "fake_cuda.c"


class Written(ctypes.Structure):
    """A launch as fake_cuda.c writes it down."""

    _fields_ = [
        ("function", ctypes.c_uint64), ("context", ctypes.c_uint64), ("stream", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3), ("threads", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32),
        ("overlaps", ctypes.c_uint32), ("size", ctypes.c_uint32), ("words", ctypes.c_uint64 * 64),
    ]  # fmt: skip


class FakeDriver:
    """The library, and what was launched by it."""

    def __init__(self, folder: Path) -> None:
        path = folder / "libcuda.so.1"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(path), str(SOURCE)], check=True)
        self.library = ctypes.CDLL(str(path))

    @property
    def launches(self) -> list[Written]:
        every = (Written * 1024).in_dll(self.library, "launches")
        return list(every[: self.number("made").value])

    def number(self, name: str) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self.library, name)

    def use(self, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
        """Put it in the place of the real one, with nothing launched yet and nothing kept from other tests."""
        self.number("made").value, self.number("fails_at").value = 0, -1
        monkeypatch.setattr(cuda, "driver", lambda: self.library)
        monkeypatch.setattr(cuda, "_FUNCTIONS", {})
        monkeypatch.setattr(programs, "_PROGRAMS", {})  # their words refer to the driver
        for kept in (cuda.entries, cuda.context_of, cuda.shared_memory_of):
            kept.cache_clear()
        return self
