"""Commands of the exact searches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfbyte.backends.derived import quadratics, scaled_weights
from halfbyte.backends.gpu.constants import HESSIAN, ONE_GROUP, UNIFORM, WEIGHTED, Constants
from halfbyte.backends.gpu.device_cache import derived_tensors
from halfbyte.backends.gpu.driver.commands import Address, Arguments, Command, fixed
from halfbyte.backends.gpu.launch import NUMBERS, SEARCH_LANES, Launch, X
from halfbyte.codec.bits import F32
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import MXRule
from halfbyte.formats import E2M1
from halfbyte.methods import Hessian, Optimal

if TYPE_CHECKING:
    import torch

DESCENT_LANES = 32


def optimal_commands(launch: Launch) -> list[Command]:
    """NVFP4: the scale of least squared or weighted error for every block."""
    method = launch.request.method
    weights, objective = X, UNIFORM
    if isinstance(method, Optimal) and method.weights is not None:
        weights, objective = fixed(weights_on(method, launch)), WEIGHTED
    constants = launch.constants() | {"OBJECTIVE": objective}
    arguments: Arguments = (X, *launch.outputs, weights, *launch.sizes)
    return [launch.command("search.quantize_optimal", launch.programs, arguments, constants)]


def hessian_commands(launch: Launch) -> list[Command]:
    """NVFP4: the scale of least rᵀHr for every block; then, if asked for, codes that descend."""
    matrices, bounds = hessian_on(launch)
    _, columns, row_quads, group_blocks = launch.sizes
    arguments: Arguments = (
        X, *launch.outputs, fixed(matrices), fixed(bounds), bounds.shape[1], launch.rows, columns, row_quads,
        group_blocks,
    )  # fmt: skip
    constants = launch.constants("MAP", "SHORT")
    search = launch.command("hessian.quantize_hessian", launch.column_programs, arguments, constants)
    return [search, *_descend_if_asked(launch, fixed(matrices), NUMBERS, launch.group)]


def mx_search_commands(launch: Launch) -> list[Command]:
    """MX: replace codes and bytes of the amax method by those of the search that the request asks for."""
    method = launch.request.method
    numbers = bounds = X  # what a search does not need
    objective, step = UNIFORM, 0
    if isinstance(method, Hessian):
        matrices, found = hessian_on(launch)
        numbers, bounds, objective, step = fixed(matrices), fixed(found), HESSIAN, found.shape[1]
    elif isinstance(method, Optimal) and method.weights is not None:
        numbers, objective = fixed(weights_on(method, launch)), WEIGHTED
    constants: Constants = {
        "B": SEARCH_LANES, "SWIZZLED": launch.swizzled, "OBJECTIVE": objective, **launch.kernel.constants,
    }  # fmt: skip
    _, columns, row_quads, _ = launch.sizes
    arguments: Arguments = (X, *launch.outputs, numbers, bounds, step, launch.rows, columns, row_quads)
    search = launch.command("mx_search.improve_mx", launch.column_programs, arguments, constants)
    descent = _descend_if_asked(launch, numbers, bounds, ONE_GROUP) if objective == HESSIAN else []
    return [search, *descent]


def _descend_if_asked(launch: Launch, matrices: Address, numbers: Address, group: int) -> list[Command]:
    """Move the codes that a search has written. `numbers`: the prepared ones; MX needs none, so any tensor does."""
    method = launch.request.method
    if not (isinstance(method, Hessian) and method.codes == "descent"):
        return []
    format, (_, columns, row_quads, group_blocks) = launch.request.format, launch.sizes
    constants: Constants = {
        "B": DESCENT_LANES, "N": format.block, "DTYPE": launch.kernel.constants["DTYPE"], "GROUP": group,
        "SWIZZLED": launch.swizzled, "POWERS": isinstance(launch.kernel.rule, MXRule), "WIDE": format.element != E2M1,
    }  # fmt: skip
    programs = columns * ceil_div(launch.rows, DESCENT_LANES)
    arguments: Arguments = (X, *launch.outputs[:2], numbers, matrices, launch.rows, columns, row_quads, group_blocks)
    return [launch.command("descent.descend", programs, arguments, constants)]


# --- arrays derived from a method, on the device ---


def weights_on(method: Optimal, launch: Launch) -> torch.Tensor:
    """Scaled weights, followed by zeros up to whole blocks."""
    width = launch.source.columns * launch.request.format.block

    def make() -> tuple[F32]:
        weights = scaled_weights(method, width)
        if weights is None:
            raise TypeError("this method has no weights")
        return (weights,)

    return derived_tensors(method, f"weights {width}", launch.device, make)[0]


def hessian_on(launch: Launch) -> tuple[torch.Tensor, ...]:
    """Triangles of the matrices, and bounds for each of them."""
    method = launch.request.method
    if not isinstance(method, Hessian):
        raise TypeError("this search needs a Hessian")

    def make() -> tuple[F32, F32]:
        derived = quadratics(method)
        return derived.triangles, derived.bounds

    return derived_tensors(method, "triangles and bounds", launch.device, make)
