"""CUDA devices: the only file of a conversion that knows of CUDA.

Sixteen threads share Python's lock, and every operation of torch lets go of it and has to wait for it again. So what
each tensor needs (copies, events, kernels) is called by address, and only calls that take long let go of the lock.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from halfbyte.backends.device_reading import DeviceReader, can_read_to_device
from halfbyte.backends.gpu import Bound, BoundSurvey, QuantizingCalls, float32_bits, group_amaxes, survey_matrix
from halfbyte.backends.headroom import Sample, Trial
from halfbyte.checkpoint.execute.device.cuda_runtime import check, runtime
from halfbyte.checkpoint.execute.device.protocol import STAGED, DeviceMemoryError, Encoded, Matrix
from halfbyte.checkpoint.execute.device.torch_decode import decode
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.io.buffers import page_memory
from halfbyte.checkpoint.io.files import read_all
from halfbyte.codec.bits import U8, dtype_name
from halfbyte.errors import UnsupportedError
from halfbyte.quantize import quantize
from halfbyte.request import Request, resolve
from halfbyte.types import QuantizedTensor

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

BUFFERS = 4
BUFFER = STAGED // BUFFERS
"""Bytes of the pinned buffers through which files are read, and how many a stream has: they stay in the cache."""

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device."""

BLOCKING_WITHOUT_TIMING = 1 | 2
"""Flags of events. Waiting sleeps: the processors have other work."""

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3


class CudaMemory:
    """A part of a tensor of bytes on a device."""

    __slots__ = ("_offset", "_owner", "_size", "pointer")

    def __init__(self, owner: torch.Tensor, pointer: int, offset: int, size: int) -> None:
        self._owner, self.pointer, self._offset, self._size = owner, pointer, offset, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> CudaMemory:
        start, stop, _ = part.indices(self._size)
        return CudaMemory(self._owner, self.pointer + start, self._offset + start, stop - start)

    @property
    def tensor(self) -> torch.Tensor:
        return self._owner[self._offset : self._offset + self._size]


class CudaDevice:
    """One CUDA device."""

    def __init__(self, index: int, engine: Engine) -> None:
        self.name = f"cuda:{index}"
        self.index, self.engine = index, engine
        self._calls: dict[str, QuantizingCalls] = {}
        self._bound: dict[tuple[str, int, int, bool], Bound] = {}
        self._surveys: dict[tuple[str, int, int, Trial], BoundSurvey] = {}
        self._made: set[object] = set()
        self._unpinned: set[int] = set()
        """Addresses of memory that the system did not pin."""
        self._lock = threading.Lock()

    def free(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info(self.index)[0])

    def allocate(self, size: int) -> CudaMemory:
        import torch

        with _RunningOut():
            owner = torch.empty(size, dtype=torch.uint8, device=self.name)
        return CudaMemory(owner, owner.data_ptr(), 0, size)

    def stream(self) -> CudaStream:
        import torch

        stream = torch.cuda.Stream(self.index)  # type: ignore[no-untyped-call]
        return CudaStream(self, stream)

    def pin(self, memory: U8) -> None:
        """If the system allows no pinned memory, copies are slower, and right."""
        import torch

        with torch.cuda.device(self.index):
            status = int(
                torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
                    memory.ctypes.data, memory.nbytes, PORTABLE
                )
            )
        if status == 0:
            return
        runtime().short.cudaGetLastError()  # else it would be taken for an error of whatever asks next
        with self._lock:
            is_first = not self._unpinned
            self._unpinned.add(memory.ctypes.data)
        if is_first:
            warnings.warn(
                f"{self.name}: the system gives no pinned memory (CUDA's error {status}), so copies to and from the "
                "device are slow; raise its limit, or use --device cpu",
                RuntimeWarning,
                stacklevel=2,
            )

    def unpin(self, memory: U8) -> None:
        import torch

        with self._lock:
            if memory.ctypes.data in self._unpinned:
                self._unpinned.remove(memory.ctypes.data)
                return
        with torch.cuda.device(self.index):
            torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)  # type: ignore[no-untyped-call]

    def bound(self, matrix: Matrix, given: bool) -> Bound | None:
        """The kernels for a matrix, with a given amax or none; None if operands are not taken as they are.

        They are made once: several threads would compile the same.
        """
        key = (dtype_name(matrix.dtype), matrix.rows, matrix.columns, given)
        found = self._bound.get(key)
        if found is not None:
            return found
        with self._lock:
            calls = self._calls_for(key[0])
            if not calls.usual:
                return None
            return self._bound.setdefault(key, calls.bound(matrix.rows, matrix.columns, "value" if given else "own"))

    def bound_survey(self, matrix: Matrix, trial: Trial) -> BoundSurvey | None:
        """Likewise the kernels that survey a matrix under a given amax."""
        key = (dtype_name(matrix.dtype), matrix.rows, matrix.columns, trial)
        found = self._surveys.get(key)
        if found is not None:
            return found
        with self._lock:
            calls = self._calls_for(key[0])
            if not calls.usual:
                return None
            if key not in self._surveys:
                self._surveys[key] = calls.survey(matrix.rows, matrix.columns, trial)
            return self._surveys[key]

    @property
    def block(self) -> int:
        """Elements of a block of the format."""
        return 1 if self.engine.format is None else self.engine.format.block

    def request(self, dtype: str) -> Request:
        """What is asked for, of operands of that dtype."""
        return self._calls_for(dtype).request

    def once(self, key: object, call: Callable[[], T]) -> T:
        """A call whose kernels are compiled when it is first made: by one thread, while others wait."""
        if key in self._made:
            return call()
        with self._lock:
            made = call()
            self._made.add(key)
            return made

    def _calls_for(self, dtype: str) -> QuantizingCalls:
        import torch

        if dtype not in self._calls:
            engine = self.engine
            if engine.format is None:
                raise UnsupportedError("this conversion decodes; it has no format to quantize to")
            request = resolve(engine.format, engine.contract, engine.method, dtype=dtype, device="cuda")
            self._calls[dtype] = QuantizingCalls(request, torch.device(self.name))
        return self._calls[dtype]


class CudaEvent:
    """A point in a stream."""

    def __init__(self, handle: int, free: list[int]) -> None:
        self._handle: int | None = handle
        self._free = free

    def wait(self) -> None:
        """Wait for the point. The handle is free for another one then."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        if runtime().short.cudaEventQuery(handle):
            runtime().short.cudaGetLastError()  # "not ready" is no error, but would be taken for one by who asks next
            check(runtime().long.cudaEventSynchronize(handle), "waiting for the device")
        self._free.append(handle)


class CudaStream:
    """A stream of one device. The thread that uses it has it as its current stream."""

    def __init__(self, device: CudaDevice, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        self._handle = int(stream.cuda_stream)
        self._events: list[int] = []
        """All that were made."""
        self._free: list[int] = []
        """Those of which no point is waited for."""
        self._scratch: torch.Tensor | None = None
        self._ring: list[int] = []
        self._staging = page_memory(BUFFERS * BUFFER)
        self._reader: DeviceReader | None = None
        device.pin(self._staging)

    def begin(self) -> None:
        import torch

        torch.cuda.set_device(self._device.index)
        torch.cuda.set_stream(self._stream)
        if not self._ring:
            self._ring = [self._new_event() for _ in range(BUFFERS)]
            if can_read_to_device():
                staging = self._staging[: BUFFERS * BUFFER]
                self._reader = DeviceReader(runtime().addresses(), staging, self._ring, self._handle)

    def upload(self, host: npt.NDArray[Any], memory: CudaMemory) -> None:
        self._copy(memory.pointer, host.ctypes.data, host.nbytes, HOST_TO_DEVICE)

    def download(self, memory: CudaMemory, host: npt.NDArray[Any]) -> None:
        self._copy(host.ctypes.data, memory.pointer, host.nbytes, DEVICE_TO_HOST)

    def _copy(self, to: int, source: int, size: int, kind: int) -> None:
        check(runtime().short.cudaMemcpyAsync(to, source, size, kind, self._handle), "a copy")

    def fill(
        self, file: int, offset: int, memory: CudaMemory, dtype: np.dtype[Any] | None
    ) -> tuple[int, np.float32 | None]:
        if self._reader is not None:
            return self._reader.read(file, offset, len(memory), memory.pointer, dtype)
        done = 0
        for number, start in enumerate(range(0, len(memory), BUFFER)):
            size = min(BUFFER, len(memory) - start)
            slot = number % BUFFERS
            buffer = self._staging[slot * BUFFER : slot * BUFFER + size]
            check(runtime().long.cudaEventSynchronize(self._ring[slot]), "waiting for the device")
            done += read_all(file, offset + start, buffer)
            if done < start + size:
                break
            self.upload(buffer, memory[start : start + size])
            check(runtime().short.cudaEventRecord(self._ring[slot], self._handle), "an event")
        return done, None

    def decode(self, encoded: Encoded, out: CudaMemory) -> None:
        import torch

        values = out.tensor.view(torch.float32).view(-1, encoded.source.columns)
        with _RunningOut():
            decode(encoded.source, encoded.raw.tensor, encoded.scales.tensor, encoded.rows, values)

    def amax(self, matrix: Matrix, into: CudaMemory) -> None:
        import torch

        with _RunningOut():
            into.tensor.view(torch.float32).copy_(group_amaxes(_values(matrix), matrix.rows))

    def survey(
        self, matrix: Matrix, amax: np.float32, tried: tuple[Trial, int], scratch: CudaMemory, into: CudaMemory
    ) -> None:
        trial, before = tried
        bound = self._device.bound_survey(matrix, trial)
        if bound is None:
            self._survey_generally(matrix, amax, tried, scratch, into)
            return
        small = self._scratch_of(4 * bound.bound.small_floats)
        first = Sample(0, trial.step).behind(before * matrix.columns // self._device.block).first
        bound.launch(matrix.memory.pointer, scratch.pointer, small, float32_bits(float(amax)), first)
        self._copy(into.pointer, small + bound.first, bound.size, DEVICE_TO_DEVICE)

    def _survey_generally(
        self, matrix: Matrix, amax: np.float32, tried: tuple[Trial, int], scratch: CudaMemory, into: CudaMemory
    ) -> None:
        """A contract with a transform."""
        import torch

        def found() -> torch.Tensor:
            request = self._device.request(dtype_name(matrix.dtype))
            return survey_matrix(_values(matrix), request, float(amax), *tried, scratch.tensor)

        with _RunningOut():
            totals = self._device.once((dtype_name(matrix.dtype), tried[0]), found)
            into.tensor.view(torch.int64).copy_(totals.reshape(-1))

    def quantize(self, matrix: Matrix, amax: np.float32 | None, codes: CudaMemory, scales: CudaMemory) -> None:
        bound = self._device.bound(matrix, amax is not None)
        if bound is None:
            self._quantize_generally(matrix, amax, codes, scales)
            return
        given = 0 if amax is None else float32_bits(float(amax))
        small = -(-bound.small_floats * 4 // 256) * 256
        scratch = self._scratch_of(small + bound.table_bytes)
        bound.launch(matrix.memory.pointer, codes.pointer, scales.pointer, scratch, given, scratch + small)

    def _scratch_of(self, size: int) -> int:
        """Memory for the numbers of one call. Calls of a stream follow each other, so that all use the same."""
        import torch

        if self._scratch is None or self._scratch.numel() < size:
            with _RunningOut():
                self._scratch = torch.empty(max(size, 1 << 12), dtype=torch.uint8, device=self._device.name)
        return self._scratch.data_ptr()

    def _quantize_generally(
        self, matrix: Matrix, amax: np.float32 | None, codes: CudaMemory, scales: CudaMemory
    ) -> None:
        """A contract with square tiles or a transform."""
        engine, rows = self._device.engine, matrix.rows
        if engine.format is None or engine.contract is None:
            raise UnsupportedError("this conversion decodes; it has no format to quantize to")
        parts = codes.tensor.view(rows, -1), scales.tensor.view(rows, -1)
        out = QuantizedTensor(engine.format, (rows, matrix.columns), *parts, None, None, engine.contract)
        given = None if amax is None else float(amax)
        with _RunningOut():
            quantize(
                _values(matrix),
                engine.format,
                engine.contract,
                engine.method,
                global_amax=given,
                backend="gpu",
                out=out,
            )

    def record(self) -> CudaEvent:
        handle = self._free.pop() if self._free else self._new_event()
        check(runtime().short.cudaEventRecord(handle, self._handle), "an event")
        return CudaEvent(handle, self._free)

    def _new_event(self) -> int:
        handle = ctypes.c_void_p()
        check(runtime().short.cudaEventCreateWithFlags(ctypes.byref(handle), BLOCKING_WITHOUT_TIMING), "an event")
        self._events.append(handle.value or 0)
        return self._events[-1]

    def close(self) -> None:
        for handle in self._events:
            runtime().short.cudaEventDestroy(handle)
        self._events.clear()
        self._device.unpin(self._staging)


class _RunningOut:
    """Turns torch's error into the one that the conversion knows."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        import torch

        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise DeviceMemoryError(str(error)) from error


def _values(matrix: Matrix) -> torch.Tensor:
    import torch

    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    values: torch.Tensor = matrix.memory.tensor.view(dtypes[dtype_name(matrix.dtype)])
    return values.view(matrix.rows, matrix.columns)
