"""Many tensors at once on a GPU: amaxes, quantization of experts, and the cast of MXFP4 blocks. Nothing waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfbyte.backends import choose_backend
from halfbyte.backends.gpu import (
    cast_scales,
    check_list,
    group_amaxes,
    list_amaxes,
    quantize_list,
    quantize_matrix,
)
from halfbyte.backends.protocol import Parts
from halfbyte.contracts import Contract, get_contract
from halfbyte.errors import InputError, UnsupportedError
from halfbyte.formats import get_format
from halfbyte.methods import Method
from halfbyte.on_device import device_of
from halfbyte.request import Request, resolve
from halfbyte.types import QuantizedTensor

if TYPE_CHECKING:
    import torch

__all__ = ["amaxes", "cast_scales", "quantize_experts", "quantize_swizzled"]


def amaxes(tensors: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    """Largest magnitudes as float32: of each matrix of a 3-D tensor, or of each tensor of a list, in one launch."""
    import torch

    if isinstance(tensors, list):
        check_list(tensors, 16)
        return list_amaxes(tensors).view(torch.float32)
    if tensors.ndim != 3:
        raise InputError(f"amaxes takes a 3-D tensor or a list, not shape {tuple(tensors.shape)}")
    matrix = tensors.contiguous().reshape(-1, tensors.shape[-1])
    check_list([matrix], 16)
    return group_amaxes(matrix, tensors.shape[1])


def quantize_experts(
    weights: torch.Tensor | list[torch.Tensor],
    contract: str | Contract | None = None,
    method: Method | None = None,
    shared: bool = False,
) -> list[QuantizedTensor]:
    """Quantize every matrix of a 3-D weight, or every tensor of a list, to NVFP4 in one launch.

    shared: all get the global scale of the largest amax; otherwise each has its own. The results are views of two
    arrays. Each equals what quantize() gives for that tensor.
    """
    first = weights[0]
    request = _request(first, contract, method)
    if isinstance(weights, list):
        parts = quantize_list(weights, request, len(weights) if shared else 1)
        return _views(parts, [tuple(x.shape) for x in weights], request)
    experts, rows, width = _shape(weights)
    if width % request.format.block:
        raise InputError(f"shape {tuple(weights.shape)}: the last axis must be a multiple of {request.format.block}")
    matrix = weights.reshape(-1, width)
    parts = quantize_matrix(matrix, request, group_rows=matrix.shape[0] if shared else rows)
    if shared:
        scales = (
            None if scale is None else scale.expand(experts) for scale in (parts.stored_scale, parts.global_scale)
        )
        parts = Parts(parts.codes, parts.scales, *scales)
    return _views(parts, [(rows, width)] * experts, request)


def quantize_swizzled(
    x: torch.Tensor, contract: str | Contract | None = None, method: Method | None = None, format: str = "nvfp4"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes, scale bytes in tiles of 128 rows and 4 columns (flat, padded with zeros), and the stored scale."""
    request = _request(x, contract, method, format)
    parts = quantize_matrix(x.reshape(-1, x.shape[-1]), request, swizzled=True)
    return parts.codes.reshape(*x.shape[:-1], -1), parts.scales, parts.stored_scale


def _shape(weights: torch.Tensor) -> tuple[int, int, int]:
    if weights.ndim != 3 or weights.numel() == 0:
        raise InputError(f"expected a 3-D weight (experts, rows, columns), got shape {tuple(weights.shape)}")
    return weights.shape[0], weights.shape[1], weights.shape[2]


def _request(x: torch.Tensor, contract: str | Contract | None, method: Method | None, format: str = "nvfp4") -> Request:
    """A request for one global scale per tensor, refused where no GPU kernel serves it."""
    block_format = get_format(format)
    chosen = get_contract(contract, block_format)
    if chosen.transform.columnwise:
        raise UnsupportedError(f"{chosen} quantizes the transpose; give quantize() the tensors one by one")
    names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    name = str(x.dtype).removeprefix("torch.")
    if name not in names:
        raise InputError(f"cannot quantize dtype {name}: give float32, float16 or bfloat16")
    plain = (1, block_format.block)
    request = resolve(
        block_format, chosen, method, tile=plain, scaling="tensor", dtype=names[name], device=device_of(x)
    )
    choose_backend("gpu", request)
    return request


def _views(parts: Parts[torch.Tensor], shapes: list[tuple[int, ...]], request: Request) -> list[QuantizedTensor]:
    codes, scales, block = parts.codes.reshape(-1), parts.scales.reshape(-1), request.format.block
    out, at = [], 0
    for index, shape in enumerate(shapes):
        count = 1
        for size in shape:
            count *= size
        blocks = count // block
        out.append(
            QuantizedTensor.trusted(
                format=request.format,
                shape=shape,
                codes=codes[at * block // 2 : (at + blocks) * block // 2].view(*shape[:-1], -1),
                scales=scales[at : at + blocks].view(*shape[:-1], -1),
                global_scale=None if parts.global_scale is None else parts.global_scale[index],
                stored_scale=None if parts.stored_scale is None else parts.stored_scale[index],
                contract=request.contract,
                method=request.method,
            )
        )
        at += blocks
    return out
