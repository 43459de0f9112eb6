"""quantize() and dequantize() for tensors that stay on their device: the checks around a device backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from halfbyte.arrays import Array, is_torch
from halfbyte.backends.protocol import Backend, Parts
from halfbyte.codec.bits import DTYPES, F32
from halfbyte.errors import InputError
from halfbyte.request import Request, check_takes_amax
from halfbyte.tensor_parts import per_row
from halfbyte.types import QuantizedTensor

if TYPE_CHECKING:
    import torch


def device_of(x: object) -> str:
    """The type of a torch tensor's device, or "numpy" for a numpy array."""
    return str(x.device.type) if is_torch(x) else "numpy"


def quantize_tensor(
    x: torch.Tensor,
    shape: tuple[int, ...],
    request: Request,
    engine: Backend[torch.Tensor],
    out: QuantizedTensor | None,
    global_amax: torch.Tensor | F32 | None,
) -> QuantizedTensor:
    """Quantize a tensor of the logical shape `shape` (after the contract's transform) on its device."""
    matrix = x.detach().reshape(-1, x.shape[-1])
    if request.contract.transform.columnwise:
        matrix = matrix.T
    leading, rows = shape[:-1], matrix.shape[0]
    amax = _device_amax(request, global_amax, x, rows)
    given = None if out is None else _check_out(out, x, request, shape)
    parts = engine.quantize(matrix, request, amax, given)
    codes, scales = parts.codes, parts.scales
    if given is not None:
        for target, computed in zip(given, (codes, scales), strict=True):
            if computed is not target:
                target.copy_(computed)

    def scalar_or_rows(value: torch.Tensor | None) -> torch.Tensor | None:
        return None if value is None else value.reshape(leading if request.scaling == "row" else ())

    return QuantizedTensor.trusted(
        format=request.format,
        shape=shape,
        codes=codes.reshape(*leading, -1) if out is None else out.codes,
        scales=scales.reshape(*leading, -1) if out is None else out.scales,
        global_scale=scalar_or_rows(parts.global_scale),
        stored_scale=scalar_or_rows(parts.stored_scale),
        contract=request.contract,
        method=request.method,
    )


def decode_tensor(
    q: QuantizedTensor, request: Request, engine: Backend[torch.Tensor], dtype: np.dtype[np.generic], out: Array | None
) -> torch.Tensor:
    """Decode a tensor on its device."""
    import torch

    names = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    wanted = next(names[name] for name, known in DTYPES.items() if known == dtype)
    codes, scales = cast("torch.Tensor", q.codes), cast("torch.Tensor", q.scales)
    stored = cast("torch.Tensor | None", q.stored_scale)
    for part in (scales, stored):
        if part is not None and part.device != codes.device:
            raise InputError(f"codes are on {codes.device}, another part of the tensor on {part.device}")
    rows, width = codes.numel() // codes.shape[-1], q.shape[-1]
    numbers = None if stored is None else cast("torch.Tensor", per_row(stored, q.shape))
    given: torch.Tensor | None = None
    if out is not None:
        if not is_torch(out) or tuple(out.shape) != q.shape or out.dtype != wanted or out.device != codes.device:
            raise InputError(f"out must be a torch tensor of shape {q.shape} and dtype {wanted} on {codes.device}")
        if not out.is_contiguous():
            raise InputError("out must be contiguous")
        for part in (codes, scales):
            _check_apart(out, part, "q")
        given = out.view(rows, width)
    values = engine.dequantize(
        Parts(codes.reshape(rows, -1), scales.reshape(rows, -1), numbers), (rows, width), request, wanted, given
    )
    return out if out is not None and is_torch(out) else values.reshape(q.shape)


def _device_amax(
    request: Request, global_amax: torch.Tensor | F32 | None, x: torch.Tensor, rows: int
) -> torch.Tensor | None:
    """The given amax on the operand's device. The values of a tensor are not checked: that would wait for it."""
    import torch

    if global_amax is None:
        return None
    if not is_torch(global_amax):
        checked = cast("F32", global_amax)
        if checked.size == 1:  # filling needs no copy from the host
            return torch.full((1,), float(checked[0]), dtype=torch.float32, device=x.device)
        return torch.from_numpy(checked).to(x.device)
    check_takes_amax(request)
    wanted = rows if request.scaling == "row" else 1
    if global_amax.numel() != wanted:
        raise InputError(
            f"global_amax has {global_amax.numel()} values, but scaling={request.scaling!r} needs {wanted}"
        )
    if not global_amax.is_floating_point():
        raise InputError(f"global_amax must be a floating-point tensor, not {global_amax.dtype}")
    return global_amax.detach().to(device=x.device, dtype=torch.float32)


def _check_out(
    out: QuantizedTensor, x: torch.Tensor, request: Request, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors of `out` as (rows, K) matrices that share their memory."""
    if out.format != request.format or out.shape != shape:
        raise InputError(
            f"out holds {out.format.name} of shape {out.shape}, but the result is {request.format.name} of {shape}"
        )
    parts = []
    for name, part in (("codes", out.codes), ("scales", out.scales)):
        if not is_torch(part) or part.device != x.device:
            where = part.device if is_torch(part) else "the host, as a numpy array"
            raise InputError(f"out.{name} is on {where}, but x is on {x.device}")
        if not part.is_contiguous():
            raise InputError(f"out.{name} must be contiguous")
        if part.data_ptr() % (16 if name == "codes" else 1):
            raise InputError(
                f"out.{name} starts at an address that is no multiple of 16; allocate it as a separate tensor"
            )
        _check_apart(part, x, "the input")
        parts.append(part.view(-1, part.shape[-1]))
    _check_apart(parts[0], parts[1], "out.scales")
    return parts[0], parts[1]


def _check_apart(out: torch.Tensor, other: torch.Tensor, what: str) -> None:
    """Raise if `out` and `other` share memory: one launch would write and read it."""
    start, stop = _span(out)
    other_start, other_stop = _span(other)
    if start < other_stop and other_start < stop:
        raise InputError(f"out overlaps {what}")


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor, and the address after its last byte."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
