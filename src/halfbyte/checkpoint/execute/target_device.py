"""The devices on which a conversion computes, checked before any work. torch is imported only if it can help."""

from __future__ import annotations

import importlib.util
import platform
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from halfbyte.backends import BACKENDS
from halfbyte.backends.feedback import unserved_feedback
from halfbyte.backends.gpu import OLDEST, capability_of
from halfbyte.checkpoint.execute.device.cards import Card
from halfbyte.checkpoint.execute.device.protocol import Device
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.io.views import NUMPY, SourceMatrix
from halfbyte.checkpoint.plan.types import Calibrated, Plan
from halfbyte.codec.bits import dtype_name
from halfbyte.contracts import Contract
from halfbyte.errors import InputError, UnsupportedError
from halfbyte.feedback import request_for
from halfbyte.formats import BlockFormat
from halfbyte.methods import Hessian, Optimal
from halfbyte.request import resolve

CPU = "cpu"


def resolve_device(device: str) -> str:
    """The full name: cpu, or cuda:0,2 with the number of every device, each once. cuda stands for all of them."""
    found = re.fullmatch(r"cpu|cuda(:\d+(,\d+)*)?", device)
    if found is None:
        raise InputError(f"unknown device {device!r}; known: auto, cpu, cuda (all of them), cuda:0, cuda:0,2, …")
    if device == CPU:
        return CPU
    count = cuda_count()
    if isinstance(count, str):
        raise UnsupportedError(f"device {device}{count}; use --device cpu")
    numbers = numbers_of(device) or tuple(range(count))
    if max(numbers) >= count:
        raise UnsupportedError(f"device {device}: this machine has {count} CUDA devices, counted from 0")
    return f"cuda:{','.join(map(str, numbers))}"


def numbers_of(device: str) -> tuple[int, ...]:
    """The numbers in the name of CUDA devices."""
    return tuple(sorted({int(number) for number in re.findall(r"\d+", device)}))


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


def kernel_reason(plan: Plan) -> str | None:
    """Why GPUs have no kernel for what a plan quantizes, or None. Asks no GPU."""
    if plan.format is None:
        return None
    if plan.solved is not None:
        return "weights that are solved already are written by the CPU"
    if plan.calibrated is not None and plan.contract is not None:
        return solving_reason(plan.calibrated, plan.format, plan.contract)
    if plan.smoothing is not None:
        return "smoothed weights are computed on the CPU"
    for dtype in sorted(
        {_dtype(source) for unit in plan.units if unit.action == "quantize" for source in unit.sources}
    ):
        request = resolve(plan.format, plan.contract, plan.method, dtype=dtype, device="cuda")
        reason = BACKENDS["gpu"].supports(request)
        if reason is not None:
            return reason
    return None


def _dtype(source: SourceMatrix) -> str:
    """The dtype of a source's values: its own, or float32 if it is decoded."""
    return dtype_name(NUMPY[source.weight.dtype]) if source.kind == "float" else "fp32"


def open_devices(device: str, plan: Plan, engine: Engine) -> tuple[Device, ...]:
    """The devices that a run uses; none for the CPU, and none if nothing is quantized."""
    if plan.calibrated is not None:
        return ()
    name = resolve_device(device)
    if name == CPU or all(unit.action != "quantize" for unit in plan.units):
        return ()
    if (reason := kernel_reason(plan)) is not None:
        raise UnsupportedError(f"device {device} cannot do this: {reason}; use --device cpu")
    from halfbyte.checkpoint.execute.device.cuda import CudaDevice

    _check_capability(name)
    return tuple(CudaDevice(number, engine) for number in numbers_of(name))


def open_cards(device: str, plan: Plan, engine: Engine) -> tuple[Card, ...]:
    """The GPUs that solve the modules of a plan by their statistics; none for the CPU."""
    name = resolve_device(device)
    if name == CPU or plan.calibrated is None:
        return ()
    if (reason := kernel_reason(plan)) is not None:
        raise UnsupportedError(f"device {device} cannot do this: {reason}; use --device cpu")
    from halfbyte.checkpoint.execute.device.torch_card import TorchCard

    _check_capability(name)
    return tuple(TorchCard(f"cuda:{number}", engine) for number in numbers_of(name))


def _check_capability(name: str) -> None:
    for number in numbers_of(name):
        if (found := capability_of(number)) < OLDEST:
            raise UnsupportedError(
                f"device cuda:{number} has compute capability {found[0]}.{found[1]}, and the kernels need "
                f"{OLDEST[0]}.{OLDEST[1]}; use --device cpu"
            )


def kind_of(device: str) -> str:
    """What computes, by name: last bits may depend on it. Raises if GPUs of several kinds would."""
    name = resolve_device(device)
    if name == CPU:
        return f"{CPU} {platform.machine()}"
    import torch

    kinds = sorted({str(torch.cuda.get_device_name(number)) for number in numbers_of(name)})
    if len(kinds) > 1:
        raise UnsupportedError(
            f"device {device}: {' and '.join(kinds)} may differ in the last bits of factors; give GPUs of one kind"
        )
    return kinds[0]


def placed(plan: Plan, device: str) -> Plan:
    """The plan with the name of what makes the factors of gptq, which its fingerprint and manifest have."""
    known = plan.calibrated
    if known is None or known.kind != "gptq" or known.device:
        return plan
    return replace(plan, calibrated=replace(known, device=kind_of(device)))


def solving_reason(planned: Calibrated, format: BlockFormat, contract: Contract) -> str | None:
    """Why GPUs cannot solve by statistics, or None. Asks no GPU."""
    one = Hessian(np.eye(format.block, dtype=np.float32)[None])
    if planned.kind == "gptq":
        request = replace(request_for(format, contract), method=one, device="cuda")
        return unserved_feedback(request, planned.method.descent)
    for method in (one, Optimal(np.ones(1, np.float32))):
        request = resolve(format, contract, method, dtype="fp32", device="cuda")
        if (reason := BACKENDS["gpu"].supports(request)) is not None:
            return reason
    return None
