"""Launches of the exact searches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfbyte.backends.derived import quadratics, scaled_weights
from halfbyte.backends.gpu.constants import HESSIAN, ONE_GROUP, UNIFORM, WEIGHTED, Constants
from halfbyte.backends.gpu.device_cache import derived_tensors
from halfbyte.backends.gpu.launch import SEARCH_LANES, Launch
from halfbyte.backends.gpu.operand import options
from halfbyte.codec.bits import F32
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import MXRule
from halfbyte.formats import E2M1
from halfbyte.methods import Hessian, Optimal

if TYPE_CHECKING:
    import torch

DESCENT_LANES = 32


def launch_optimal(launch: Launch) -> None:
    """NVFP4: the scale of least squared or weighted error for every block."""
    from halfbyte.backends.gpu.triton import search as search_kernels

    words, method = launch.source.words, launch.request.method
    weights, objective = words, UNIFORM
    if isinstance(method, Optimal) and method.weights is not None:
        weights, objective = weights_on(method, launch), WEIGHTED
    search_kernels.quantize_optimal[(launch.programs,)](
        words, *launch.outputs, weights, *launch.sizes, OBJECTIVE=objective, **launch.constants()
    )


def launch_hessian(launch: Launch) -> None:
    """NVFP4: the scale of least rᵀHr for every block; then, if asked for, codes that descend."""
    from halfbyte.backends.gpu.triton import hessian as hessian_kernels

    matrices, bounds = hessian_on(launch)
    _, columns, row_quads, group_blocks = launch.sizes
    hessian_kernels.quantize_hessian[(launch.column_programs,)](
        launch.source.words, *launch.outputs, matrices, bounds, bounds.shape[1], launch.rows, columns, row_quads,
        group_blocks, **launch.constants("MAP", "SHORT"),
    )  # fmt: skip
    _descend_if_asked(launch, matrices, launch.outputs[2], launch.group)


def improve_mx(launch: Launch) -> None:
    """MX: replace codes and bytes of the amax method by those of the search that the request asks for."""
    from halfbyte.backends.gpu.triton import mx_search as mx_search_kernels

    words, method = launch.source.words, launch.request.method
    numbers = bounds = words.new_zeros(1)
    objective, step = UNIFORM, 0
    if isinstance(method, Hessian):
        (numbers, bounds), objective = hessian_on(launch), HESSIAN
        step = bounds.shape[1]
    elif isinstance(method, Optimal) and method.weights is not None:
        numbers, objective = weights_on(method, launch), WEIGHTED
    constants: Constants = {
        "B": SEARCH_LANES, "SWIZZLED": launch.swizzled, "OBJECTIVE": objective, **launch.kernel.constants,
        **options(), "num_warps": 1,
    }  # fmt: skip
    _, columns, row_quads, _ = launch.sizes
    mx_search_kernels.improve_mx[(launch.column_programs,)](
        words, *launch.outputs, numbers, bounds, step, launch.rows, columns, row_quads, **constants
    )
    if objective == HESSIAN:
        _descend_if_asked(launch, numbers, bounds, ONE_GROUP)


def _descend_if_asked(launch: Launch, matrices: torch.Tensor, numbers: torch.Tensor, group: int) -> None:
    """Move the codes that a search has written. `numbers`: the prepared ones; MX needs none, so any tensor does."""
    method = launch.request.method
    if not (isinstance(method, Hessian) and method.codes == "descent"):
        return
    from halfbyte.backends.gpu.triton import descent as descent_kernels

    format, (_, columns, row_quads, group_blocks) = launch.request.format, launch.sizes
    descent_kernels.descend[(columns * ceil_div(launch.rows, DESCENT_LANES),)](
        launch.source.words, *launch.outputs[:2], numbers, matrices, launch.rows, columns, row_quads, group_blocks,
        B=DESCENT_LANES, N=format.block, DTYPE=launch.kernel.constants["DTYPE"], GROUP=group,
        SWIZZLED=launch.swizzled, POWERS=isinstance(launch.kernel.rule, MXRule), WIDE=format.element != E2M1,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


# --- arrays derived from a method, on the device ---


def weights_on(method: Optimal, launch: Launch) -> torch.Tensor:
    """Scaled weights, followed by zeros up to whole blocks."""
    width = launch.source.columns * launch.request.format.block

    def make() -> tuple[F32]:
        weights = scaled_weights(method, width)
        if weights is None:
            raise TypeError("this method has no weights")
        return (weights,)

    return derived_tensors(method, f"weights {width}", launch.codes.device, make)[0]


def hessian_on(launch: Launch) -> tuple[torch.Tensor, ...]:
    """Triangles of the matrices, and bounds for each of them."""
    method = launch.request.method
    if not isinstance(method, Hessian):
        raise TypeError("this search needs a Hessian")

    def make() -> tuple[F32, F32]:
        derived = quadratics(method)
        return derived.triangles, derived.bounds

    return derived_tensors(method, "triangles and bounds", launch.codes.device, make)
