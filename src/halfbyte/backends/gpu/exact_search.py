"""Launches of the exact searches: what the kernels need of weights and Hessians, put on the device once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from halfbyte.backends.derived import exponent_of_largest
from halfbyte.backends.gpu.device_cache import kept_tensors
from halfbyte.backends.gpu.rules import DTYPE_NUMBERS
from halfbyte.codec.bits import F32
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import NVFP4Rule
from halfbyte.formats import E2M1, E4M3, E8M0
from halfbyte.methods import Hessian, Optimal
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch

UNIFORM, WEIGHTED = 0, 1
DESCENT_LANES = 32


def launch_search(
    words: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    arguments: tuple[int, int, int, int],
    programs: int,
    rule: NVFP4Rule,
    request: Request,
    common: dict[str, int | float | bool],
) -> None:
    """Search every block's scale. `common`: the constants that all NVFP4 kernels share."""
    from halfbyte.backends.gpu.triton import hessian as hessian_kernels
    from halfbyte.backends.gpu.triton import search as search_kernels

    first = int(np.searchsorted(E4M3.magnitudes, max(rule.scale_byte.smallest, E4M3.smallest)))
    method, (blocks, columns, row_quads, group_blocks) = request.method, arguments
    if isinstance(method, Hessian):
        matrices, bounds = hessian_on(method, words.device)
        rows, lanes = blocks // columns, int(common["B"])
        grid = (columns * ceil_div(rows, lanes),)
        hessian_kernels.quantize_hessian[grid](
            words,
            *outputs,
            matrices,
            bounds,
            bounds.shape[1],
            rows,
            columns,
            row_quads,
            group_blocks,
            FIRST=first,
            **common,
        )
        if method.codes == "descent":
            sizes = (rows, columns, row_quads, group_blocks)
            launch_descent(words, outputs, matrices, sizes, request, int(common["GROUP"]), bool(common["SWIZZLED"]))
        return
    weights, objective = words, UNIFORM
    if isinstance(method, Optimal) and method.channel_weights is not None:
        weights, objective = weights_on(method, columns * request.format.block, words.device), WEIGHTED
    search_kernels.quantize_optimal[(programs,)](
        words, *outputs, weights, *arguments, OBJECTIVE=objective, FIRST=first, **common
    )


def weights_on(method: Optimal, width: int, device: torch.device) -> torch.Tensor:
    """Weights scaled by a power of two that brings the largest into [1, 2), zeros behind the last."""

    def make() -> tuple[F32]:
        given = method.channel_weights
        if given is None:
            raise TypeError("this method has no weights")
        padded = np.zeros(width, np.float32)
        padded[: given.size] = np.ldexp(given, -exponent_of_largest(given))
        return (padded,)

    return kept_tensors(method, f"weights {width}", device, make)[0]


def hessian_on(method: Hessian, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Upper triangles row by row, doubled off the diagonal, and bounds; the largest entry is brought into [1, 2)."""

    def make() -> tuple[F32, F32]:
        scaled = np.ldexp(method.matrices, -exponent_of_largest(np.abs(method.matrices))).astype(np.float32)
        rows, columns = np.triu_indices(scaled.shape[-1])
        triangles = scaled[:, rows, columns] * np.where(rows == columns, 1, 2).astype(np.float32)
        return np.ascontiguousarray(triangles), _bounds(scaled)

    return kept_tensors(method, "triangles and bounds", device, make)


ROUNDING = 4e-6
"""Of Σ|h·r·r|: more than float32 sums of sixteen elements are off; the kernels take twice that for 32."""


def _bounds(matrices: F32) -> F32:
    """For each matrix: a bound on the root of its largest eigenvalue, and one on what a quadratic form may be off.

    With them the kernels leave out scales that cannot win. Few activations give a matrix whose smallest eigenvalue is
    zero but for roundings. If it is −d, then H + d·I is semidefinite, its largest eigenvalue is larger by d, and rᵀHr
    is smaller than its form by d·‖r‖², which counts among what the form may be off. Far below zero nothing is left
    out: a root of −1.
    """
    size, exact = matrices.shape[-1], matrices.astype(np.float64)
    values = np.linalg.eigvalsh(exact)
    trace = np.trace(exact, axis1=1, axis2=2)
    below = np.maximum(1e-12 * np.abs(values).max(axis=1) - values[:, 0], 0)
    root = np.sqrt(np.maximum(values[:, -1] + below, 0)) * (1 + 1e-6)
    root = np.where(below > 1e-5 * values[:, -1], -1, root)
    off = ((trace + size * below) + below / ROUNDING) * (1 + 1e-6)
    return np.ascontiguousarray(np.stack([root, off], axis=1).astype(np.float32))


def launch_descent(
    words: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    matrices: torch.Tensor,
    sizes: tuple[int, int, int, int],
    request: Request,
    group: int,
    swizzled: bool,
) -> None:
    """Move the codes that a search has written; `outputs` with the numbers of the groups, `sizes` from rows on."""
    from halfbyte.backends.gpu.triton import descent as descent_kernels

    rows, columns, _, _ = sizes
    descent_kernels.descend[(columns * ceil_div(rows, DESCENT_LANES),)](
        words, *outputs, matrices, *sizes, B=DESCENT_LANES, N=request.format.block,
        DTYPE=DTYPE_NUMBERS[request.dtype], GROUP=group, SWIZZLED=swizzled, POWERS=request.format.scale == E8M0,
        WIDE=request.format.element != E2M1, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
