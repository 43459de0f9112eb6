"""The device on which a conversion computes. It is checked before any work; torch is imported only if it can help."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from halfbyte.errors import InputError, UnsupportedError


def resolve_device(device: str) -> str:
    """The device by its full name: cpu, or cuda:N if it exists. auto: CUDA if torch finds a device, else cpu."""
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdigit())):
        raise InputError(f"unknown device {device!r}; known: auto, cpu, cuda, cuda:0, cuda:1, …")
    if kind == "cpu":
        return "cpu"
    if importlib.util.find_spec("torch") is None:
        if kind == "auto":
            return "cpu"
        raise UnsupportedError(f"device {device} needs torch with CUDA, and torch is not installed; use --device cpu")
    if kind == "auto" and not _driver_present():
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        if kind == "auto":
            return "cpu"
        raise UnsupportedError(f"device {device}: torch finds no CUDA device here; use --device cpu")
    count = torch.cuda.device_count()
    number = int(index) if index else 0
    if number >= count:
        raise UnsupportedError(f"device {device}: this machine has {count} CUDA devices, counted from 0")
    return f"cuda:{number}"


def _driver_present() -> bool:
    """Whether an NVIDIA driver is present. Without one there is no need to import torch, which is slow and large."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/nvidia0"))
