"""`prepare` on a GPU: the steps of factor.py by torch, in float64. Only the blocks' matrices come to the host."""

from __future__ import annotations

from dataclasses import replace

import torch

from halfbyte.arrays import to_numpy
from halfbyte.backends.feedback import hold
from halfbyte.errors import InputError
from halfbyte.feedback.factor import FIRST, SKEW, STEP, Factor, scaled_blocks
from halfbyte.methods import Gptq, Hessian

ROWS = 1024
"""Rows that are compared with their mirror image at once."""


def prepare_on_device(
    second_moment: object, cross_moment: object, block: int, method: Gptq, device: str, name: str
) -> Factor:
    """The factor of second moments, made and kept on a device. Arguments as in `prepare`."""
    h = _checked(_square(second_moment, device, name), name, block)
    cross = None
    if cross_moment is not None and method.asymmetry != 0:
        cross = _square(cross_moment, device, f"{name}: cross_moment")
        if cross.shape != h.shape:
            shapes = f"{tuple(cross.shape)}, the second moments {tuple(h.shape)}"
            raise InputError(f"{name}: cross_moment has shape {shapes}")
    diagonal = h.diagonal().clone()
    dead = diagonal == 0
    places = dead.nonzero()[:, 0]
    h[places], h[:, places] = 0, 0
    mean = float(diagonal[~dead].mean()) if len(places) < len(h) else 1.0
    totals = diagonal.reshape(-1, block).sum(dim=1)
    falling = method.order == "falling"
    order = torch.sort(-totals, stable=True).indices if falling else torch.arange(len(totals), device=h.device)
    columns = (order[:, None] * block + torch.arange(block, device=h.device)).reshape(-1)
    damping, damped = method.damping, False
    while True:
        added = damping * mean
        h.diagonal().copy_(diagonal + added)
        h[places, places] = added if added > 0 else 0.01 * mean
        r = _unit_factor(h, columns)
        if r is not None:
            break
        if damping >= 1:
            raise InputError(f"{name} cannot be factored, even with damping 1: it is not positive semidefinite")
        damping, damped = min(1.0, damping * STEP if damping else FIRST), True
    shift = None if cross is None else _shift(h, cross, places, method.asymmetry)
    at = torch.arange(len(order), device=h.device)
    parts = h.reshape(len(order), block, len(order), block)[at, :, at, :]
    objective = Hessian(scaled_blocks(to_numpy(parts)))
    used = replace(method, damping=damping)
    return Factor(len(h), block, used, hold(order, r, shift, objective), len(places), damped)


def _square(values: object, device: str, name: str) -> torch.Tensor:
    """The matrix in float64, in memory of its own."""
    given = torch.as_tensor(values)
    found = given.to(device).double()
    found = found.clone() if found.data_ptr() == given.data_ptr() else found
    if found.ndim != 2 or found.shape[0] != found.shape[1] or found.numel() == 0:
        raise InputError(f"{name} has shape {tuple(found.shape)}; it must be (K, K), K the width of the input")
    if not bool(torch.isfinite(found).all()):
        raise InputError(f"{name} of shape {tuple(found.shape)} holds NaN or Inf; leave out the tokens that have them")
    return found


def _checked(h: torch.Tensor, name: str, block: int) -> torch.Tensor:
    """The matrix made symmetric; it must be able to be one of second moments."""
    if len(h) % block:
        raise InputError(f"{name} of shape {tuple(h.shape)}: the width must be a multiple of the block, {block}")
    diagonal = h.diagonal()
    if bool((diagonal < 0).any()):
        raise InputError(
            f"{name} has a negative number on its diagonal ({float(diagonal.min()):.3g}); squares have none"
        )
    root = diagonal.sqrt()
    for start in range(0, len(h), ROWS):
        stop = min(len(h), start + ROWS)
        mirrored = h[:, start:stop].T.clone()
        if bool(((h[start:stop] - mirrored).abs() > SKEW * root[start:stop, None] * root).any()):
            raise InputError(f"{name} of shape {tuple(h.shape)} is not symmetric; give the sum of x·xᵀ over tokens")
        h[start:stop].add_(mirrored).div_(2)
        h[stop:, start:stop] = h[start:stop, stop:].T
    return h


def _unit_factor(a: torch.Tensor, columns: torch.Tensor) -> torch.Tensor | None:
    """R of A = R·D·Rᵀ as float32, columns in their order; None if A is not positive definite."""
    back = columns.flip(0)
    lower, info = torch.linalg.cholesky_ex(a[back[:, None], back])
    if int(info):
        return None
    unit = lower.div_(lower.diagonal().clone()).float().flip(0, 1).contiguous()
    return unit if bool(torch.isfinite(unit).all()) else None


def _shift(a: torch.Tensor, cross: torch.Tensor, dead: torch.Tensor, asymmetry: float) -> torch.Tensor:
    """N = −a·C·A⁻¹, so that the target is W − W·N. C is changed."""
    cross[:, dead] = 0
    shift: torch.Tensor = torch.linalg.solve(a, cross.T).T.mul_(-asymmetry).float().contiguous()
    if not bool(torch.isfinite(shift).all()):
        raise InputError("the cross moments are too large for the second moments: the target exceeds float32")
    return shift
