"""Tensors as the kernels take them: what a device must have, addresses, padding, outputs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from halfbyte.backends.gpu.constants import ASSEMBLY, FP4_ASSEMBLY, NO_ASSEMBLY
from halfbyte.codec.blocks import ceil_div
from halfbyte.errors import InputError
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch

OLDEST = (8, 9)
"""Compute capability from which on the kernels' conversions exist."""

LANES = 128
"""Blocks per program."""


@functools.cache
def capability_of(index: int) -> tuple[int, int]:
    """Compute capability of a device."""
    import torch

    return torch.cuda.get_device_capability(index)


def assembly(device: torch.device) -> int:
    """Which inline assembly kernels may hold."""
    if device.type != "cuda":
        return NO_ASSEMBLY
    return FP4_ASSEMBLY if capability_of(device.index or 0) >= (10, 0) else ASSEMBLY


def dtype_name_of(dtype: torch.dtype) -> str:
    """The short name of a tensor's dtype."""
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[str(dtype).removeprefix("torch.")]


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


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, and at an address that sixteen-byte loads may take."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def readable(x: torch.Tensor, tile_rows: int, block: int) -> torch.Tensor:
    """The matrix padded with zeros to whole tiles, at addresses that sixteen-byte loads may take; a copy if need be."""
    import torch.nn.functional as functional

    rows, width = x.shape
    below, right = -rows % tile_rows, -width % block
    if below or right:
        return aligned(functional.pad(x, (0, right, 0, below)))
    step = 16 // x.element_size()
    if x.data_ptr() % 16 == 0 and x.stride(1) == 1 and x.stride(0) % step == 0 and x.stride(0) >= width:
        return x
    return aligned(x)


def row_quads(x: torch.Tensor) -> int:
    """The distance between rows, in units of sixteen bytes."""
    return x.stride(0) * x.element_size() // 16


def outputs(
    x: torch.Tensor, request: Request, swizzled: bool, out: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale bytes to write into: those given if they fit, else new ones."""
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
