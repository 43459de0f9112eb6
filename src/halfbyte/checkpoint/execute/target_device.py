"""The devices on which a conversion computes, checked before any work. torch is imported only if it can help."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from halfbyte.checkpoint.execute.device.protocol import Device
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.errors import InputError, UnsupportedError

CPU = "cpu"


def resolve_devices(device: str) -> tuple[str, ...]:
    """The devices by their full names: cpu alone, or those of cuda:N that were named. cuda: all that torch finds."""
    found = re.fullmatch(r"cpu|cuda(:\d+(,\d+)*)?", device)
    if found is None:
        raise InputError(f"unknown device {device!r}; known: auto, cpu, cuda (all of them), cuda:0, cuda:0,2, …")
    if device == CPU:
        return (CPU,)
    count = cuda_count()
    if isinstance(count, str):
        raise UnsupportedError(f"device {device}{count}; use --device cpu")
    numbers = range(count) if ":" not in device else sorted({int(n) for n in device.partition(":")[2].split(",")})
    for number in numbers:
        if number >= count:
            raise UnsupportedError(f"device {device}: this machine has {count} CUDA devices, counted from 0")
    return tuple(f"cuda:{number}" for number in numbers)


def cuda_count() -> int | str:
    """How many CUDA devices torch finds, or why there are none."""
    if importlib.util.find_spec("torch") is None:
        return " needs torch with CUDA, and torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return ": torch finds no CUDA device here"
    return torch.cuda.device_count()


def driver_present() -> bool:
    """Whether an NVIDIA driver is present. Without one there is no need to import torch, which is slow and large."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/nvidia0"))


def open_devices(device: str, engine: Engine) -> tuple[Device, ...]:
    """The devices that a run uses; none for the CPU."""
    names = resolve_devices(device)
    if names == (CPU,) or engine.format is None:
        return ()
    from halfbyte.checkpoint.execute.device.cuda import CudaDevice

    return tuple(CudaDevice(int(name.partition(":")[2]), engine) for name in names)
