"""Launches of the GPU kernels: where blocks lie, which constants a kernel is compiled with, tables on the device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from halfbyte.backends.gpu.cuda import launch as cuda_launch
from halfbyte.backends.gpu.peer_searches import launch_peer
from halfbyte.backends.gpu.rules import (
    DTYPE_NUMBERS,
    four_six_numbers,
    mx_decode_table,
    mx_table,
    rounding_numbers,
    rule_numbers,
)
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import Contract, MXRule, NVFP4Rule, expressions
from halfbyte.formats import E2M1, BlockFormat
from halfbyte.formats.spec import ElementFormat
from halfbyte.methods import FourSix, Hessian, Optimal
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch

FLAT, ROWS, TILES, LISTED = 0, 1, 2, 3
ONE_GROUP, GROUP_OF_PROGRAM, GROUP_OF_BLOCK = 0, 1, 2
NUMBERS = 16
LANES = 128
SEARCH_LANES = 32
AMAX_CHUNK, AMAX_DEPTH, AMAX_PROGRAMS = 1024, 4, 1056


@functools.cache
def capability_of(index: int) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(index)


def assembly(device: torch.device) -> int:
    """Which inline assembly kernels may hold: none in the interpreter, that of Hopper, or FP4 conversions too."""
    if device.type != "cuda":
        return 0
    return 2 if capability_of(device.index or 0) >= (10, 0) else 1


def short_name(dtype: torch.dtype) -> str:
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[str(dtype).removeprefix("torch.")]


def options() -> dict[str, int | bool]:
    """Four warps, and every operation rounds by itself."""
    return {"num_warps": LANES // 32, "enable_fp_fusion": False}


def _row_quads(x: torch.Tensor) -> int:
    """The distance of rows in sixteen bytes."""
    return x.stride(0) * x.element_size() // 16


def group_kind(groups: int, group_blocks: int, lanes: int) -> int:
    """Whether a program's blocks share a tensor-level scale."""
    if groups == 1:
        return ONE_GROUP
    return GROUP_OF_PROGRAM if group_blocks % lanes == 0 else GROUP_OF_BLOCK


# --- amax ---


def amax_of(x: torch.Tensor, group_rows: int) -> torch.Tensor:
    """Largest magnitude of every `group_rows` rows as float32 bits (int32), by the amax kernel. NaN wins."""
    import torch

    from halfbyte.backends.gpu.triton import scales as kernels

    rows, width = x.shape
    per_word = 4 // x.element_size()
    groups = rows // group_rows
    out = torch.zeros(groups, dtype=torch.int32, device=x.device)
    if x.is_contiguous():
        spans, span, stride, step = groups, group_rows * width // per_word, group_rows * width // per_word, 1
    elif group_rows in (1, rows):
        spans, span, stride, step = rows, width // per_word, x.stride(0) // per_word, int(group_rows == 1)
    else:
        return amax_of(x.contiguous(), group_rows)
    chunks = ceil_div(span, AMAX_CHUNK * AMAX_DEPTH)
    programs = max(1, min(chunks, ceil_div(AMAX_PROGRAMS, spans)))
    kernels.amax_spans[(spans * programs,)](
        x.view(torch.int32), out, span // 4, stride // 4, chunks, programs, step,
        DTYPE=DTYPE_NUMBERS[short_name(x.dtype)],
        CHUNK=AMAX_CHUNK, DEPTH=AMAX_DEPTH, num_warps=8,
    )  # fmt: skip
    return out


# --- launches ---


@dataclass(frozen=True)
class Source:
    """Where the blocks of an operand lie, for the kernels."""

    words: torch.Tensor
    """The operand as 32-bit words, or the table of listed tensors."""
    map: int
    groups: int
    """How many tensor-level scales there are."""
    group_blocks: int
    blocks: int
    """All of them; programs a tensor where tensors are listed."""
    columns: int
    row_quads: int
    programs: int | None = None
    """Where tensors are listed."""


def source_of(x: torch.Tensor, request: Request, group_rows: int, swizzled: bool) -> Source:
    import torch

    rows, width = x.shape
    columns = width // request.format.block
    map_ = TILES if request.tile[0] != 1 else ROWS if _needs_rows(x, swizzled, request) else FLAT
    return Source(
        x.view(torch.int32), map_, rows // group_rows, group_rows * columns, rows * columns, columns, _row_quads(x)
    )


def launch_nvfp4(
    x: torch.Tensor,
    rule: NVFP4Rule,
    request: Request,
    amax: torch.Tensor | None,
    group_rows: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
    swizzled: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    import torch

    groups = x.shape[0] // group_rows
    if amax is not None:
        bits = amax.to(device=x.device, dtype=torch.float32).reshape(-1).view(torch.int32)
        if bits.numel() < groups:  # rows that only pad a tile have a scale of their own under row scaling
            bits = torch.cat([bits, bits.new_zeros(groups - bits.numel())])
    elif rule.constant_factor is None:
        bits = amax_of(x, group_rows)
    else:
        bits = torch.zeros(groups, dtype=torch.int32, device=x.device)
        if rule.stored_as == "amax" or rule.pre_scale is expressions.static_scale:
            bits = amax_of(x, group_rows)
    table, stored, multiplier = prepare(rule, request, bits)
    launch_blocks(source_of(x, request, group_rows, swizzled), rule, request, table, codes, scales, swizzled)
    return stored, multiplier


def prepare(
    rule: NVFP4Rule, request: Request, bits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The numbers that kernels need of each amax, what is stored beside the blocks, and the multipliers."""
    import torch

    from halfbyte.backends.gpu.triton import scales as scales_kernels

    groups, numbers = bits.numel(), rule_numbers(rule, request)
    table = torch.empty((groups, NUMBERS), dtype=torch.float32, device=bits.device)
    stored = torch.empty(groups, dtype=torch.float32, device=bits.device)
    multiplier = torch.empty(groups, dtype=torch.float32, device=bits.device)
    scales_kernels.prepare[(ceil_div(groups, LANES),)](
        bits, table, stored, multiplier, groups, LANES=LANES, **numbers.prepare, **options()
    )
    return table, (stored if rule.stored is not None else None), multiplier


def launch_blocks(
    source: Source,
    rule: NVFP4Rule,
    request: Request,
    table: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    swizzled: bool = False,
) -> None:
    """Quantize the blocks of a source with prepared numbers: by a table where there is one for it, else by Triton."""
    import torch

    if _launch_table(source, rule, request, table, codes, scales, swizzled):
        return
    from halfbyte.backends.gpu.triton import four_six as four_six_kernels
    from halfbyte.backends.gpu.triton import plain as plain_kernels

    groups, numbers = source.groups, rule_numbers(rule, request)
    searching = isinstance(request.method, Optimal | Hessian)
    lanes = SEARCH_LANES if searching else LANES
    group = group_kind(groups, source.group_blocks, lanes)
    programs = source.programs
    if programs is None:
        rows = source.blocks // source.columns
        tiles = (rows // 16) * ceil_div(source.columns, lanes // 16)
        programs = tiles if source.map == TILES else ceil_div(source.blocks, lanes)
    shares_numbers = group != GROUP_OF_BLOCK or source.map == LISTED
    common = {
        "B": lanes, "N": request.format.block, "DTYPE": DTYPE_NUMBERS[request.dtype], "MAP": source.map, "GROUP": group,
        "SWIZZLED": swizzled, "SHORT": numbers.short and shares_numbers, "ASM": assembly(codes.device),
        **numbers.blocks,
        **options(), "num_warps": lanes // 32,
    }  # fmt: skip
    arguments = (source.blocks, source.columns, source.row_quads, source.group_blocks)
    outputs = codes.view(torch.int32), scales, table
    if launch_peer(source.words, outputs, arguments, programs, rule, request, common):
        return
    if isinstance(request.method, FourSix) and rule.four_six is not None:
        more = four_six_numbers(rule.four_six, request.method, request)
        four_six_kernels.quantize_four_six[(programs,)](
            source.words, *outputs, *arguments, TOP=numbers.prepare["TOP"], **more, **common
        )
    elif searching:
        from halfbyte.backends.gpu.exact_search import launch_search

        launch_search(source.words, outputs, arguments, programs, rule, request, common)
    else:
        plain_kernels.quantize_nvfp4[(programs,)](source.words, *outputs, *arguments, **common)


def _launch_table(
    source: Source,
    rule: NVFP4Rule,
    request: Request,
    table: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    swizzled: bool,
) -> bool:
    """Whether a CUDA C++ kernel took the blocks (gpu/cuda/launch.py)."""
    blocks, listed = scales.numel() if source.map == LISTED else source.blocks, source.map == LISTED
    name = None if source.map == TILES else cuda_launch.kernel_for(rule, request)
    if name is None or not cuda_launch.usable(name, codes.device, blocks, source.groups):
        return False
    form = cuda_launch.Form(source.map == ROWS, swizzled, source.groups > 1, listed)
    operand = cuda_launch.Blocks(
        source.words.data_ptr(), codes.data_ptr(), scales.data_ptr(), table.data_ptr(), None, source.words.data_ptr(),
        blocks, source.columns, source.row_quads, source.groups, source.group_blocks,
    )  # fmt: skip
    return cuda_launch.launch(name, operand, rule, request, form, codes.device)


def _needs_rows(x: torch.Tensor, swizzled: bool, request: Request) -> bool:
    """Whether a kernel has to know a block's row and column."""
    weighted = isinstance(request.method, Optimal) and request.method.channel_weights is not None
    return swizzled or weighted or isinstance(request.method, Hessian) or not x.is_contiguous()


def launch_mx(
    x: torch.Tensor, rule: MXRule, request: Request, codes: torch.Tensor, scales: torch.Tensor, swizzled: bool
) -> None:
    import torch

    from halfbyte.backends.gpu.triton import plain as plain_kernels

    block, element = request.format.block, request.format.element
    bytes_, constants, split = _mx_table(rule, request, x.device)
    columns = x.shape[1] // block
    blocks = x.shape[0] * columns
    rounded = rule.rounds_quotient and rule.statistics == "input"
    plain_kernels.quantize_mx[(ceil_div(blocks, LANES),)](
        x.view(torch.int32), codes.view(torch.int32), scales, bytes_, constants, split, blocks, columns,
        _row_quads(x), B=LANES, N=block, DTYPE=DTYPE_NUMBERS[request.dtype],
        MAP=ROWS if swizzled or not x.is_contiguous() else FLAT, SWIZZLED=swizzled, WIDE=element != E2M1,
        NEAREST=rule.nearest is not None, ROUNDED=rounded, ASM=assembly(x.device),
        **rounding_numbers(rule.rounding, element), **options(),
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _mx_table_on(
    rule: MXRule, element: ElementFormat, dtype: str, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    table = mx_table(rule, element, dtype)
    parts = (table.bytes, table.constants, table.split)
    bytes_, constants, split = (torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in parts)
    return bytes_, constants, split


def _mx_table(rule: MXRule, request: Request, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _mx_table_on(rule, request.format.element, request.dtype, str(device))


def decode_table(request: Request, device: torch.device) -> torch.Tensor:
    return _decode_table_on(request.contract, request.format, str(device))


@functools.lru_cache(maxsize=64)
def _decode_table_on(contract: Contract, format: BlockFormat, device: str) -> torch.Tensor:
    import torch

    return torch.from_numpy(mx_decode_table(contract, format)).to(device)
