"""Where the study computes: numpy arrays on the CPU, or torch tensors on a GPU, which quantize and decode there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from halfbyte.arrays import Array
from halfbyte.errors import UnsupportedError, unknown_name

DEVICES = ("cpu", "cuda")


def on_device(device: str) -> Callable[[npt.NDArray[np.generic]], Array]:
    """A function that puts an array on a device; refused at once where the device is not there."""
    if device not in DEVICES:
        raise unknown_name("device", device, DEVICES)
    if device == "cpu":
        return lambda x: x
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError("device cuda needs PyTorch; install it, or use device cpu") from error
    if not torch.cuda.is_available():
        raise UnsupportedError("device cuda: PyTorch sees no CUDA device here; use device cpu")
    return lambda x: torch.from_numpy(x).to("cuda")
