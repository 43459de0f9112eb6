"""Where the study computes: with numpy arrays on the CPU, or with torch tensors on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from halfbyte.arrays import Array, like
from halfbyte.errors import UnsupportedError, unknown_name

DEVICES = ("cpu", "cuda")


def on_device(device: str) -> Callable[[npt.NDArray[np.generic]], Array]:
    """A function that puts an array on a device. Raises at once if the device is missing."""
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
    return lambda x: like(x, torch.empty(0, device="cuda"))
