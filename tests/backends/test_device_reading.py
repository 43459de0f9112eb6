"""Reading to a device in one compiled call, with a runtime made of Python functions that copy late."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from halfbyte.backends.device_reading import DeviceReader, can_read_to_device
from halfbyte.errors import BackendError
from halfbyte.testing import assert_same_bits

pytestmark = pytest.mark.skipif(not can_read_to_device(), reason="the compiled kernels are not installed")

COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
RECORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
STREAM = 77


class LateRuntime:
    """Copies wait until somebody waits for an event that was recorded after them."""

    def __init__(self) -> None:
        self.queued: list[tuple[int, int, int]] = []
        self.recorded: dict[int, int] = {}
        """Event → how many copies came before it."""
        self.done = 0
        self.most_queued = 0
        self.fail_at: int | None = None
        self.functions = COPY(self._copy), RECORD(self._record), WAIT(self._wait)
        self.addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self.functions]

    def _copy(self, device: int, host: int, size: int, kind: int, stream: int) -> int:
        assert (kind, stream) == (1, STREAM)
        if len(self.queued) == self.fail_at:
            return 2
        self.queued.append((device, host, size))
        self.most_queued = max(self.most_queued, len(self.queued) - self.done)
        return 0

    def _record(self, event: int, stream: int) -> int:
        self.recorded[event] = len(self.queued)
        return 0

    def _wait(self, event: int) -> int:
        self.run(self.recorded.get(event, 0))
        return 0

    def run(self, until: int) -> None:
        for device, host, size in self.queued[self.done : until]:
            ctypes.memmove(device, host, size)
        self.done = max(self.done, until)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "x").write_bytes(np.random.default_rng(0).integers(0, 256, 10_000, np.uint8).tobytes())
    descriptor = os.open(tmp_path / "x", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def reader_with(runtime: LateRuntime, count: int = 3, step: int = 256) -> DeviceReader:
    return DeviceReader(runtime.addresses, np.zeros(count * step, np.uint8), range(1, count + 1), STREAM)


@pytest.mark.parametrize(("offset", "size"), [(0, 256), (0, 255), (5, 4096), (3, 4097), (9000, 1000), (0, 0)])
@pytest.mark.parametrize("count", [1, 3, 50])
def test_bytes_arrive_whatever_the_ring(file: int, offset: int, size: int, count: int) -> None:
    runtime = LateRuntime()
    reader = reader_with(runtime, count)
    device = np.zeros(size, np.uint8)
    for _ in range(3):  # the next call goes on with the ring where the last one left it
        device[:] = 0
        assert reader.read(file, offset, size, device.ctypes.data, None) == (size, None)
        runtime.run(len(runtime.queued))
        assert device.tobytes() == os.pread(file, size, offset)
    assert runtime.most_queued <= count


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("value", [None, np.inf, np.nan])
def test_the_largest_magnitude(tmp_path: Path, dtype: npt.DTypeLike, value: float | None) -> None:
    x: npt.NDArray[Any] = np.random.default_rng(1).standard_normal(5000).astype(np.float32).astype(dtype)
    x[4321] = -9 if value is None else value
    x.tofile(tmp_path / "x")
    device = np.zeros(x.nbytes, np.uint8)
    runtime = LateRuntime()
    with (tmp_path / "x").open("rb") as file:
        found = reader_with(runtime).read(file.fileno(), 0, x.nbytes, device.ctypes.data, x.dtype)
    runtime.run(len(runtime.queued))
    assert_same_bits(device, x.view(np.uint8))
    assert found[0] == x.nbytes
    expected = np.abs(x.astype(np.float32)).max()
    assert_same_bits(np.array(found[1]), np.array(expected, np.float32), any_nan=True)


def test_a_file_that_ends_early(file: int) -> None:
    device = np.zeros(4000, np.uint8)
    assert reader_with(LateRuntime()).read(file, 9000, 4000, device.ctypes.data, None) == (1000, None)


def test_a_file_that_cannot_be_read() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader_with(LateRuntime()).read(-1, 0, 10, 0, None)


def test_a_device_that_fails(file: int) -> None:
    runtime = LateRuntime()
    runtime.fail_at = 2
    device = np.zeros(4000, np.uint8)
    with pytest.raises(BackendError, match="CUDA's error 2"):
        reader_with(runtime).read(file, 0, 4000, device.ctypes.data, None)
