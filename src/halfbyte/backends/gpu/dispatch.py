"""From a request to launches: the tensor's amax and numbers, then the kernel of the chosen family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfbyte.backends.gpu.choose import ChosenKernel, KernelKind
from halfbyte.backends.gpu.constants import FLAT, LISTED, NUMBERS, ROWS, TILES
from halfbyte.backends.gpu.cuda import table_kernels
from halfbyte.backends.gpu.exact_search import improve_mx, launch_hessian, launch_optimal
from halfbyte.backends.gpu.launch import Launch
from halfbyte.backends.gpu.mx_tables import mx_table_on
from halfbyte.backends.gpu.operand import LANES, assembly, dtype_number, options
from halfbyte.backends.gpu.peer_searches import improve_as_qwantize, launch_static, launch_tiles
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import MXRule

if TYPE_CHECKING:
    import torch

AMAX_CHUNK, AMAX_DEPTH, AMAX_PROGRAMS = 1024, 4, 1056
"""Words per step, steps per turn, and programs that fill a card."""


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
        x.view(torch.int32), out, span // 4, stride // 4, chunks, programs, step, DTYPE=dtype_number(x.dtype),
        CHUNK=AMAX_CHUNK, DEPTH=AMAX_DEPTH, num_warps=8,
    )  # fmt: skip
    return out


def amax_bits(x: torch.Tensor, kernel: ChosenKernel, given: torch.Tensor | None, group_rows: int) -> torch.Tensor:
    """float32 bits of each group's amax: given, or the operand's own; zeros where nothing looks at them."""
    import torch

    groups = x.shape[0] // group_rows
    if given is not None:
        bits = given.to(device=x.device, dtype=torch.float32).reshape(-1).view(torch.int32)
        if bits.numel() < groups:  # rows that only pad a tile have a scale of their own under row scaling
            bits = torch.cat([bits, bits.new_zeros(groups - bits.numel())])
        return bits
    if kernel.reads_amax:
        return amax_of(x, group_rows)
    return torch.zeros(groups, dtype=torch.int32, device=x.device)


def prepare(kernel: ChosenKernel, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """For each amax: the numbers that kernels need, what is stored with the blocks, and the multiplier."""
    import torch

    from halfbyte.backends.gpu.triton import scales as scales_kernels

    groups = bits.numel()
    numbers = torch.empty((groups, NUMBERS), dtype=torch.float32, device=bits.device)
    stored = torch.empty(groups, dtype=torch.float32, device=bits.device)
    multiplier = torch.empty(groups, dtype=torch.float32, device=bits.device)
    scales_kernels.prepare[(ceil_div(groups, LANES),)](
        bits, numbers, stored, multiplier, groups, LANES=LANES, **kernel.prepare, **options()
    )
    is_stored = not isinstance(kernel.rule, MXRule) and kernel.rule.stored is not None
    return numbers, (stored if is_stored else None), multiplier


def launch_blocks(launch: Launch) -> None:
    """Quantize by the family's Triton kernel, or by a CUDA C++ kernel where one can serve on this device."""
    if launch.kernel.table is not None and _launched_with_table(launch):
        return
    match launch.kernel.family:
        case KernelKind.PLAIN:
            _launch_plain(launch)
        case KernelKind.FOUR_SIX:
            _launch_four_six(launch)
        case KernelKind.FOUR_SIX_TILES:
            launch_tiles(launch)
        case KernelKind.STATIC:
            launch_static(launch)
        case KernelKind.OPTIMAL:
            launch_optimal(launch)
        case KernelKind.HESSIAN:
            launch_hessian(launch)
        case KernelKind.QWANTIZE:
            _launch_plain(launch)
            improve_as_qwantize(launch)
        case KernelKind.MX:
            _launch_mx(launch)
        case KernelKind.MX_OPTIMAL:
            _launch_mx_optimal(launch)
        case KernelKind.MX_SEARCH:
            _launch_mx(launch)
            improve_mx(launch)
        case KernelKind.MX_QWANTIZE:
            _launch_mx(launch)
            improve_as_qwantize(launch)


def _launched_with_table(launch: Launch) -> bool:
    """Whether a CUDA C++ kernel took the blocks."""
    source, name = launch.source, launch.kernel.table
    listed = source.map == LISTED
    blocks = launch.scales.numel() if listed else source.blocks
    if name is None or source.map == TILES:
        return False
    if not table_kernels.usable(name, launch.codes.device, blocks, source.groups):
        return False
    form = table_kernels.Form(source.map == ROWS, launch.swizzled, source.groups > 1, listed)
    words, numbers = source.words.data_ptr(), launch.outputs[2].data_ptr()
    operand = table_kernels.Operand(
        words, launch.codes.data_ptr(), launch.scales.data_ptr(), numbers, None, words,
        blocks, source.columns, source.row_quads, source.groups, source.group_blocks,
    )  # fmt: skip
    return table_kernels.launch(launch.kernel, operand, form, launch.codes.device)


def _launch_plain(launch: Launch) -> None:
    from halfbyte.backends.gpu.triton import plain as plain_kernels

    plain_kernels.quantize_nvfp4[(launch.programs,)](
        launch.source.words, *launch.outputs, *launch.sizes, **launch.constants()
    )


def _launch_four_six(launch: Launch) -> None:
    from halfbyte.backends.gpu.triton import four_six as four_six_kernels

    four_six_kernels.quantize_four_six[(launch.programs,)](
        launch.source.words, *launch.outputs, *launch.sizes, **launch.constants()
    )


def _launch_mx(launch: Launch) -> None:
    from halfbyte.backends.gpu.triton import plain as plain_kernels

    rule, request, source = launch.kernel.rule, launch.request, launch.source
    if not isinstance(rule, MXRule):
        raise TypeError("power-of-two scales need an MX rule")
    tables = mx_table_on(rule, request.format.element, request.dtype, str(launch.codes.device))
    plain_kernels.quantize_mx[(ceil_div(source.blocks, LANES),)](
        source.words, *launch.outputs, *tables, *launch.sizes[:3], B=LANES,
        MAP=FLAT if source.map == FLAT else ROWS, SWIZZLED=launch.swizzled, ASM=assembly(launch.codes.device),
        SHORT=launch.kernel.short, **launch.kernel.constants, **options(),
    )  # fmt: skip


def _launch_mx_optimal(launch: Launch) -> None:
    from halfbyte.backends.gpu.triton import mx_search as mx_search_kernels

    rule, request, source = launch.kernel.rule, launch.request, launch.source
    if not isinstance(rule, MXRule):
        raise TypeError("power-of-two scales need an MX rule")
    tables = mx_table_on(rule, request.format.element, request.dtype, str(launch.codes.device))
    constants = {name: value for name, value in launch.kernel.constants.items() if name not in ("WIDE", "NEAREST")}
    mx_search_kernels.quantize_mx_optimal[(ceil_div(source.blocks, LANES),)](
        source.words, *launch.outputs, *tables, *launch.sizes[:3], B=LANES,
        MAP=FLAT if source.map == FLAT else ROWS, SWIZZLED=launch.swizzled, ASM=assembly(launch.codes.device),
        **constants, **options(),
    )  # fmt: skip
