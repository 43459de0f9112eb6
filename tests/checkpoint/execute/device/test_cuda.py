"""The calls to the CUDA runtime, with a runtime made of host memory: what is copied where, events, memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfbyte.checkpoint.execute.device import cuda
from halfbyte.checkpoint.execute.device.cuda import CudaDevice, CudaStream
from halfbyte.checkpoint.execute.device.protocol import DeviceMemoryError, Matrix
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.contracts import get_contract
from halfbyte.errors import BackendError
from halfbyte.formats import get_format
from halfbyte.testing import assert_same_bits

torch = pytest.importorskip("torch")
STREAM = 4321
NOT_READY = 600


class HostRuntime:
    """Copies at once. An event is ready when it is asked for the second time."""

    def __init__(self) -> None:
        self.made = 0
        self.alive: set[int] = set()
        self.asked: list[int] = []
        self.fails = 0
        functions = {name: getattr(self, name) for name in dir(self) if name.startswith("cuda")}
        self.short = self.long = SimpleNamespace(**functions)

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> int:
        assert stream == STREAM
        if self.fails:
            return self.fails
        ctypes.memmove(to, source, size)
        return 0

    def cudaEventCreateWithFlags(self, handle: Any, flags: int) -> int:
        assert flags == 3
        self.made += 1
        self.alive.add(self.made)
        handle._obj.value = self.made
        return 0

    def cudaEventRecord(self, handle: int, stream: int) -> int:
        assert handle in self.alive
        assert stream == STREAM
        return 0

    def cudaEventQuery(self, handle: int) -> int:
        self.asked.append(handle)
        return NOT_READY if len(self.asked) % 2 else 0

    def cudaEventSynchronize(self, handle: int) -> int:
        assert handle in self.alive
        return self.fails

    def cudaGetLastError(self) -> int:
        return NOT_READY

    def cudaEventDestroy(self, handle: int) -> int:
        self.alive.remove(handle)
        return 0


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostRuntime:
    made = HostRuntime()
    monkeypatch.setattr(cuda, "runtime", lambda: made)
    monkeypatch.setattr(cuda, "can_read_to_device", lambda: False)
    monkeypatch.setattr(cuda, "BUFFER", 100)
    monkeypatch.setattr(CudaDevice, "pin", lambda self, memory: None)
    monkeypatch.setattr(CudaDevice, "unpin", lambda self, memory: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    return made


@pytest.fixture
def stream(host: HostRuntime) -> Iterator[CudaStream]:
    format = get_format("nvfp4")
    device = CudaDevice(0, Engine(format, get_contract("modelopt", format), "optimal", repairs=True))
    device.name = "cpu"
    found = CudaStream(device, SimpleNamespace(cuda_stream=STREAM))  # type: ignore[arg-type]
    found.begin()
    yield found
    found.close()
    assert host.alive == set()


def test_copies_and_parts_of_memory(stream: CudaStream) -> None:
    memory = stream._device.allocate(1000)
    data = np.arange(200, dtype=np.uint8)
    stream.upload(data, memory[300:500])
    back = np.zeros(50, np.uint8)
    stream.download(memory[300:500][10:60], back)
    assert_same_bits(back, data[10:60])
    assert memory[300:500][10:60].tensor.tolist() == data[10:60].tolist()
    assert len(memory[300:500]) == 200


@pytest.mark.parametrize("size", [1, 100, 950])
def test_files_without_the_compiled_reader(stream: CudaStream, tmp_path: Path, size: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    (tmp_path / "x").write_bytes(data.tobytes())
    memory = stream._device.allocate(2000)
    file = os.open(tmp_path / "x", os.O_RDONLY)
    assert stream.fill(file, 50, memory[:size], None) == (size, None)
    assert memory[:size].tensor.numpy().tobytes() == data[50 : 50 + size].tobytes()
    assert stream.fill(file, 900, memory[:300], None) == (100, None)
    os.close(file)


def test_events_are_used_again(stream: CudaStream, host: HostRuntime) -> None:
    before = host.made
    for _ in range(20):
        first, second = stream.record(), stream.record()
        first.wait()
        first.wait()  # a second time waits for nothing
        second.wait()
    assert host.made == before + 2
    assert len(set(stream._free)) == len(stream._free) == 2


def test_errors_of_the_device(stream: CudaStream, host: HostRuntime) -> None:
    memory = stream._device.allocate(10)
    event, other = stream.record(), stream.record()
    host.fails = 700
    with pytest.raises(BackendError, match="a copy failed with CUDA's error 700"):
        stream.upload(np.zeros(10, np.uint8), memory)
    host.asked = []
    with pytest.raises(BackendError, match="waiting for the device failed with CUDA's error 700"):
        event.wait()
    host.fails = 0
    other.wait()


def test_no_memory(stream: CudaStream, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*arguments: object, **options: object) -> None:
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(DeviceMemoryError, match="full"):
        stream._device.allocate(1000)


@pytest.mark.parametrize("amax", [None, np.float32(3.5)])
def test_a_launch_gets_addresses_and_the_amax(
    stream: CudaStream, monkeypatch: pytest.MonkeyPatch, amax: np.float32 | None
) -> None:
    launched: list[tuple[int, ...]] = []
    asked: list[tuple[object, ...]] = []

    class Calls:
        usual = True

        def __init__(self, request: object, device: object) -> None:
            pass

        def bound(self, rows: int, columns: int, whose: str) -> object:
            asked.append((rows, columns, whose))
            launch = lambda *slots: launched.append(slots)  # noqa: E731
            return SimpleNamespace(small_floats=5, table_bytes=100, launch=launch)

    monkeypatch.setattr(cuda, "QuantizingCalls", Calls)
    memory = stream._device.allocate(4096)
    matrix = Matrix(memory[512:1536], np.dtype(ml_dtypes.bfloat16), 16, 32)
    for _ in range(2):
        stream.quantize(matrix, amax, memory[2048:2304], memory[2560:2592])
    assert asked == [(16, 32, "own" if amax is None else "value")]
    assert launched[0] == launched[1]
    x, codes, scales, small, given, tables = launched[0]
    base = memory.pointer
    assert (x - base, codes - base, scales - base, tables - small) == (512, 2048, 2560, 256)
    assert given == (0 if amax is None else int(np.array(amax).view(np.uint32)))


def test_memory_that_the_system_does_not_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once, is no error of whatever asks next, and is not unpinned."""
    log: list[tuple[str, int]] = []
    status = {1: 0, 2: 801, 3: 801}
    pages = [np.zeros(8, np.uint8) for _ in status]
    number = {page.ctypes.data: i for i, page in enumerate(pages, 1)}

    def register(address: int, size: int, flags: int) -> int:
        assert (size, flags) == (8, 1)
        log.append(("pin", number[address]))
        return status[number[address]]

    def unregister(address: int) -> int:
        log.append(("unpin", number[address]))
        return 0

    calls = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    last = SimpleNamespace(cudaGetLastError=lambda: log.append(("last error", 0)))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "runtime", lambda: SimpleNamespace(short=last))
    device = CudaDevice(0, Engine(None, None, None, repairs=False))
    device.pin(pages[0])
    with pytest.warns(RuntimeWarning, match=r"cuda:0: the system gives no pinned memory \(CUDA's error 801\)"):
        device.pin(pages[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.pin(pages[2])
    for page in pages:
        device.unpin(page)
    pinned = [("pin", 1), ("pin", 2), ("last error", 0), ("pin", 3), ("last error", 0)]
    assert log == [*pinned, ("unpin", 1)]
