"""The GPU backend: checks and launches. Tensors stay on the device, and nothing waits for it.

torch and triton are imported when a tensor comes. The bits are the reference's: the kernels compute the contract's
formulas in the reference's order (triton_kernels_*.py), with the constants that triton_rules.py makes of a contract.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from halfbyte.backends.protocol import DeviceParts, Request
from halfbyte.backends.triton_rules import (
    DECODES,
    DTYPE_NUMBERS,
    four_six_numbers,
    mx_decode_table,
    mx_table,
    reason_against,
    rounding_numbers,
    rule_numbers,
)
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import Contract, MXRule, NVFP4Rule, expressions
from halfbyte.contracts.spec import DecodeRule
from halfbyte.errors import InputError
from halfbyte.formats import E2M1, E4M3, BlockFormat
from halfbyte.formats.spec import ElementFormat
from halfbyte.methods import FourSix, Hessian, Optimal

if TYPE_CHECKING:
    import torch

OLDEST = (8, 9)
"""Compute capability from which on the kernels' conversions exist."""

FLAT, ROWS, TILES, LISTED = 0, 1, 2, 3
ONE_GROUP, GROUP_OF_PROGRAM, GROUP_OF_BLOCK = 0, 1, 2
NUMBERS = 16
LANES = 128
SEARCH_LANES = 32
AMAX_CHUNK, AMAX_DEPTH, AMAX_PROGRAMS = 1024, 4, 1056


def interpreting() -> bool:
    """Whether Triton runs its kernels as numpy on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Triton:
    """The Triton kernels."""

    name = "triton"

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
    ) -> DeviceParts:
        """Quantize a (rows, K) matrix on its device.

        amax: float32 amaxes to use in place of the operand's own, one for each group. group_rows: rows that share a
        tensor-level scale (None: as the request's scaling says). swizzled: scales in tiles of 128x4.
        """
        check_device(x)
        rows, width = x.shape
        block = request.format.block
        with on_device(x):
            operand = _readable(x, request.tile[0], block)
            codes, scales = _outputs(operand, request, swizzled, out if operand.shape == x.shape else None)
            rule = request.contract.rule(request.format)
            if isinstance(rule, MXRule):
                _launch_mx(operand, rule, request, codes, scales, swizzled)
                stored = multiplier = None
            elif isinstance(rule, NVFP4Rule):
                group = group_rows or (1 if request.scaling == "row" else operand.shape[0])
                stored, multiplier = _launch_nvfp4(
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
        return DeviceParts(codes, scales, stored, multiplier)

    def dequantize(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        stored_scale: torch.Tensor | None,
        shape: tuple[int, int],
        request: Request,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode a (rows, K) matrix on its device."""
        import torch
        import torch.nn.functional as functional

        from halfbyte.backends import triton_kernels_decode as kernels

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
                table = _mx_decode_table(request, codes.device)
            else:
                decode = DECODES.index(rule.decode)
                top = float(rule.for_method(request.method).anchor(request.method))
                if stored_scale is not None:
                    stored = stored_scale.reshape(-1).contiguous()
                    group_blocks = blocks // stored.numel()
                    group = _group_kind(stored.numel(), group_blocks, LANES)
            kernels.dequantize[(ceil_div(blocks, LANES),)](
                codes.view(torch.int32), scales, stored, table, values.view(torch.int32), blocks, scales.shape[1],
                values.shape[1] * values.element_size() // 16, group_blocks, B=LANES, N=block, DTYPE=DTYPE_NUMBERS[short_name(dtype)],
                MAP=FLAT, GROUP=group, DECODE=decode, TOP=top, WIDE=format.element == E4M3,
                NEGATIVE_ZERO=rule.negative_zero, ASM=assembly(codes.device), **_options(),
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


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(index)


def check_device(x: torch.Tensor) -> None:
    """Refuse a card that is too old before anything is launched."""
    if x.device.type != "cuda":
        return
    found = _capability(x.device.index or 0)
    if found < OLDEST:
        raise InputError(
            f"the kernels need compute capability {OLDEST[0]}.{OLDEST[1]}, and {x.device} has {found[0]}.{found[1]}; "
            "choose backend='cpu'"
        )


def assembly(device: torch.device) -> int:
    """Which inline assembly kernels may hold: none in the interpreter, that of Hopper, or FP4 conversions too."""
    if device.type != "cuda":
        return 0
    return 2 if _capability(device.index or 0) >= (10, 0) else 1


def on_device(x: torch.Tensor) -> torch.cuda.device:
    """Launches go to the tensor's own device, whatever the current one is."""
    import torch

    return torch.cuda.device(x.device if x.device.type == "cuda" else -1)


def short_name(dtype: torch.dtype) -> str:
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[str(dtype).removeprefix("torch.")]


def _options() -> dict[str, int | bool]:
    """Four warps, and every operation rounds by itself."""
    return {"num_warps": LANES // 32, "enable_fp_fusion": False}


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


def _row_quads(x: torch.Tensor) -> int:
    """The distance of rows in sixteen bytes."""
    return x.stride(0) * x.element_size() // 16


def _group_kind(groups: int, group_blocks: int, lanes: int) -> int:
    """Whether a program's blocks share a tensor-level scale."""
    if groups == 1:
        return ONE_GROUP
    return GROUP_OF_PROGRAM if group_blocks % lanes == 0 else GROUP_OF_BLOCK


# --- amax ---


def amax_of(x: torch.Tensor, group_rows: int) -> torch.Tensor:
    """Largest magnitude of every `group_rows` rows as float32 bits (int32), by the amax kernel. NaN wins."""
    import torch

    from halfbyte.backends import triton_kernels_scales as kernels

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
        x.view(torch.int32), out, span // 4, stride // 4, chunks, programs, step, DTYPE=DTYPE_NUMBERS[short_name(x.dtype)],
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


def _source(x: torch.Tensor, request: Request, group_rows: int, swizzled: bool) -> Source:
    import torch

    rows, width = x.shape
    columns = width // request.format.block
    map_ = TILES if request.tile[0] != 1 else ROWS if _needs_rows(x, swizzled, request) else FLAT
    return Source(
        x.view(torch.int32), map_, rows // group_rows, group_rows * columns, rows * columns, columns, _row_quads(x)
    )


def _launch_nvfp4(
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
    return launch_blocks(_source(x, request, group_rows, swizzled), rule, request, bits, codes, scales, swizzled)


def launch_blocks(
    source: Source,
    rule: NVFP4Rule,
    request: Request,
    bits: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    swizzled: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Quantize the blocks of a source; returns what is stored beside them, and the multipliers."""
    import torch

    from halfbyte.backends import triton_kernels_four_six, triton_kernels_plain, triton_kernels_scales

    groups, device = source.groups, codes.device
    numbers = rule_numbers(rule, request)
    table = torch.empty((groups, NUMBERS), dtype=torch.float32, device=device)
    stored = torch.empty(groups, dtype=torch.float32, device=device)
    multiplier = torch.empty(groups, dtype=torch.float32, device=device)
    triton_kernels_scales.prepare[(ceil_div(groups, LANES),)](
        bits, table, stored, multiplier, groups, LANES=LANES, **numbers.prepare, **_options()
    )
    searching = isinstance(request.method, Optimal | Hessian)
    lanes = SEARCH_LANES if searching else LANES
    group = _group_kind(groups, source.group_blocks, lanes)
    programs = source.programs
    if programs is None:
        rows = source.blocks // source.columns
        tiles = (rows // 16) * ceil_div(source.columns, lanes // 16)
        programs = tiles if source.map == TILES else ceil_div(source.blocks, lanes)
    shares_numbers = group != GROUP_OF_BLOCK or source.map == LISTED
    common = {
        "B": lanes, "N": request.format.block, "DTYPE": DTYPE_NUMBERS[request.dtype], "MAP": source.map, "GROUP": group,
        "SWIZZLED": swizzled, "SHORT": numbers.short and shares_numbers, "ASM": assembly(device), **numbers.blocks,
        **_options(), "num_warps": lanes // 32,
    }  # fmt: skip
    arguments = (source.blocks, source.columns, source.row_quads, source.group_blocks)
    outputs = codes.view(torch.int32), scales, table
    if isinstance(request.method, FourSix) and rule.four_six is not None:
        more = four_six_numbers(rule.four_six, request.method, request)
        triton_kernels_four_six.quantize_four_six[(programs,)](
            source.words, *outputs, *arguments, TOP=numbers.prepare["TOP"], **more, **common
        )
    elif searching:
        from halfbyte.backends.triton_search import launch_search

        launch_search(source.words, outputs, arguments, programs, rule, request, common)
    else:
        triton_kernels_plain.quantize_nvfp4[(programs,)](source.words, *outputs, *arguments, **common)
    return (stored if rule.stored is not None else None), multiplier


def _needs_rows(x: torch.Tensor, swizzled: bool, request: Request) -> bool:
    """Whether a kernel has to know a block's row and column."""
    weighted = isinstance(request.method, Optimal) and request.method.channel_weights is not None
    return swizzled or weighted or isinstance(request.method, Hessian) or not x.is_contiguous()


def _launch_mx(
    x: torch.Tensor, rule: MXRule, request: Request, codes: torch.Tensor, scales: torch.Tensor, swizzled: bool
) -> None:
    import torch

    from halfbyte.backends import triton_kernels_plain

    block, element = request.format.block, request.format.element
    bytes_, constants, split = _mx_table(rule, request, x.device)
    columns = x.shape[1] // block
    blocks = x.shape[0] * columns
    rounded = rule.rounds_quotient and rule.statistics == "input"
    triton_kernels_plain.quantize_mx[(ceil_div(blocks, LANES),)](
        x.view(torch.int32), codes.view(torch.int32), scales, bytes_, constants, split, blocks, columns,
        _row_quads(x), B=LANES, N=block, DTYPE=DTYPE_NUMBERS[request.dtype],
        MAP=ROWS if swizzled or not x.is_contiguous() else FLAT, SWIZZLED=swizzled, WIDE=element != E2M1,
        NEAREST=rule.nearest is not None, ROUNDED=rounded, ASM=assembly(x.device),
        **rounding_numbers(rule.rounding, element), **_options(),
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


def _mx_decode_table(request: Request, device: torch.device) -> torch.Tensor:
    return _decode_table_on(request.contract, request.format, str(device))


@functools.lru_cache(maxsize=64)
def _decode_table_on(contract: Contract, format: BlockFormat, device: str) -> torch.Tensor:
    import torch

    return torch.from_numpy(mx_decode_table(contract, format)).to(device)
