"""Launches of what one peer defines for itself: Model-Optimizer's static searches, qwantize's, fouroversix's tiles."""

from __future__ import annotations

from halfbyte.backends.gpu.device_cache import derived_tensors
from halfbyte.backends.gpu.launch import Launch
from halfbyte.backends.gpu.operand import assembly, options
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import MXRule
from halfbyte.methods import Hessian

TILE_LANES = 32
TILE_ROWS = 16


def launch_static(launch: Launch) -> None:
    """Model-Optimizer's searches for static weights."""
    from halfbyte.backends.gpu.triton import sweep as sweep_kernels

    sweep_kernels.quantize_static[(launch.programs,)](
        launch.source.words, *launch.outputs, *launch.sizes, **launch.constants("SHORT", "ASM")
    )


def launch_tiles(launch: Launch) -> None:
    """4over6 of tiles of one tensor, whose elements are added in one order."""
    from halfbyte.backends.gpu.triton import tiles as tiles_kernels

    blocks, columns, row_quads, _ = launch.sizes
    tiles = blocks // TILE_ROWS
    constants = launch.constants("B", "N", "MAP", "GROUP", "SHORT", "ASM", "num_warps")
    tiles_kernels.quantize_tiles[(ceil_div(tiles, TILE_LANES),)](
        launch.source.words, *launch.outputs, tiles, columns, row_quads, B=TILE_LANES, num_warps=1, **constants
    )


def improve_as_qwantize(launch: Launch) -> None:
    """Replace the codes and bytes that the plain kernel has written where qwantize's search finds better ones."""
    from halfbyte.backends.gpu.triton import qwantize as qwantize_kernels

    words, method = launch.source.words, launch.request.method
    matrices, programs = words, launch.programs
    if isinstance(method, Hessian):
        matrices = derived_tensors(method, "as they are", words.device, lambda: (method.matrices,))[0]
        programs = launch.column_programs
    blocks, columns, row_quads, _ = launch.sizes
    constants = launch.kernel.constants
    qwantize_kernels.improve_as_qwantize[(programs,)](
        words, *launch.outputs[:2], matrices, blocks, launch.rows, columns, row_quads,
        B=launch.lanes, N=constants["N"], DTYPE=constants["DTYPE"], MAP=launch.source.map, SWIZZLED=launch.swizzled,
        POWERS=isinstance(launch.kernel.rule, MXRule), MATRICES=isinstance(method, Hessian),
        ASM=assembly(words.device), **{**options(), "num_warps": 1},
    )  # fmt: skip
