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
from halfbyte.backends import Request
from halfbyte.backends.cpu.backend import tensor_amax
from halfbyte.backends.cpu.library import load_library
from halfbyte.backends.reference.quantize import tensor_scale
from halfbyte.codec.bits import BFLOAT16, F32, U8, dtype_name, widen
from halfbyte.contracts import Contract, NVFP4Rule
from halfbyte.errors import CheckpointError, InputError, UnsupportedError
from halfbyte.formats import BlockFormat, get_format
from halfbyte.methods import Amax, Method
from halfbyte.quantize import quantize
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
        self._compiled = load_library() is not None
        self._resolved: Method = Amax()
        """The method as an instance, with the options that it has when asked for by name."""
        if format is not None and contract is not None:
            probe = np.zeros((1, format.block), np.float32)
            self._resolved = quantize(probe, format, contract, method, backend="reference").method

    def amax(self, x: npt.NDArray[Any]) -> np.float32:
        """Largest magnitude of a chunk; NaN if there is one."""
        if self.device != "cpu":
            return np.float32(to_numpy(self._on_device(x).abs().amax().float()))
        if not self._compiled or not x.flags.c_contiguous:
            return np.float32(np.abs(widen(x)).max())
        contract, format = self.contract, self.format or get_format("nvfp4")
        if contract is None:
            raise UnsupportedError("there is no amax without a contract")
        request = Request(format, contract, Amax(), (1, format.block), "tensor", dtype_name(x.dtype), threads=1)
        return np.float32(tensor_amax(x, request)[0])

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
        shared = np.array([amax], np.float32)
        tile, name = (1, self.format.block), dtype_name(np.dtype(dtype))
        request = Request(self.format, self.contract, self._resolved, tile, "tensor", name, global_amax=shared)
        with np.errstate(all="ignore"):
            t = tensor_scale(np.zeros((1, 1, 1), np.float32), rule, request)
            stored = np.float32(rule.stored(t).reshape(())) if rule.stored is not None else np.float32(1)
            multiplier = np.float32(rule.multiplier(np.asarray(stored), t.top))
        if rule.stored_as == "encode factor":
            return TensorScales(multiplier, stored)
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
