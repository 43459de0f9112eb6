"""Error feedback on a GPU: the scales of a block by the Hessian search, its codes by one kernel, the rest by matmuls.

Blocks go in batches of BATCH columns. After each block the rest of its batch is updated, after each batch the columns
behind it. Sums over columns are matrix products here, whose order of additions is the library's own: so the last bit of
an updated weight may differ from that of the reference, and with it now and then a code.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from halfbyte.backends.cpu.tables_nvfp4 import element_constants
from halfbyte.backends.feedback_problem import Feedback
from halfbyte.backends.gpu.backend import quantize_matrix
from halfbyte.backends.gpu.choose import choose
from halfbyte.backends.numbering import SIGNS, TIES
from halfbyte.backends.protocol import Parts, Reason
from halfbyte.codec.bits import F32
from halfbyte.contracts import DecodeRule, MXRule, NVFP4Rule
from halfbyte.contracts.arithmetic import stored_scale, tensor_scale
from halfbyte.formats import E4M3, E8M0
from halfbyte.methods import Hessian
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch

BATCH = 128
"""Columns that are decided before all later ones are updated."""
LANES = 64


@dataclass(frozen=True, eq=False)
class Held:
    """A Feedback on a device."""

    order: torch.Tensor
    factor: torch.Tensor
    inverses: torch.Tensor
    """(blocks, block, block): the inverse of the factor's square of each turn."""
    shift: torch.Tensor | None
    columns: torch.Tensor
    objective: Hessian
    blocks: list[Hessian]
    """The objective of the block of each turn."""
    sweeps: int = 0


_HELD: weakref.WeakKeyDictionary[Feedback, dict[str, Held]] = weakref.WeakKeyDictionary()


def unserved(request: Request, feedback: Feedback | Held) -> Reason | None:
    """Why a GPU does not serve a request; None if it does."""
    found, rule = choose(request), request.rule
    if isinstance(found, Reason):
        return found
    if isinstance(rule, DecodeRule):
        return Reason("this contract has no quantizer")
    if feedback.sweeps:
        return Reason("error feedback on a GPU has no descent")
    if request.scaling == "row" or rule.scale_search is not None or getattr(rule, "nearest", None) is not None:
        return Reason("error feedback on a GPU takes one tensor scale and contracts without a search of their own")
    return None


def solve(w: torch.Tensor, request: Request, feedback: Feedback | Held, amax: F32 | None) -> Parts[torch.Tensor]:
    """Quantize a (rows, K) float32 matrix on its device with error feedback."""
    import torch

    from halfbyte.backends.gpu.triton.feedback import decide_block

    held = feedback if isinstance(feedback, Held) else _held(feedback, w.device)
    rule, block, (rows, width) = request.rule, request.format.block, w.shape
    divides, constant, scale, stored, multiplier = _numbers(request, amax)
    constants, scales_of = torch.from_numpy(constant).to(w.device), torch.from_numpy(scale).to(w.device)
    given = None if amax is None else torch.from_numpy(amax.reshape(-1)).to(w.device)
    if isinstance(rule, DecodeRule):
        raise TypeError(f"{request.contract} has no quantizer")
    rounding = rule.rounding
    with _full_precision(torch):
        aim = w if held.shift is None else torch.addmm(w, w, held.shift, alpha=-1)
        aim = aim[:, held.columns].contiguous()
        updated = aim.clone()
        error = torch.empty_like(aim)
        codes = torch.empty((rows, width // 2), dtype=torch.uint8, device=w.device)
        bytes_ = torch.empty((width // block, rows), dtype=torch.uint8, device=w.device)
        for start in range(0, width, BATCH):
            stop = min(width, start + BATCH)
            for first in range(start, stop, block):
                turn, last = first // block, first + block
                part, goal = updated[:, first:last], aim[:, first:last]
                whole = torch.addmm(goal, part - goal, held.inverses[turn])
                own = replace(request, method=held.blocks[turn])
                found = quantize_matrix(whole, own, given)
                bytes_[turn] = found.scales.reshape(-1)
                decide_block[(-(-rows // LANES),)](
                    part, goal, bytes_[turn], constants, scales_of, held.factor[first:, first:], codes[:, first // 2 :],
                    error[:, first:], rows, width, width, width, width // 2, width,
                    B=LANES, N=block, DIVIDES=divides, TIE=TIES.index(rounding.tie), SIGN=SIGNS.index(rounding.sign),
                    NAN_CODE=rounding.nan_code, ZERO_INPUT=rounding.zero_input, WRAPS=rounding.wraps,
                    num_warps=2, enable_fp_fusion=False,
                )  # fmt: skip
                if last < stop:
                    updated[:, last:stop].addmm_(error[:, first:last], held.factor[first:last, last:stop], alpha=-1)
            if stop < width:
                updated[:, stop:].addmm_(error[:, start:stop], held.factor[start:stop, stop:], alpha=-1)
    placed_codes, placed = torch.empty_like(codes), torch.empty_like(bytes_)
    placed_codes.view(rows, -1, block // 2)[:, held.order] = codes.view(rows, -1, block // 2)
    placed[held.order] = bytes_

    def on_device(value: F32 | None) -> torch.Tensor | None:
        return None if value is None else torch.from_numpy(np.ascontiguousarray(value)).to(w.device)

    return Parts(placed_codes, placed.T.contiguous(), on_device(stored), on_device(multiplier))


class _full_precision:
    """Matrix products in float32, not in TF32, while it is entered."""

    def __init__(self, torch: object) -> None:
        self.settings = torch.backends.cuda.matmul  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        self.before = self.settings.allow_tf32
        self.settings.allow_tf32 = False

    def __exit__(self, *error: object) -> None:
        self.settings.allow_tf32 = self.before


def _held(feedback: Feedback, device: torch.device) -> Held:
    import torch

    kept = _HELD.setdefault(feedback, {})
    if str(device) not in kept:
        order, factor = torch.from_numpy(feedback.order).to(device), torch.from_numpy(feedback.factor).to(device)
        shift = None if feedback.shift is None else torch.from_numpy(feedback.shift).to(device)
        kept[str(device)] = hold(order, factor, shift, feedback.objective, feedback.sweeps)
    return kept[str(device)]


def hold(
    order: torch.Tensor, factor: torch.Tensor, shift: torch.Tensor | None, objective: Hessian, sweeps: int = 0
) -> Held:
    """A Feedback of tensors on a device; order, factor, shift and objective are those of `Feedback`."""
    import torch

    count = order.numel()
    block, at = len(factor) // count, torch.arange(count, device=factor.device)
    squares = factor.reshape(count, block, count, block)[at, :, at, :].double()
    return Held(
        order=order,
        factor=factor,
        inverses=torch.linalg.inv(squares).float(),
        shift=shift,
        columns=(order[:, None] * block + torch.arange(block, device=order.device)).reshape(-1),
        objective=objective,
        blocks=[Hessian(objective.matrices[number : number + 1]) for number in order.tolist()],
        sweeps=sweeps,
    )


@np.errstate(all="ignore")
def _numbers(request: Request, amax: F32 | None) -> tuple[bool, F32, F32, F32 | None, F32 | None]:
    """Whether elements are divided, by what under each byte, what codes are multiplied by, and the tensor scale."""
    rule = request.rule
    constant, scale = np.zeros(256, np.float32), np.zeros(256, np.float32)
    if isinstance(rule, NVFP4Rule):
        if amax is None:
            raise TypeError("NVFP4 needs an amax")
        t = tensor_scale(amax.reshape(-1), rule, request.method, request.dtype)
        stored, multiplier = stored_scale(rule, t)
        divides, constant[:127] = element_constants(rule, t)
        scale[:127] = E4M3.magnitudes * multiplier
        return divides, constant, scale, stored, multiplier
    if not isinstance(rule, MXRule):
        raise TypeError(f"{request.contract} has no quantizer")
    count = E8M0.magnitudes.size
    constant[:count], scale[:count] = np.float32(1) / E8M0.magnitudes, E8M0.magnitudes
    return False, constant, scale, None, None
