"""CUDA devices by torch: the only file of a conversion that knows of CUDA."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.device_reading import DeviceReader, can_read_to_device
from halfbyte.backends.gpu import group_amaxes
from halfbyte.checkpoint.execute.device.protocol import DeviceMemoryError, Encoded, Matrix
from halfbyte.checkpoint.execute.device.torch_decode import decode
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.io.buffers import page_memory
from halfbyte.checkpoint.io.files import read_all
from halfbyte.codec.bits import U8, dtype_name
from halfbyte.errors import UnsupportedError
from halfbyte.quantize import quantize
from halfbyte.types import QuantizedTensor

if TYPE_CHECKING:
    import torch

BUFFER, BUFFERS = 1 << 20, 4
"""Bytes of the pinned buffers through which files are read, and how many a stream has: they stay in the cache."""

RUNTIME = ("cudaMemcpyAsync", "cudaEventRecord", "cudaEventSynchronize")

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device."""


class CudaDevice:
    """One CUDA device."""

    def __init__(self, index: int, engine: Engine) -> None:
        self.name = f"cuda:{index}"
        self._index, self._engine = index, engine

    def free(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info(self._index)[0])

    def allocate(self, size: int) -> torch.Tensor:
        import torch

        try:
            return torch.empty(size, dtype=torch.uint8, device=self.name)
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceMemoryError(f"{self.name} has no {size:,} bytes free") from error

    def stream(self) -> CudaStream:
        import torch

        stream = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
        return CudaStream(self, stream, self._engine)

    def pin(self, memory: U8) -> None:
        """If the system allows no pinned memory, copies are slower, and right."""
        import torch

        with torch.cuda.device(self._index):
            torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
                memory.ctypes.data, memory.nbytes, PORTABLE
            )

    def unpin(self, memory: U8) -> None:
        import torch

        with torch.cuda.device(self._index):
            torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)  # type: ignore[no-untyped-call]


class CudaEvent:
    """A point in a stream. Waiting sleeps: the processors have other work."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        import torch

        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    @property
    def handle(self) -> int:
        return int(self._event.cuda_event)

    def record(self, stream: torch.cuda.Stream) -> None:
        """Move the point to after all that was queued so far."""
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


class CudaStream:
    """A stream of one device. The thread that uses it has it as its current stream."""

    def __init__(self, device: CudaDevice, stream: torch.cuda.Stream, engine: Engine) -> None:
        self._device, self._stream, self._engine = device, stream, engine
        self._staging = page_memory(BUFFERS * BUFFER)
        device.pin(self._staging)
        self._events = [CudaEvent(stream) for _ in range(BUFFERS)]
        functions = runtime_functions() if can_read_to_device() else None
        handles = [event.handle for event in self._events]
        staging = self._staging[: BUFFERS * BUFFER]
        self._reader = None if functions is None else DeviceReader(functions, staging, handles, stream.cuda_stream)

    def begin(self) -> None:
        import torch

        torch.cuda.set_stream(self._stream)

    def upload(self, host: npt.NDArray[Any], memory: torch.Tensor) -> None:
        memory.copy_(_bytes(host), non_blocking=True)

    def fill(
        self, file: int, offset: int, memory: torch.Tensor, dtype: np.dtype[Any] | None
    ) -> tuple[int, np.float32 | None]:
        if self._reader is not None:
            return self._reader.read(file, offset, memory.numel(), memory.data_ptr(), dtype)
        done = 0
        for number, start in enumerate(range(0, memory.numel(), BUFFER)):
            size = min(BUFFER, memory.numel() - start)
            slot = number % BUFFERS
            buffer = self._staging[slot * BUFFER : slot * BUFFER + size]
            self._events[slot].wait()
            done += read_all(file, offset + start, buffer)
            if done < start + size:
                break
            self.upload(buffer, memory[start : start + size])
            self._events[slot].record(self._stream)
        return done, None

    def download(self, memory: torch.Tensor, host: npt.NDArray[Any]) -> None:
        _bytes(host).copy_(memory, non_blocking=True)

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        import torch

        values = out.view(torch.float32).view(-1, encoded.source.columns)
        with _running_out():
            decode(encoded.source, encoded.raw, encoded.scales, encoded.rows, values)

    def amax(self, matrix: Matrix, into: torch.Tensor) -> None:
        import torch

        with _running_out():
            into.view(torch.float32).copy_(group_amaxes(_values(matrix), matrix.rows))

    def quantize(self, matrix: Matrix, amax: np.float32 | None, codes: torch.Tensor, scales: torch.Tensor) -> None:
        engine = self._engine
        if engine.format is None or engine.contract is None:
            raise UnsupportedError("this conversion decodes; it has no format to quantize to")
        rows, shape = matrix.rows, (matrix.rows, matrix.columns)
        out = QuantizedTensor(
            engine.format, shape, codes.view(rows, -1), scales.view(rows, -1), None, None, engine.contract
        )
        given = None if amax is None else float(amax)
        with _running_out():
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
        return CudaEvent(self._stream)

    def close(self) -> None:
        self._device.unpin(self._staging)


@functools.cache
def runtime_functions() -> tuple[int, ...] | None:
    """Addresses of functions of the CUDA runtime that torch has loaded; None if it is not found."""
    import torch

    try:
        library = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
        functions = [getattr(library, name) for name in RUNTIME]
    except (OSError, AttributeError):
        return None
    return tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)


class _running_out:
    """Turns torch's error into the one that the conversion knows."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        import torch

        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise DeviceMemoryError(str(error)) from error


def _bytes(host: npt.NDArray[Any]) -> torch.Tensor:
    import torch

    return torch.from_numpy(host.reshape(-1).view(np.uint8))


def _values(matrix: Matrix) -> torch.Tensor:
    import torch

    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    values: torch.Tensor = matrix.memory.view(dtypes[dtype_name(matrix.dtype)]).view(matrix.rows, matrix.columns)
    return values
