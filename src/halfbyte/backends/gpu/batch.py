"""Several tensors in one launch: their amaxes, quantization with one scale each or one for all; the cast of MXFP4."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from halfbyte.backends.gpu.choose import choose
from halfbyte.backends.gpu.constants import LISTED
from halfbyte.backends.gpu.dispatch import AMAX_CHUNK, AMAX_DEPTH, AMAX_PROGRAMS, amax_of, launch_blocks, prepare
from halfbyte.backends.gpu.launch import SEARCH_LANES, SEARCHES, Launch, Source, weighs_columns
from halfbyte.backends.gpu.operand import LANES, check_device, dtype_number, on_device
from halfbyte.backends.protocol import Parts, Reason
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import NVFP4Rule
from halfbyte.errors import BackendError, InputError
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch


HINTED = 1 << 27
"""Bytes of codes below which hints to the cache make a cast faster: 4 % for 48 MiB, but 6 % slower for 336."""


def check_list(tensors: list[torch.Tensor], block: int) -> None:
    """Refuse lists that one launch cannot take, naming the tensor."""
    if not tensors:
        raise InputError("no tensors: give at least one")
    first = tensors[0]
    check_device(first)
    for index, x in enumerate(tensors):
        problem = None
        if x.device != first.device or x.dtype != first.dtype:
            problem = f"is {x.dtype} on {x.device}, but tensor 0 is {first.dtype} on {first.device}"
        elif x.ndim < 1 or x.numel() == 0 or x.shape[-1] % block:
            problem = f"needs a last axis that is a multiple of {block}"
        elif not x.is_contiguous() or x.data_ptr() % 16:
            problem = "must be contiguous and start at a multiple of 16 bytes; call .contiguous() or .clone()"
        if problem:
            raise InputError(f"tensor {index} of shape {tuple(x.shape)} {problem}")


def list_amaxes(tensors: list[torch.Tensor]) -> torch.Tensor:
    """float32 bits (int32) of the largest magnitude of each tensor, in one launch."""
    import torch

    from halfbyte.backends.gpu.triton import scales as scales_kernels

    rows = [(x.data_ptr(), x.numel() * x.element_size() // 16) for x in tensors]
    table = _table(tuple(rows), str(tensors[0].device))
    out = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    most = max(quads for _, quads in rows) * 4
    programs = max(1, min(ceil_div(most, AMAX_CHUNK * AMAX_DEPTH), ceil_div(AMAX_PROGRAMS, len(tensors))))
    scales_kernels.amax_listed[(len(tensors) * programs,)](
        table, out, programs, DTYPE=dtype_number(tensors[0].dtype), CHUNK=AMAX_CHUNK, DEPTH=AMAX_DEPTH,
        num_warps=8,
    )  # fmt: skip
    return out


@functools.lru_cache(maxsize=32)
def _table(rows: tuple[tuple[int, ...], ...], device: str) -> torch.Tensor:
    """A table of addresses on the device. Kept, so that a captured graph finds it there when it is replayed."""
    import torch

    return torch.tensor(rows, dtype=torch.int64).to(device)


def quantize_list(tensors: list[torch.Tensor], request: Request, shared: bool) -> Parts[torch.Tensor]:
    """Quantize separate tensors in one launch. Their codes and scales follow each other in two flat arrays."""
    import torch

    block = request.format.block
    check_list(tensors, block)
    kernel = choose(request)
    if isinstance(kernel, Reason):
        raise BackendError(f"backend gpu cannot do this: {kernel}")
    in_rows = isinstance(kernel.rule, NVFP4Rule) and request.tile[0] == 1
    if not in_rows or weighs_columns(request.method) or request.contract.transform.hadamard:
        raise InputError(
            "lists are quantized to NVFP4 in blocks of one row, without weights or a transform; give a 3-D tensor "
            "instead"
        )
    lanes = SEARCH_LANES if kernel.family in SEARCHES else LANES
    rows, before = [], 0
    for x in tensors:
        blocks = x.numel() // block
        rows.append((x.data_ptr(), blocks, before))
        before += blocks
    device = tensors[0].device
    programs = ceil_div(max(blocks for _, blocks, _ in rows), lanes)
    with on_device(tensors[0]):
        bits = list_amaxes(tensors)
        if shared:
            bits = bits.max().expand(len(tensors)).contiguous()
        codes = torch.empty(before * block // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(before, dtype=torch.uint8, device=device)
        source = Source(
            _table(tuple(rows), str(device)), LISTED, len(tensors), lanes, programs, 1, 0, programs * len(tensors)
        )
        numbers, stored, multiplier = prepare(kernel, bits)
        launch_blocks(Launch(kernel, request, source, codes, scales, numbers=numbers))
    return Parts(codes, scales, stored, multiplier)


def group_amaxes(x: torch.Tensor, group_rows: int) -> torch.Tensor:
    """float32 amaxes of every `group_rows` rows of a matrix."""
    import torch

    with on_device(x):
        return amax_of(x, group_rows).view(torch.float32)


def cast_scales(
    codes: torch.Tensor, scales: torch.Tensor, anchor: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """MXFP4 codes and E8M0 bytes as NVFP4 codes and E4M3 bytes of 2**(byte − anchor), each standing for two blocks.

    The third tensor counts scales beyond E4M3's range: too large (written as 448), too small (written as 0).
    """
    import torch

    from halfbyte.backends.gpu.triton import decode as decode_kernels

    check_device(codes)
    blocks = scales.numel()
    if codes.dtype != torch.uint8 or scales.dtype != torch.uint8 or codes.numel() != 16 * blocks:
        raise InputError(f"MXFP4 has sixteen bytes of codes per scale, not {codes.numel()} for {blocks}")
    with on_device(codes):
        codes, scales = codes.contiguous(), scales.contiguous()
        codes = codes if codes.data_ptr() % 16 == 0 else codes.clone()
        out = torch.empty_like(codes)
        out_scales = torch.empty((*scales.shape[:-1], 2 * scales.shape[-1]), dtype=torch.uint8, device=codes.device)
        outside = torch.zeros(2, dtype=torch.int32, device=codes.device)
        decode_kernels.cast_mxfp4_to_nvfp4[(ceil_div(blocks, 2 * LANES),)](
            codes.view(torch.int32), scales, out.view(torch.int32), out_scales.view(torch.int16), outside,
            anchor, blocks,
            B=2 * LANES, HINTS=codes.numel() < HINTED, num_warps=4,
        )  # fmt: skip
    return out, out_scales, outside
