"""The numbers of a conversion: amax of chunks, codes and scales of chunks, on the CPU or a GPU. No files here.

Chunks of one matrix are quantized with the amax of the whole (and of all that share its scale), so that where a matrix
is cut changes no bit.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.arrays import like, to_numpy
from halfbyte.backends.amax import largest_magnitude
from halfbyte.codec.bits import BFLOAT16, F32, U8, dtype_name
from halfbyte.contracts import Contract, NVFP4Rule
from halfbyte.contracts.arithmetic import stored_scale, tensor_scale
from halfbyte.errors import CheckpointError, InputError, UnsupportedError
from halfbyte.formats import BlockFormat
from halfbyte.methods import Amax, Method
from halfbyte.quantize import quantize
from halfbyte.request import resolve
from halfbyte.types import QuantizedTensor

SMALLEST_AMAX = np.float32(2688 * 2.0**-126)
"""Below this amax / 2688 is subnormal, which many devices read as zero."""


@dataclass(frozen=True)
class TensorScales:
    """What is stored beside the blocks, in both directions."""

    multiplier: np.float32
    divisor: np.float32


class Engine:
    """Computes chunks under one contract and method. Safe to use from several threads."""

    def __init__(
        self,
        format: BlockFormat | None,
        contract: Contract | None,
        method: str | Method | None,
        repairs: bool,
        device: str = "cpu",
    ) -> None:
        self.format, self.contract, self.method, self.repairs = format, contract, method, repairs
        self.device = resolve_device(device)
        self._resolved: Method = Amax()
        """The method as an instance, with the options that it has when asked for by name."""
        if format is not None and contract is not None:
            self._resolved = resolve(format, contract, method).method

    def amax(self, x: npt.NDArray[Any]) -> np.float32:
        """Largest magnitude of a chunk; NaN if there is one."""
        if self.device != "cpu":
            return np.float32(to_numpy(self._on_device(x).abs().amax().float()))
        return largest_magnitude(x, threads=1)

    def usable_amax(self, amax: np.float32, module: str) -> np.float32:
        """The amax to quantize with. NaN and Inf are refused; under the default contract zero and tiny ones are raised.

        Model-Optimizer's formula gives NaN scales for an all-zero tensor; stored with a scale of 1 it decodes to zeros.
        """
        if not np.isfinite(amax):
            raise CheckpointError(
                f"{module} holds {'NaN' if np.isnan(amax) else 'Inf'}: its scale would be unusable; repair the source, "
                f"or keep the module unquantized (--keep {module})"
            )
        if self.repairs and amax == 0:
            return np.float32(2688)
        if self.repairs and amax < SMALLEST_AMAX:
            return SMALLEST_AMAX
        return amax

    def quantize(self, x: npt.NDArray[Any], amax: np.float32 | None, codes: U8, scales: U8) -> None:
        """Codes and scales of a chunk of rows, into the given arrays."""
        if self.format is None or self.contract is None:
            raise UnsupportedError("this conversion decodes; it has no format to quantize to")
        if self.device == "cpu":
            out = QuantizedTensor(self.format, x.shape, codes, scales, None, None, self.contract)
            quantize(x, self.format, self.contract, self.method, global_amax=amax, threads=1, out=out)
            return
        q = quantize(self._on_device(x), self.format, self.contract, self.method, global_amax=amax)
        np.copyto(codes, to_numpy(q.codes))
        np.copyto(scales, to_numpy(q.scales))

    def tensor_scales(self, amax: np.float32, dtype: npt.DTypeLike) -> TensorScales:
        """The scalars that a contract stores for an amax; `dtype`: of the weight, which some formulas ask for."""
        if self.format is None or self.contract is None:
            raise UnsupportedError("this conversion decodes; it has no tensor scale")
        rule = self.contract.rule(self.format)
        if not isinstance(rule, NVFP4Rule) or rule.stored is None:
            raise UnsupportedError(f"{self.contract} stores no tensor scale")
        rule = rule.for_method(self._resolved)
        with np.errstate(all="ignore"):
            t = tensor_scale(np.array([amax], np.float32), rule, self._resolved, dtype_name(np.dtype(dtype)))
            stored, (multiplier,) = stored_scale(rule, t)
        if rule.stored_as == "encode factor" and stored is not None:
            return TensorScales(multiplier, stored[0])
        with np.errstate(
            over="ignore", divide="ignore"
        ):  # an all-zero tensor under a contract that stores next to nothing
            return TensorScales(multiplier, np.float32(1) / multiplier)

    def _on_device(self, x: npt.NDArray[Any]) -> Any:
        import torch

        return like(x, torch.empty(0, device=self.device))


def resolve_device(device: str) -> str:
    """cpu, or a CUDA device that is there. auto: CUDA if torch finds one."""
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
    """Whether an NVIDIA driver shows itself: without one, importing torch (which is slow and large) proves nothing."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/nvidia0"))


def scales_of_power(m: int) -> TensorScales:
    """The tensor scale 2**m, exact both ways."""
    multiplier = np.float32(np.ldexp(1.0, m))
    return TensorScales(multiplier, np.float32(1) / multiplier)


def bf16(values: F32) -> npt.NDArray[Any]:
    """Float32 rounded once to BF16, nearest even, on the bits: several times as fast as a cast of the dtype.

    NaN stays NaN; what rounds beyond the largest number becomes Inf, as in IEEE.
    """
    out = np.empty(values.shape, np.uint16)
    flat, result = values.reshape(-1).view(np.uint32), out.reshape(-1)
    for start in range(0, flat.size, ELEMENTS):
        bits = flat[start : start + ELEMENTS]
        rounded = bits >> np.uint32(16)
        odd = rounded & np.uint32(1)
        odd += np.uint32(0x7FFF)
        odd += bits
        odd >>= np.uint32(16)
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        if nan.any():
            odd[nan] = rounded[nan] | np.uint32(0x40)
        result[start : start + ELEMENTS] = odd
    return out.view(BFLOAT16)


ELEMENTS = 1 << 16
"""Numbers that are rounded at a time: they and what is made of them stay in the cache."""
