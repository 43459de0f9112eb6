"""quantize() as the vectors call it: a backend that takes tensors on a device is given the operand there."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from halfbyte.arrays import Array, like
from halfbyte.backends import get_backend
from halfbyte.backends.gpu import interpreting
from halfbyte.contracts import Contract
from halfbyte.errors import BackendError
from halfbyte.formats import BlockFormat
from halfbyte.methods import Method
from halfbyte.quantize import quantize as quantize_array
from halfbyte.types import QuantizedTensor


def placed(x: npt.NDArray[Any], backend: str) -> Array:
    """The operand where the backend computes: as it is, or on a device."""
    if backend == "auto" or not get_backend(backend).takes_tensors:
        return x
    try:
        import torch
    except ImportError as error:
        raise BackendError(f"backend {backend} needs torch; install halfbyte[gpu]") from error

    if not (torch.cuda.is_available() or interpreting()):
        raise BackendError(f"backend {backend} needs a CUDA device, and there is none")
    return like(x, torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu"))


def quantize(
    x: npt.NDArray[Any],
    format: str | BlockFormat,
    contract: Contract,
    method: Method | None = None,
    global_amax: object = None,
    backend: str = "auto",
) -> QuantizedTensor:
    """The public quantize(), on the device that the backend computes on."""
    return quantize_array(placed(x, backend), format, contract, method, global_amax=global_amax, backend=backend)
