"""CUDA devices by torch: the only file of a conversion that knows of CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.gpu import group_amaxes
from halfbyte.checkpoint.execute.device.protocol import DeviceMemoryError, Encoded, Matrix
from halfbyte.checkpoint.execute.device.torch_decode import decode
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.codec.bits import U8, dtype_name
from halfbyte.errors import UnsupportedError
from halfbyte.quantize import quantize
from halfbyte.types import QuantizedTensor

if TYPE_CHECKING:
    import torch

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
        return CudaStream(stream, self._engine)

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

    def wait(self) -> None:
        self._event.synchronize()


class CudaStream:
    """A stream of one device. The thread that uses it has it as its current stream."""

    def __init__(self, stream: torch.cuda.Stream, engine: Engine) -> None:
        self._stream, self._engine = stream, engine

    def begin(self) -> None:
        import torch

        torch.cuda.set_stream(self._stream)

    def upload(self, host: npt.NDArray[Any], memory: torch.Tensor) -> None:
        memory.copy_(_bytes(host), non_blocking=True)

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
        shape = (matrix.rows, matrix.columns)
        rows = matrix.rows
        out = QuantizedTensor(
            engine.format, shape, codes.view(rows, -1), scales.view(rows, -1), None, None, engine.contract
        )
        with _running_out():
            quantize(
                _values(matrix), engine.format, engine.contract, engine.method, global_amax=amax, backend="gpu", out=out
            )

    def record(self) -> CudaEvent:
        return CudaEvent(self._stream)


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
