"""A device made of threads and host memory. It does what is asked later, each stream at its own pace.

It copies when its turn comes, not when it is asked: a buffer that is reused too early gives wrong bytes. Memory is
counted, host buffers must be pinned, and kernels can be told to run out of memory.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.gpu import WORDS
from halfbyte.backends.headroom import Trial
from halfbyte.checkpoint.execute.device.protocol import STAGED, DeviceMemoryError, Encoded, Matrix
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.io.files import read_all
from halfbyte.codec.bits import U8

GARBAGE = 0xA5
SLOWEST = 0.002
"""Seconds that a stream waits at most before it does something."""


class FakeDevice:
    """Memory of a given size, and streams that lag behind."""

    def __init__(self, name: str, engine: Engine, memory: int = 1 << 30, seed: int = 0) -> None:
        self.name, self.engine, self.memory = name, engine, memory
        self.used = self.most_used = 0
        self.pinned: dict[int, int] = {}
        self.most_pinned = 0
        self.calls: dict[str, int] = {}
        self.failures: dict[str, set[int]] = {}
        """Kind of kernel → its calls, counted from 0, that run out of memory."""
        self.rows_before: list[int] = []
        """Of each survey: the rows of its tensor before those that it saw."""
        self.breaks_at: int | None = None
        """The call of "quantize" from which on everything fails, as after an error of the hardware."""
        self.broken = False
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def free(self) -> int:
        return self.memory - self.used

    def allocate(self, size: int) -> U8:
        with self._lock:
            if self.used + size > self.memory:
                raise DeviceMemoryError(f"{self.name} is full")
            self.used += size
            self.most_used = max(self.most_used, self.used)
        memory = np.full(size, GARBAGE, np.uint8)
        weakref.finalize(memory, self._give_back, size)
        return memory

    def _give_back(self, size: int) -> None:
        with self._lock:
            self.used -= size

    def stream(self) -> FakeStream:
        return FakeStream(self)

    def pin(self, memory: U8) -> None:
        with self._lock:
            self.pinned[memory.ctypes.data] = memory.nbytes
            self.most_pinned = max(self.most_pinned, sum(self.pinned.values()))

    def unpin(self, memory: U8) -> None:
        with self._lock:
            del self.pinned[memory.ctypes.data]

    def check_pinned(self, host: npt.NDArray[Any]) -> None:
        start, stop = host.ctypes.data, host.ctypes.data + host.nbytes
        with self._lock:
            inside = any(first <= start and stop <= first + size for first, size in self.pinned.items())
        assert inside, "a copy needs pinned memory"

    def count(self, kind: str) -> None:
        """Count a call, and run out of memory if this one should."""
        with self._lock:
            number = self.calls.get(kind, 0)
            self.calls[kind] = number + 1
            self.broken |= kind == "quantize" and number == self.breaks_at
        if number in self.failures.get(kind, ()):
            raise DeviceMemoryError(f"{self.name} has no memory for {kind} {number}")

    def pause(self) -> float:
        with self._lock:
            return self._random.choice((0.0, 0.0, SLOWEST * self._random.random()))


class FakeEvent:
    """A point in a stream."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        assert self.reached.wait(60), "a stream hangs"
        if self.error is not None:
            raise self.error


class FakeStream:
    """A thread that does one thing after the other."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._error: BaseException | None = None
        self._user: int | None = None
        self._fills = 0
        self._staging = np.empty(STAGED, np.uint8)
        device.pin(self._staging)
        threading.Thread(target=_work, args=(self._queue, device), daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def begin(self) -> None:
        self._user = threading.get_ident()

    def _add(self, act: Callable[[], None]) -> None:
        assert self._user == threading.get_ident(), "another thread uses this stream"
        failed = self._failed = getattr(self, "_failed", [])

        def run() -> None:
            try:
                if self_device.broken:
                    raise RuntimeError("an unspecified launch failure")
                act()
            except BaseException as error:
                failed.append(error)

        self_device = self._device
        self._queue.put(run)

    def upload(self, host: npt.NDArray[Any], memory: U8) -> None:
        assert host.nbytes == memory.nbytes
        assert host.flags.c_contiguous
        self._device.check_pinned(host)
        self._add(lambda: np.copyto(memory, host.reshape(-1).view(np.uint8)))

    def fill(self, file: int, offset: int, memory: U8, dtype: np.dtype[Any] | None) -> tuple[int, np.float32 | None]:
        """Reads now, copies later. Every other call finds the amax."""
        self._fills += 1
        read = np.empty(memory.size, np.uint8)
        done = read_all(file, offset, read)
        self._add(lambda: np.copyto(memory, read))
        if dtype is None or self._fills % 2:
            return done, None
        return done, self._device.engine.amax(read.view(dtype))

    def download(self, memory: U8, host: npt.NDArray[Any]) -> None:
        assert host.nbytes == memory.nbytes
        self._device.check_pinned(host)
        self._add(lambda: np.copyto(host.reshape(-1).view(np.uint8), memory))

    def decode(self, encoded: Encoded, out: U8) -> None:
        import torch

        from halfbyte.checkpoint.execute.device.torch_decode import decode

        self._device.count("decode")
        values = torch.from_numpy(out.view(np.float32)).view(-1, encoded.source.columns)
        raw, scales = torch.from_numpy(encoded.raw), torch.from_numpy(encoded.scales)
        self._add(lambda: decode(encoded.source, raw, scales, encoded.rows, values))

    def amax(self, matrix: Matrix, into: U8) -> None:
        self._device.count("amax")

        def run() -> None:
            into.view(np.float32)[0] = self._device.engine.amax(_values(matrix))

        self._add(run)

    def survey(self, matrix: Matrix, amax: np.float32, tried: tuple[Trial, int], scratch: U8, into: U8) -> None:
        self._device.count("survey")
        self._device.rows_before.append(tried[1])
        assert scratch.nbytes >= matrix.rows * matrix.columns // 2

        def run() -> None:
            scratch[:] = 0xA5  # a card writes there
            totals = self._device.engine.survey(_values(matrix), amax, *tried)
            words = into.view(np.int64).reshape(len(tried[0].candidates), WORDS)
            for at, total in enumerate(totals):
                for index in range(WORDS):
                    word = (total or 0) >> 32 * index
                    words[at, index] = word & 0xFFFFFFFF if index < WORDS - 1 else word

        self._add(run)

    def quantize(self, matrix: Matrix, amax: np.float32 | None, codes: U8, scales: U8) -> None:
        self._device.count("quantize")
        rows = matrix.rows
        given = None if amax is None else np.float32(amax)

        def run() -> None:
            self._device.engine.quantize(_values(matrix), given, codes.reshape(rows, -1), scales.reshape(rows, -1))

        self._add(run)

    def close(self) -> None:
        self._device.unpin(self._staging)

    def record(self) -> FakeEvent:
        event = FakeEvent()
        failed = self._failed = getattr(self, "_failed", [])

        def reach() -> None:
            event.error = failed[0] if failed else None
            event.reached.set()

        self._queue.put(reach)
        return event


def _work(work: queue.Queue[Callable[[], None] | None], device: FakeDevice) -> None:
    while (act := work.get()) is not None:
        time.sleep(device.pause())
        act()


def _values(matrix: Matrix) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = matrix.memory.view(matrix.dtype).reshape(matrix.rows, matrix.columns)
    return values
