"""From a request and a shape to commands: the tensor's amax and numbers, then the kernel of the chosen family."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from halfbyte.backends.gpu.choose import ChosenKernel, KernelKind, choose
from halfbyte.backends.gpu.constants import (
    AMAX_EACH,
    AMAX_GIVEN,
    AMAX_OF_PARTS,
    FLAT,
    LISTED,
    ROWS,
    TILES,
    Constants,
)
from halfbyte.backends.gpu.cuda import table_kernels
from halfbyte.backends.gpu.driver.commands import Address, Arguments, Command, Program, Slot, fixed
from halfbyte.backends.gpu.driver.triton_kernels import triton_kernel
from halfbyte.backends.gpu.exact_search import hessian_commands, mx_search_commands, optimal_commands
from halfbyte.backends.gpu.launch import Launch, Matrix, X, source_of
from halfbyte.backends.gpu.mx_tables import mx_table_on
from halfbyte.backends.gpu.operand import LANES, assembly
from halfbyte.backends.gpu.peer_searches import qwantize_commands, static_commands, tile_commands
from halfbyte.backends.gpu.small import Small
from halfbyte.backends.gpu.survey import survey_of
from halfbyte.backends.headroom import ALONE, chooser, headrooms, probe
from halfbyte.backends.numbering import DTYPE_NUMBERS
from halfbyte.backends.protocol import Reason
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import MXRule
from halfbyte.errors import BackendError
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch

AMAX_CHUNK, AMAX_DEPTH, AMAX_PROGRAMS = 1024, 4, 1056
"""Words per step, steps per turn, and programs that fill a card."""

OWN, TENSOR, VALUE = "own", "tensor", "value"
"""Whose amax: the operand's own, one in a tensor for each group, or one number for all. The last two are in GIVEN."""


# --- amax and tensor-level numbers ---


def amax_command(x: Matrix, dtype: str, group_rows: int, out: Address) -> tuple[Command, int]:
    """Partial amaxes of every `group_rows` rows, and how many each group has."""
    per_quad = 4 if dtype == "fp32" else 8
    groups = x.rows // group_rows
    if x.contiguous:
        spans, span = 1, group_rows * x.width // per_quad
        stride = span
    else:
        spans, span, stride = group_rows, x.width // per_quad, x.row_quads
    chunks = ceil_div(span, AMAX_CHUNK // 4 * AMAX_DEPTH)
    programs = max(1, min(spans * chunks, ceil_div(AMAX_PROGRAMS, groups)))
    constants: Constants = amax_constants(dtype) | {"ROWS": spans > 1}
    kernel = triton_kernel("scales.amax_partials", constants, 8)
    return Command(kernel, (groups * programs, 1), (X, out, span, stride, spans, chunks, programs)), programs


def amax_constants(dtype: str) -> Constants:
    return {"DTYPE": DTYPE_NUMBERS[dtype], "CHUNK": AMAX_CHUNK, "DEPTH": AMAX_DEPTH}


def prepare_command(
    kernel: ChosenKernel, small: Small, whose: str, parts: int = 1, share: int = 1, repairs: bool = False
) -> Command:
    """For each group's amax: the numbers that kernels need, what is stored with the blocks, and the multiplier.

    parts: partial amaxes for every `share` groups, which have one amax in common. repairs: as `prepare` says.
    """
    several = whose == OWN and parts > 1
    source = AMAX_GIVEN if whose == VALUE else AMAX_OF_PARTS if several else AMAX_EACH
    amax = small.address(small.partial) if whose == OWN else small.address(0) if whose == VALUE else _GIVEN
    places = [small.address(place) for place in (0, small.stored, small.multiplier)]
    constants: Constants = {**kernel.prepare, "LANES": LANES, "SOURCE": source, "REPAIRS": repairs}
    programs = small.groups if several else ceil_div(small.groups, LANES)
    arguments = (amax, *places, small.groups, parts, share, _GIVEN if whose == VALUE else 0)
    return Command(triton_kernel("scales.prepare", constants, 4), (programs, 1), arguments)


_GIVEN = Address(Slot.GIVEN)


# --- a whole quantization ---


@dataclass(frozen=True)
class Quantization:
    """A program, and where its call finds the tensor-level numbers. MX formats have none."""

    program: Program
    small: Small | None


def quantization(
    kernel: ChosenKernel, request: Request, x: Matrix, group_rows: int, swizzled: bool, whose: str, device: torch.device
) -> Quantization:
    """All commands for one matrix."""
    launch = Launch(kernel, request, source_of(x, request, group_rows, swizzled), device, swizzled)
    if isinstance(kernel.rule, MXRule):
        blocks, table_bytes = block_commands(launch)
        return Quantization(Program(tuple(blocks), 0, table_bytes), None)
    alone = group_rows == x.rows or request.scaling == "row"
    size = x.elements if alone else group_rows * x.width
    asked = chooser(request)
    headroom = headrooms(asked, size)
    if whose == OWN and headroom != ALONE:
        survey = survey_of(_chooses(launch, asked), headroom, probe(asked, size))
        blocks, table_bytes = block_commands(launch)
        small = survey.small
        return Quantization(Program((*survey.commands(), *blocks), small.floats, table_bytes), small)
    groups, first, parts = x.rows // group_rows, [], 0
    if whose == OWN:
        command, parts = amax_command(x, request.dtype, group_rows, Small(groups).address(Small(groups).partial))
        first.append(command)
    small = Small(groups, groups * parts)
    first.append(prepare_command(kernel, small, whose, parts))
    blocks, table_bytes = block_commands(launch)
    return Quantization(Program((*first, *blocks), small.floats, table_bytes), small)


def _chooses(launch: Launch, asked: Request) -> Launch:
    """The launch of the search that chooses the headroom, over the same blocks."""
    if asked is launch.request:
        return launch
    kernel = choose(asked)
    if isinstance(kernel, Reason):
        raise BackendError(f"backend gpu cannot choose a headroom: {kernel}")
    return replace(launch, kernel=kernel, request=asked)


def block_commands(launch: Launch) -> tuple[list[Command], int]:
    """Codes and scales by a CUDA C++ kernel where one can serve on this device, else by the family's Triton kernel.

    The number is that of the bytes in slot TABLES.
    """
    by_table = _table_commands(launch)
    return (_triton_commands(launch), 0) if by_table is None else by_table


def _triton_commands(launch: Launch) -> list[Command]:
    match launch.kernel.family:
        case KernelKind.PLAIN:
            return [_plain(launch)]
        case KernelKind.FOUR_SIX:
            arguments: Arguments = (X, *launch.outputs, *launch.sizes)
            return [launch.command("four_six.quantize_four_six", launch.programs, arguments)]
        case KernelKind.FOUR_SIX_TILES:
            return tile_commands(launch)
        case KernelKind.STATIC:
            return static_commands(launch)
        case KernelKind.OPTIMAL:
            return optimal_commands(launch)
        case KernelKind.HESSIAN:
            return hessian_commands(launch)
        case KernelKind.QWANTIZE:
            return [_plain(launch), *qwantize_commands(launch)]
        case KernelKind.MX:
            return [_mx(launch)]
        case KernelKind.MX_OPTIMAL:
            return [_mx_optimal(launch)]
        case KernelKind.MX_SEARCH:
            return [_mx(launch), *mx_search_commands(launch)]
        case KernelKind.MX_QWANTIZE:
            return [_mx(launch), *qwantize_commands(launch)]


def _table_commands(launch: Launch) -> tuple[list[Command], int] | None:
    source, name = launch.source, launch.kernel.table
    blocks = source.blocks if source.all_blocks is None else source.all_blocks
    if name is None or source.map == TILES or not table_kernels.usable(name, launch.device, blocks, source.groups):
        return None
    listed = source.map == LISTED  # then the address of even a single group has to be looked up
    form = table_kernels.Form(source.map == ROWS, launch.swizzled, source.groups > 1 or listed, listed)
    sizes = {
        "blocks": blocks, "columns": source.columns, "row_quads": source.row_quads, "groups": source.groups,
        "group_blocks": source.group_blocks,
    }  # fmt: skip
    return table_kernels.commands(launch.kernel, sizes, form, launch.device)


def _plain(launch: Launch) -> Command:
    arguments: Arguments = (X, *launch.outputs, *launch.sizes)
    return launch.command("plain.quantize_nvfp4", launch.programs, arguments)


def _mx(launch: Launch) -> Command:
    constants = {"SHORT": launch.kernel.short, **launch.kernel.constants}
    return _with_mx_table(launch, "plain.quantize_mx", constants)


def _mx_optimal(launch: Launch) -> Command:
    left_out = ("WIDE", "NEAREST")
    constants = {name: value for name, value in launch.kernel.constants.items() if name not in left_out}
    return _with_mx_table(launch, "mx_search.quantize_mx_optimal", constants)


def _with_mx_table(launch: Launch, kernel: str, more: Constants) -> Command:
    """A kernel that takes the contract's table of bytes."""
    rule, request, source = launch.kernel.rule, launch.request, launch.source
    if not isinstance(rule, MXRule):
        raise TypeError("power-of-two scales need an MX rule")
    tables = mx_table_on(rule, request.format.element, request.dtype, str(launch.device))
    constants: Constants = {
        "B": LANES, "MAP": FLAT if source.map == FLAT else ROWS, "SWIZZLED": launch.swizzled,
        "ASM": assembly(launch.device), **more,
    }  # fmt: skip
    arguments: Arguments = (X, *launch.outputs, *map(fixed, tables), *launch.sizes[:3])
    return launch.command(kernel, ceil_div(source.blocks, LANES), arguments, constants)
