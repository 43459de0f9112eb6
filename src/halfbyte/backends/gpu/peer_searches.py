"""Commands of what one peer defines for itself: Model-Optimizer's static searches, qwantize's, fouroversix's tiles."""

from __future__ import annotations

from halfbyte.backends.gpu.constants import Constants
from halfbyte.backends.gpu.device_cache import derived_tensors
from halfbyte.backends.gpu.driver.commands import Arguments, Command, fixed
from halfbyte.backends.gpu.launch import Launch, X
from halfbyte.backends.gpu.operand import assembly
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import MXRule
from halfbyte.methods import Hessian

TILE_LANES = 32
TILE_ROWS = 16


def static_commands(launch: Launch) -> list[Command]:
    """Model-Optimizer's searches for static weights."""
    constants = launch.constants("SHORT", "ASM")
    arguments: Arguments = (X, *launch.outputs, *launch.sizes)
    return [launch.command("sweep.quantize_static", launch.programs, arguments, constants)]


def tile_commands(launch: Launch) -> list[Command]:
    """4over6 of tiles of one tensor, whose elements are added in one order."""
    blocks, columns, row_quads, _ = launch.sizes
    tiles = blocks // TILE_ROWS
    constants = launch.constants("N", "MAP", "GROUP", "SHORT", "ASM") | {"B": TILE_LANES}
    arguments: Arguments = (X, *launch.outputs, tiles, columns, row_quads)
    return [launch.command("tiles.quantize_tiles", ceil_div(tiles, TILE_LANES), arguments, constants)]


def qwantize_commands(launch: Launch) -> list[Command]:
    """Replace the codes and bytes that the plain kernel has written where qwantize's search finds better ones."""
    method, matrices, programs = launch.request.method, X, launch.programs
    if isinstance(method, Hessian):
        held = derived_tensors(method, "as they are", launch.device, lambda: (method.matrices,))[0]
        matrices, programs = fixed(held), launch.column_programs
    blocks, columns, row_quads, _ = launch.sizes
    chosen = launch.kernel.constants
    constants: Constants = {
        "B": launch.lanes, "N": chosen["N"], "DTYPE": chosen["DTYPE"], "MAP": launch.source.map,
        "SWIZZLED": launch.swizzled, "POWERS": isinstance(launch.kernel.rule, MXRule),
        "MATRICES": isinstance(method, Hessian), "ASM": assembly(launch.device),
    }  # fmt: skip
    arguments: Arguments = (X, *launch.outputs[:2], matrices, blocks, launch.rows, columns, row_quads)
    return [launch.command("qwantize.improve_as_qwantize", programs, arguments, constants)]
