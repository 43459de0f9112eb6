"""Error feedback on a GPU: the scales of a block by the Hessian search, the rest by the kernels of triton/feedback.py.

Blocks go in batches of BATCH columns. A block takes in the errors of its batch when its turn comes; the columns behind
a batch do after the batch. Every element takes its terms in the order of the reference, each operation rounded once: so
the same Feedback gives the same bits as on the CPU, however the rows are cut.
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
from halfbyte.backends.gpu.operand import on_device
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
"""Rows per program of the kernels that take one block."""
TILE = 64
"""Columns, and rows, per program of the one that subtracts products."""
UNROLLED = 8
"""Terms of it at a time; divides every block."""


@dataclass(frozen=True, eq=False)
class Held:
    """A Feedback on a device."""

    order: torch.Tensor
    factor: torch.Tensor
    shift: torch.Tensor | None
    columns: torch.Tensor
    objective: Hessian
    blocks: list[Hessian]
    """The objective of the block of each turn."""
    sweeps: int = 0


_HELD: weakref.WeakKeyDictionary[Feedback, dict[str, Held]] = weakref.WeakKeyDictionary()


def unserved(request: Request, sweeps: int = 0) -> Reason | None:
    """Why a GPU does not serve a request with so many sweeps of descent; None if it does."""
    found, rule = choose(request), request.rule
    if isinstance(found, Reason):
        return found
    if isinstance(rule, DecodeRule):
        return Reason("this contract has no quantizer")
    if sweeps:
        return Reason("error feedback on a GPU has no descent")
    if request.scaling == "row" or rule.scale_search is not None or getattr(rule, "nearest", None) is not None:
        return Reason("error feedback on a GPU takes one tensor scale and contracts without a search of their own")
    return None


def solve(w: torch.Tensor, request: Request, feedback: Feedback | Held, amax: F32 | None) -> Parts[torch.Tensor]:
    """Quantize a (rows, K) float32 matrix on its device with error feedback."""
    import torch

    from halfbyte.backends.gpu.triton.feedback import bring_block, decide_block

    held = feedback if isinstance(feedback, Held) else _held(feedback, w.device)
    rule, block, (rows, width) = request.rule, request.format.block, w.shape
    divides, constant, scale, stored, multiplier = _numbers(request, amax)
    constants, scales_of = torch.from_numpy(constant).to(w.device), torch.from_numpy(scale).to(w.device)
    given = None if amax is None else torch.from_numpy(amax.reshape(-1)).to(w.device)
    if isinstance(rule, DecodeRule):
        raise TypeError(f"{request.contract} has no quantizer")
    rounding = rule.rounding
    with on_device(w):
        aim = _shifted(w.T.contiguous(), held.shift)[held.columns]
        updated, error = aim.clone(), torch.empty_like(aim)
        whole = torch.empty((rows, block), dtype=torch.float32, device=w.device)
        codes = torch.empty((rows, width // 2), dtype=torch.uint8, device=w.device)
        bytes_ = torch.empty((width // block, rows), dtype=torch.uint8, device=w.device)
        lanes = (-(-rows // LANES),)
        for start in range(0, width, BATCH):
            stop = min(width, start + BATCH)
            for first in range(start, stop, block):
                turn = first // block
                part, goal, factor = updated[first:], aim[first:], held.factor[start:, first:]
                bring_block[lanes](
                    part, goal, error[start:], factor, whole, rows, first - start, width, B=LANES, N=block,
                    num_warps=2, enable_fp_fusion=False,
                )  # fmt: skip
                own = replace(request, method=held.blocks[turn])
                bytes_[turn] = quantize_matrix(whole, own, given).scales.reshape(-1)
                decide_block[lanes](
                    part, goal, bytes_[turn], constants, scales_of, held.factor[first:, first:], codes[:, first // 2 :],
                    error[first:], rows, width, width // 2,
                    B=LANES, N=block, DIVIDES=divides, TIE=TIES.index(rounding.tie), SIGN=SIGNS.index(rounding.sign),
                    NAN_CODE=rounding.nan_code, ZERO_INPUT=rounding.zero_input, WRAPS=rounding.wraps,
                    num_warps=2, enable_fp_fusion=False,
                )  # fmt: skip
            if stop < width:
                _subtract(updated[stop:], updated[stop:], held.factor[start:, stop:], error[start:stop])
    placed_codes, placed = torch.empty_like(codes), torch.empty_like(bytes_)
    placed_codes.view(rows, -1, block // 2)[:, held.order] = codes.view(rows, -1, block // 2)
    placed[held.order] = bytes_

    def on_card(value: F32 | None) -> torch.Tensor | None:
        return None if value is None else torch.from_numpy(np.ascontiguousarray(value)).to(w.device)

    return Parts(placed_codes, placed.T.contiguous(), on_card(stored), on_card(multiplier))


def _shifted(w: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    """The target of weights (K, rows): W − W·N."""
    import torch

    if shift is None:
        return w
    target = torch.empty_like(w)
    _subtract(w, target, shift, w)
    return target


def _subtract(start: torch.Tensor, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """out = start − leftᵀ·right, term by term: (columns, rows); left from (terms, columns) on, right (terms, rows)."""
    from halfbyte.backends.gpu.triton.feedback import subtract_products

    columns, rows = start.shape
    grid = (-(-columns // TILE), -(-rows // TILE))
    subtract_products[grid](
        start, out, left, right, columns, rows, len(right), left.stride(0), C=TILE, R=TILE, U=UNROLLED,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


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
    block = len(factor) // count
    return Held(
        order=order,
        factor=factor,
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
