"""Launches of what one peer defines for itself: Model-Optimizer's static searches, qwantize's, fouroversix's tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfbyte.backends.gpu.device_cache import kept_tensors
from halfbyte.backends.gpu.rules import DTYPE_NUMBERS, adds_over_tiles, four_six_numbers
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import NVFP4Rule
from halfbyte.methods import FourSix, Hessian, Optimal, Sweep
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch

SEARCHED_FOUR_SIX, EAGER_SWEEP, FUSED_SWEEP = 0, 1, 2
TILE_LANES = 32

Constants = dict[str, int | float | bool]


def launch_peer(
    words: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    arguments: tuple[int, int, int, int],
    programs: int,
    rule: NVFP4Rule,
    request: Request,
    common: Constants,
) -> bool:
    """Launch the kernels of a search that only one peer has; False where the request takes the common ones.

    `common`: the constants that all NVFP4 kernels share.
    """
    from halfbyte.backends.gpu.triton import plain as plain_kernels
    from halfbyte.backends.gpu.triton import sweep as sweep_kernels

    method = request.method
    if rule.block_search is not None and method in rule.searches:
        kind = SEARCHED_FOUR_SIX
        if isinstance(method, Sweep):
            kind = FUSED_SWEEP if method.fused else EAGER_SWEEP
        sweep_kernels.quantize_static[(programs,)](words, *outputs, *arguments, METHOD=kind, **common)
        return True
    if adds_over_tiles(rule, request):
        _launch_tiles(words, outputs, arguments, rule, request, common)
        return True
    if rule.scale_search is not None and isinstance(method, Optimal | Hessian):
        plain_kernels.quantize_nvfp4[(programs,)](words, *outputs, *arguments, **common)
        blocks, columns, row_quads, _ = arguments
        improve_as_qwantize(words, outputs[:2], (blocks, columns, row_quads), programs, request, common)
        return True
    return False


def _launch_tiles(
    words: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    arguments: tuple[int, int, int, int],
    rule: NVFP4Rule,
    request: Request,
    common: Constants,
) -> None:
    from halfbyte.backends.gpu.triton import tiles as tiles_kernels

    if rule.four_six is None or not isinstance(request.method, FourSix):
        raise TypeError("tiles of 4over6 need its rule and its method")
    blocks, columns, row_quads, _ = arguments
    errors = four_six_numbers(rule.four_six, request.method, request)
    left_out = ("B", "N", "MAP", "GROUP", "SHORT", "ASM", "num_warps")
    constants = {name: value for name, value in common.items() if name not in left_out}
    tiles_kernels.quantize_tiles[(ceil_div(blocks // 16, TILE_LANES),)](
        words, *outputs, blocks // 16, columns, row_quads, B=TILE_LANES, KIND=errors["KIND"],
        METRIC=errors["METRIC"], TOP=float(rule.anchor(request.method)), num_warps=1, **constants,
    )  # fmt: skip


def improve_as_qwantize(
    words: torch.Tensor,
    outputs: tuple[torch.Tensor, ...],
    arguments: tuple[int, int, int],
    programs: int,
    request: Request,
    common: Constants,
) -> None:
    """Replace naive codes and bytes where qwantize's search finds better ones; `outputs`: codes as words, bytes."""
    from halfbyte.backends.gpu.triton import qwantize as qwantize_kernels

    method, (blocks, columns, row_quads) = request.method, arguments
    rows, lanes = blocks // columns, int(common["B"])
    matrices = words
    if isinstance(method, Hessian):
        matrices = kept_tensors(method, "as they are", words.device, lambda: (method.matrices,))[0]
        programs = columns * ceil_div(rows, lanes)
    names = ("B", "N", "MAP", "SWIZZLED", "ASM", "num_warps", "enable_fp_fusion")
    qwantize_kernels.improve_as_qwantize[(programs,)](
        words, *outputs, matrices, blocks, rows, columns, row_quads, DTYPE=DTYPE_NUMBERS[request.dtype],
        POWERS=request.format.name != "nvfp4", HESSIAN=isinstance(method, Hessian),
        **{name: common[name] for name in names},
    )  # fmt: skip
