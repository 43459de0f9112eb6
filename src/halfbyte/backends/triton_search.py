"""Launches of the exact searches: what the kernels need of weights and Hessians, put on the device once."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from halfbyte.backends.cpu_search import prepared
from halfbyte.backends.cpu_tables import exponent_of_largest
from halfbyte.backends.protocol import Request
from halfbyte.contracts import NVFP4Rule
from halfbyte.formats import E4M3
from halfbyte.methods import Hessian, Optimal

if TYPE_CHECKING:
    import torch

UNIFORM, WEIGHTED = 0, 1

_WEIGHTS: weakref.WeakKeyDictionary[Optimal, dict[tuple[str, int], torch.Tensor]] = weakref.WeakKeyDictionary()
_HESSIANS: weakref.WeakKeyDictionary[Hessian, dict[str, tuple[torch.Tensor, torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)


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
    from halfbyte.backends import triton_kernels_hessian, triton_kernels_search

    first = int(np.searchsorted(E4M3.magnitudes, max(rule.scale_byte.smallest, E4M3.smallest)))
    method, (blocks, columns, row_quads, group_blocks) = request.method, arguments
    if isinstance(method, Hessian):
        matrices, bounds = _hessian(method, words.device)
        rows, lanes = blocks // columns, int(common["B"])
        grid = (columns * (-(-rows // lanes)),)
        triton_kernels_hessian.quantize_hessian[grid](
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
        return
    weights, objective = words, UNIFORM
    if isinstance(method, Optimal) and method.channel_weights is not None:
        weights, objective = _weights(method, columns * request.format.block, words.device), WEIGHTED
    triton_kernels_search.quantize_optimal[(programs,)](
        words, *outputs, weights, *arguments, OBJECTIVE=objective, FIRST=first, **common
    )


def _weights(method: Optimal, width: int, device: torch.device) -> torch.Tensor:
    """Weights scaled by a power of two that brings the largest into [1, 2), zeros behind the last."""
    import torch

    kept = _WEIGHTS.setdefault(method, {})
    key = (str(device), width)
    if key not in kept:
        given = method.channel_weights
        if given is None:
            raise TypeError("this method has no weights")
        padded = np.zeros(width, np.float32)
        padded[: given.size] = np.ldexp(given, -exponent_of_largest(given))
        kept[key] = torch.from_numpy(padded).to(device)
    return kept[key]


def _hessian(method: Hessian, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Triangles and bounds of the matrices."""
    import torch

    kept = _HESSIANS.setdefault(method, {})
    if str(device) not in kept:
        triangles, bounds = prepared(method)
        kept[str(device)] = (torch.from_numpy(triangles).to(device), torch.from_numpy(bounds).to(device))
    return kept[str(device)]
