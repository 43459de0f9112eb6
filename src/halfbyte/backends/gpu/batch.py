"""Several tensors in one launch: their amaxes, quantization with one scale each or one for several; MXFP4's cast."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from halfbyte.backends.gpu.backend import tensor_numbers
from halfbyte.backends.gpu.choose import choose
from halfbyte.backends.gpu.constants import LISTED, MOST_PARTS
from halfbyte.backends.gpu.dispatch import (
    AMAX_CHUNK,
    AMAX_DEPTH,
    AMAX_PROGRAMS,
    OWN,
    TENSOR,
    Small,
    amax_command,
    amax_constants,
    block_commands,
    prepare_command,
)
from halfbyte.backends.gpu.driver.commands import Address, Command, Program, Slot
from halfbyte.backends.gpu.driver.run import run
from halfbyte.backends.gpu.driver.triton_kernels import triton_kernel
from halfbyte.backends.gpu.launch import (
    CODES,
    SCALES,
    SEARCH_LANES,
    SEARCHES,
    Launch,
    Matrix,
    Source,
    X,
    weighs_columns,
)
from halfbyte.backends.gpu.operand import LANES, check_device, dtype_name_of, on_device, row_quads
from halfbyte.backends.protocol import Parts, Reason
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import NVFP4Rule
from halfbyte.errors import BackendError, InputError
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch


HINTED = 1 << 27
"""Bytes of codes below which hints to the cache make a cast faster: 4 % for 48 MiB, but 6 % slower for 336."""

AMAX_TABLE = Address(Slot.GIVEN)
"""Where tensors are listed twice: for the amaxes, and in X for the blocks."""


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


# --- amaxes ---


def list_amaxes(tensors: list[torch.Tensor]) -> torch.Tensor:
    """float32 bits (int32) of the largest magnitude of each tensor."""
    import torch

    device = tensors[0].device
    command, parts = _listed_amax(tensors, X, CODES)
    out = torch.empty(len(tensors), parts, dtype=torch.int32, device=device)
    run(Program((command,)), device, {Slot.X: table_of(_amax_rows(tensors), device), Slot.CODES: out})
    return out.amax(dim=1)


def _amax_rows(tensors: list[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple((x.data_ptr(), x.numel() * x.element_size() // 16) for x in tensors)


def _listed_amax(tensors: list[torch.Tensor], table: Address, out: Address) -> tuple[Command, int]:
    """Partial amaxes of each tensor, and how many each has."""
    most = max(x.numel() * x.element_size() // 4 for x in tensors)
    programs = max(1, min(ceil_div(most, AMAX_CHUNK * AMAX_DEPTH), ceil_div(AMAX_PROGRAMS, len(tensors))))
    kernel = triton_kernel("scales.amax_listed", amax_constants(dtype_name_of(tensors[0].dtype)), 8)
    return Command(kernel, (len(tensors) * programs, 1), (table, out, programs)), programs


def group_amaxes(x: torch.Tensor, group_rows: int) -> torch.Tensor:
    """float32 amaxes of every `group_rows` rows of a matrix."""
    import torch

    with on_device(x):
        matrix = Matrix(x.shape[0], x.shape[1], row_quads(x), x.is_contiguous())
        command, parts = amax_command(matrix, dtype_name_of(x.dtype), group_rows, CODES)
        out = torch.empty(x.shape[0] // group_rows, parts, dtype=torch.int32, device=x.device)
        run(Program((command,)), x.device, {Slot.X: x, Slot.CODES: out})
        return out.amax(dim=1).view(torch.float32)


@functools.lru_cache(maxsize=128)
def table_of(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """A table of addresses on the device. Kept, so that a captured graph finds it there when it is replayed.

    The copy comes from pinned memory, so that nothing waits for it.
    """
    import torch

    table = torch.from_numpy(np.array(rows, dtype=np.int64))
    return table if device.type != "cuda" else table.pin_memory().to(device, non_blocking=True)


# --- quantization ---


def quantize_list(
    tensors: list[torch.Tensor], request: Request, share: int, repairs: bool = False
) -> Parts[torch.Tensor]:
    """Quantize separate tensors in one launch. Their codes and scales follow each other in two flat arrays.

    share: so many tensors that follow each other have the tensor-level scale of their largest amax.
    """
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
    rows, before = [], 0
    for x in tensors:
        blocks = x.numel() // block
        rows.append((x.data_ptr(), blocks, before))
        before += blocks
    device = tensors[0].device
    lanes = SEARCH_LANES if kernel.family in SEARCHES else LANES
    programs = ceil_div(max(blocks for _, blocks, _ in rows), lanes)
    source = Source(LISTED, len(tensors), lanes, programs, 1, 0, programs * len(tensors), before)
    with on_device(tensors[0]):
        amax, parts = _listed_amax(tensors, AMAX_TABLE, Small(len(tensors)).address(Small(len(tensors)).partial))
        if parts * share <= MOST_PARTS:
            small, given = Small(len(tensors), len(tensors) * parts), table_of(_amax_rows(tensors), device)
            first = [amax, prepare_command(kernel, small, OWN, parts * share, share, repairs)]
        else:  # more than one program can read
            small, given = Small(len(tensors)), list_amaxes(tensors).view(-1, share).amax(dim=1)
            first, given = [prepare_command(kernel, small, TENSOR, repairs=repairs)], given.repeat_interleave(share)
        commands, table_bytes = block_commands(Launch(kernel, request, source, device))
        codes = torch.empty(before * block // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(before, dtype=torch.uint8, device=device)
        held = torch.empty(small.floats, dtype=torch.float32, device=device)
        tables = torch.empty(table_bytes, dtype=torch.uint8, device=device)
        run(Program((*first, *commands)), device, {
            Slot.X: table_of(tuple(rows), device), Slot.GIVEN: given, Slot.CODES: codes, Slot.SCALES: scales,
            Slot.SMALL: held, Slot.TABLES: tables,
        })  # fmt: skip
    stored, multiplier = tensor_numbers(kernel, small, held)
    return Parts(codes, scales, stored, multiplier)


# --- the cast ---


def cast_scales(
    codes: torch.Tensor, scales: torch.Tensor, anchor: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """MXFP4 codes and E8M0 bytes as NVFP4 codes and E4M3 bytes of 2**(byte − anchor), each standing for two blocks.

    The third tensor counts scales beyond E4M3's range: too large (written as 448), too small (written as 0).
    """
    import torch

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
        constants = {"B": 2 * LANES, "HINTS": codes.numel() < HINTED}
        kernel = triton_kernel("decode.cast_mxfp4_to_nvfp4", constants, 4, fused=True)
        arguments = (X, Address(Slot.GIVEN), CODES, SCALES, Address(Slot.SMALL), anchor, blocks)
        program = Program((Command(kernel, (ceil_div(blocks, 2 * LANES), 1), arguments),))
        run(program, codes.device, {
            Slot.X: codes, Slot.GIVEN: scales, Slot.CODES: out, Slot.SCALES: out_scales, Slot.SMALL: outside,
        })  # fmt: skip
    return out, out_scales, outside
