"""The GPU backend: checks and launches. Tensors stay on the device, and nothing waits for it.

torch and triton are imported when a tensor comes. The bits are the reference's: the kernels compute the contract's
formulas in the reference's order (triton/*.py, cuda/*.cu), and choose.py lists what they were written for.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from halfbyte.backends.gpu.choose import choose, choose_decoder
from halfbyte.backends.gpu.constants import DECODE_BY_TABLE, FLAT, ONE_GROUP
from halfbyte.backends.gpu.dispatch import amax_bits, launch_blocks, prepare
from halfbyte.backends.gpu.launch import Launch, group_kind, source_of
from halfbyte.backends.gpu.mx_tables import decode_table_on
from halfbyte.backends.gpu.operand import (
    LANES,
    aligned,
    assembly,
    check_device,
    dtype_number,
    on_device,
    options,
    outputs,
    readable,
    rotated,
)
from halfbyte.backends.protocol import Parts, Reason
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import MXRule
from halfbyte.errors import BackendError
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch


def interpreting() -> bool:
    """Whether Triton runs its kernels as numpy on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Gpu:
    """Quantizes and decodes CUDA tensors, by Triton and CUDA C++ kernels."""

    name = "gpu"
    takes_tensors = True

    def supports(self, request: Request) -> Reason | None:
        return _device_reason(request.device) or _reason(choose(request))

    def supports_decoding(self, request: Request) -> Reason | None:
        return _device_reason(request.device) or _reason(choose_decoder(request))

    def quantize(
        self,
        x: torch.Tensor,
        request: Request,
        amax: torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Parts[torch.Tensor]:
        """Quantize a (rows, K) matrix on its device."""
        return quantize_matrix(x, request, amax, out)

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
        decoder = choose_decoder(request)
        if isinstance(decoder, Reason):
            raise BackendError(f"backend gpu cannot do this: {decoder}")
        check_device(codes)
        format, (rows, width) = request.format, shape
        block = format.block
        whole = ceil_div(width, block) * block
        with on_device(codes):
            if whole != width:
                missing = whole // format.codes_per_byte - codes.shape[1]
                codes = functional.pad(codes, (0, missing))
            codes, scales = aligned(codes), scales.contiguous()
            fits = out is not None and whole == width and out.is_contiguous() and out.data_ptr() % 16 == 0
            values = out if out is not None and fits else torch.empty((rows, whole), dtype=dtype, device=codes.device)
            blocks = scales.numel()
            table = stored = codes  # placeholders where a rule needs none
            group, group_blocks = ONE_GROUP, blocks
            if decoder.decode is None:
                table = decode_table_on(request.contract, format, str(codes.device))
            elif stored_scale is not None:
                stored = stored_scale.reshape(-1).contiguous()
                group_blocks = blocks // stored.numel()
                group = group_kind(stored.numel(), group_blocks, LANES)
            kernels.dequantize[(ceil_div(blocks, LANES),)](
                codes.view(torch.int32), scales, stored, table, values.view(torch.int32), blocks, scales.shape[1],
                values.shape[1] * values.element_size() // 16, group_blocks, B=LANES, N=block,
                DTYPE=dtype_number(dtype), MAP=FLAT, GROUP=group,
                DECODE=DECODE_BY_TABLE if decoder.decode is None else decoder.decode, TOP=decoder.top,
                WIDE=decoder.wide, NEGATIVE_ZERO=decoder.negative_zero, ASM=assembly(codes.device), **options(),
            )  # fmt: skip
        if values is out:
            return values
        values = values[:, :width] if whole != width else values
        return values.contiguous() if out is None else out.copy_(values)


def quantize_matrix(
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
    kernel = choose(request)
    if isinstance(kernel, Reason):
        raise BackendError(f"backend gpu cannot do this: {kernel}")
    check_device(x)
    rows, width = x.shape
    block, per_byte = request.format.block, request.format.codes_per_byte
    stored = multiplier = numbers = None
    with on_device(x):
        if request.contract.transform.hadamard:
            x = rotated(x, request.contract.transform.random_signs)
        operand = readable(x, request.tile[0], block)
        codes, scales = outputs(operand, request, swizzled, out if operand.shape == x.shape else None)
        group = group_rows or (1 if request.scaling == "row" else operand.shape[0])
        if not isinstance(kernel.rule, MXRule):
            numbers, stored, multiplier = prepare(kernel, amax_bits(operand, kernel, amax, group))
        source = source_of(operand, request, group, swizzled)
        launch_blocks(Launch(kernel, request, source, codes, scales, swizzled, numbers))
    if operand.shape != x.shape:
        codes = codes[:rows, : ceil_div(width, per_byte)].contiguous()
        if width % per_byte:
            codes[:, -1] &= 0xF
        if not swizzled:
            scales = scales[:rows, : ceil_div(width, block)].contiguous()
        if request.scaling == "row":
            stored = None if stored is None else stored[:rows]
            multiplier = None if multiplier is None else multiplier[:rows]
    return Parts(codes, scales, stored, multiplier)


def _reason(chosen: object) -> Reason | None:
    return chosen if isinstance(chosen, Reason) else None


def _device_reason(device: str) -> Reason | None:
    if device == "numpy":
        return Reason("it takes torch tensors on a CUDA device, not numpy arrays")
    if device != "cuda" and not (device == "cpu" and interpreting()):
        return Reason(f"it takes tensors on a CUDA device, not on {device!r}; move the tensor with .cuda()")
    if importlib.util.find_spec("triton") is None:
        return Reason("Triton is not installed; install halfbyte[gpu]")
    return None
