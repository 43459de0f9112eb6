"""A CUDA device that solves, by torch and the kernels of halfbyte."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from halfbyte.arrays import to_numpy
from halfbyte.checkpoint.execute.device.protocol import DeviceMemoryError
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.solving import formats_of
from halfbyte.codec.bits import F32, U8
from halfbyte.feedback import Factor, prepare, request_for, solve_weight
from halfbyte.methods import Gptq, Method
from halfbyte.quantize import quantize
from halfbyte.statistics import LinearStatistics
from halfbyte.types import QuantizedTensor

T = TypeVar("T")


class TorchCard:
    """A Card (cards.py) of torch."""

    def __init__(self, device: str, engine: Engine) -> None:
        self.name, self.device = device, torch.device(device)
        self.format, self.contract = formats_of(engine)
        self._limited = False

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def begin(self, limit: int | None) -> None:
        """From here on torch itself refuses to take more than the limit on this device."""
        torch.cuda.set_device(self.device)
        if limit is not None:
            total = torch.cuda.mem_get_info(self.device)[1]
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), self.device)
            self._limited = True

    def factor(self, known: LinearStatistics, block: int, method: Gptq, name: str) -> Factor:
        second, cross = known.second_moment, known.cross_moment
        return _counted(lambda: prepare(second, block, method, cross_moment=cross, device=str(self.device), name=name))

    def solve(self, values: F32, factor: Factor, amax: np.float32 | None, name: str) -> tuple[U8, U8]:
        def run() -> tuple[U8, U8]:
            x = torch.from_numpy(values).to(self.device)
            request = request_for(self.format, self.contract, 1)
            return _parts(solve_weight(x, factor, request, global_amax=amax, backend="auto", name=name))

        return _counted(run)

    def quantize(self, values: F32, method: Method, amax: np.float32 | None) -> tuple[U8, U8]:
        def run() -> tuple[U8, U8]:
            x = torch.from_numpy(values).to(self.device)
            return _parts(quantize(x, self.format, self.contract, method, global_amax=amax))

        return _counted(run)

    def release(self) -> None:
        torch.cuda.empty_cache()

    def end(self) -> None:
        self.release()
        if self._limited:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)


def _counted(job: Callable[[], T]) -> T:
    """The result of a job; torch's error for lack of memory becomes ours, without its frames, which hold tensors."""
    try:
        return job()
    except torch.cuda.OutOfMemoryError as error:
        message = str(error)
    raise DeviceMemoryError(message)


def _parts(q: QuantizedTensor) -> tuple[U8, U8]:
    return to_numpy(q.codes), to_numpy(q.scales)
