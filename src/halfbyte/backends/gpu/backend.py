"""The GPU backend: checks and launches. Tensors stay on the device, and nothing waits for it.

torch and triton are imported when a tensor comes. The bits are the reference's: the kernels compute the contract's
formulas in the reference's order (triton/*.py), with the constants that gpu/rules.py makes of a contract.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from halfbyte.backends.gpu.hadamard import rotated
from halfbyte.backends.gpu.launch import (
    FLAT,
    LANES,
    ONE_GROUP,
    assembly,
    capability_of,
    decode_table,
    group_kind,
    launch_mx,
    launch_nvfp4,
    options,
    short_name,
)
from halfbyte.backends.gpu.mx_search import improve_mx
from halfbyte.backends.gpu.rules import DECODES, DTYPE_NUMBERS, reason_against
from halfbyte.backends.protocol import Parts
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import MXRule, NVFP4Rule
from halfbyte.contracts.spec import DecodeRule
from halfbyte.errors import InputError
from halfbyte.formats import E4M3
from halfbyte.methods import Hessian, Optimal
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch

OLDEST = (8, 9)
"""Compute capability from which on the kernels' conversions exist."""


def interpreting() -> bool:
    """Whether Triton runs its kernels as numpy on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Triton:
    """The Triton kernels."""

    name = "gpu"
    takes_tensors = True

    def supports(self, request: Request) -> str | None:
        return _device_reason(request.device) or reason_against(request)

    def supports_decoding(self, request: Request) -> str | None:
        return _device_reason(request.device)

    def quantize(
        self,
        x: torch.Tensor,
        request: Request,
        amax: torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
        group_rows: int | None = None,
        swizzled: bool = False,
    ) -> Parts[torch.Tensor]:
        """Quantize a (rows, K) matrix on its device.

        amax: float32 amaxes to use in place of the operand's own, one for each group. group_rows: rows that share a
        tensor-level scale (None: as the request's scaling says). swizzled: scales in tiles of 128x4.
        """
        check_device(x)
        rows, width = x.shape
        block = request.format.block
        with on_device(x):
            if request.contract.transform.hadamard:
                x = rotated(x, request.contract.transform.random_signs)
            operand = _readable(x, request.tile[0], block)
            codes, scales = _outputs(operand, request, swizzled, out if operand.shape == x.shape else None)
            rule = request.contract.rule(request.format)
            if isinstance(rule, MXRule):
                launch_mx(operand, rule, request, codes, scales, swizzled)
                if isinstance(request.method, Optimal | Hessian):
                    improve_mx(operand, rule, request, codes, scales, swizzled)
                stored = multiplier = None
            elif isinstance(rule, NVFP4Rule):
                group = group_rows or (1 if request.scaling == "row" else operand.shape[0])
                stored, multiplier = launch_nvfp4(
                    operand, rule.for_method(request.method), request, amax, group, codes, scales, swizzled
                )
            else:
                raise TypeError(f"{request.contract} has no quantizer")
        if operand.shape != x.shape:
            codes = codes[:rows, : ceil_div(width, request.format.codes_per_byte)].contiguous()
            if width % request.format.codes_per_byte:
                codes[:, -1] &= 0xF
            if not swizzled:
                scales = scales[:rows, : ceil_div(width, block)].contiguous()
            if request.scaling == "row":
                stored = None if stored is None else stored[:rows]
                multiplier = None if multiplier is None else multiplier[:rows]
        return Parts(codes, scales, stored, multiplier)

    def dequantize(
        self,
        parts: Parts[torch.Tensor],
        shape: tuple[int, int],
        request: Request,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode a (rows, K) matrix on its device."""
        import torch
        import torch.nn.functional as functional

        from halfbyte.backends.gpu.triton import decode as kernels

        codes, scales, stored_scale = parts.codes, parts.scales, parts.stored_scale
        check_device(codes)
        format, rule = request.format, request.contract.rule(request.format)
        block, (rows, width) = format.block, shape
        whole = ceil_div(width, block) * block
        with on_device(codes):
            if whole != width:
                missing = whole // format.codes_per_byte - codes.shape[1]
                codes = functional.pad(codes, (0, missing))
            codes, scales = _aligned(codes), scales.contiguous()
            fits = out is not None and whole == width and out.is_contiguous() and out.data_ptr() % 16 == 0
            values = out if out is not None and fits else torch.empty((rows, whole), dtype=dtype, device=codes.device)
            blocks = scales.numel()
            table = stored = codes  # placeholders where a rule needs none
            top, decode, group, group_blocks = 0.0, 5, ONE_GROUP, blocks
            if isinstance(rule, MXRule | DecodeRule):
                table = decode_table(request, codes.device)
            else:
                decode = DECODES.index(rule.decode)
                top = float(rule.for_method(request.method).anchor(request.method))
                if stored_scale is not None:
                    stored = stored_scale.reshape(-1).contiguous()
                    group_blocks = blocks // stored.numel()
                    group = group_kind(stored.numel(), group_blocks, LANES)
            kernels.dequantize[(ceil_div(blocks, LANES),)](
                codes.view(torch.int32), scales, stored, table, values.view(torch.int32), blocks, scales.shape[1],
                values.shape[1] * values.element_size() // 16, group_blocks, B=LANES, N=block,
                DTYPE=DTYPE_NUMBERS[short_name(dtype)],
                MAP=FLAT, GROUP=group, DECODE=decode, TOP=top, WIDE=format.element == E4M3,
                NEGATIVE_ZERO=rule.negative_zero, ASM=assembly(codes.device), **options(),
            )  # fmt: skip
        if values is out:
            return values
        values = values[:, :width] if whole != width else values
        return values.contiguous() if out is None else out.copy_(values)


# --- what a tensor must be ---


def _device_reason(device: str) -> str | None:
    if device == "numpy":
        return "it takes torch tensors on a CUDA device, not numpy arrays"
    if device != "cuda" and not (device == "cpu" and interpreting()):
        return f"it takes tensors on a CUDA device, not on {device!r}; move the tensor with .cuda()"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install halfbyte[gpu]"
    return None


def check_device(x: torch.Tensor) -> None:
    """Refuse a card that is too old before anything is launched."""
    if x.device.type != "cuda":
        return
    found = capability_of(x.device.index or 0)
    if found < OLDEST:
        raise InputError(
            f"the kernels need compute capability {OLDEST[0]}.{OLDEST[1]}, and {x.device} has {found[0]}.{found[1]}; "
            "choose backend='cpu'"
        )


def on_device(x: torch.Tensor) -> torch.cuda.device:
    """Launches go to the tensor's own device, whatever the current one is."""
    import torch

    return torch.cuda.device(x.device if x.device.type == "cuda" else -1)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, and at an address that sixteen-byte loads may take."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _readable(x: torch.Tensor, tile_rows: int, block: int) -> torch.Tensor:
    """The matrix padded with zeros to whole tiles, at addresses that sixteen-byte loads may take; a copy if need be."""
    import torch.nn.functional as functional

    rows, width = x.shape
    below, right = -rows % tile_rows, -width % block
    if below or right:
        return _aligned(functional.pad(x, (0, right, 0, below)))
    step = 16 // x.element_size()
    if x.data_ptr() % 16 == 0 and x.stride(1) == 1 and x.stride(0) % step == 0 and x.stride(0) >= width:
        return x
    return _aligned(x)


def _outputs(
    x: torch.Tensor, request: Request, swizzled: bool, out: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    rows, width = x.shape
    columns = width // request.format.block
    codes_shape = (rows, width // request.format.codes_per_byte)
    scales_shape = (ceil_div(rows, 128) * ceil_div(columns, 4) * 512,) if swizzled else (rows, columns)
    if out is not None and (tuple(out[0].shape), tuple(out[1].shape)) == (codes_shape, scales_shape):
        return out
    make = torch.zeros if swizzled else torch.empty
    codes = torch.empty(codes_shape, dtype=torch.uint8, device=x.device)
    return codes, make(scales_shape, dtype=torch.uint8, device=x.device)
