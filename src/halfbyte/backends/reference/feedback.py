"""Error feedback in the reference: blocks in turn, and in a block column after column. docs/gptq.md has the formulas.

All numbers are float32 and every operation rounds once. Each element of a row takes its terms one after the other in a
fixed order, and rows know nothing of each other. So any cut into rows, threads and batches of columns gives these bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from halfbyte.backends.feedback_problem import Feedback
from halfbyte.backends.protocol import Parts
from halfbyte.backends.reference.quantize import quantize_matrix
from halfbyte.codec.bits import F32, U8
from halfbyte.codec.element import decode
from halfbyte.codec.pack import pack
from halfbyte.contracts.arithmetic import statistics_dtype, stored_scale, tensor_scale
from halfbyte.contracts.rounding import round_elements
from halfbyte.contracts.spec import MXRule, NVFP4Rule
from halfbyte.errors import UnsupportedError
from halfbyte.formats import E4M3, E8M0
from halfbyte.formats.spec import ElementFormat
from halfbyte.methods import Hessian
from halfbyte.request import Request


@dataclass(frozen=True)
class Elements:
    """How numbers become codes under given scale bytes, and codes numbers."""

    encode: Callable[[F32, U8], U8]
    """Codes of (rows,) numbers under (rows,) scale bytes, by the contract."""
    scale: Callable[[U8], F32]
    """What a code is multiplied by: the block scale times the tensor's, rounded once."""
    format: ElementFormat

    def value(self, codes: U8, bytes_: U8) -> F32:
        """code × scale, rounded once. A zero is +0."""
        return decode(codes, self.format) * self.scale(bytes_) + np.float32(0)


@np.errstate(all="ignore")
def solve(w: F32, request: Request, feedback: Feedback, amax: F32 | None) -> Parts[np.ndarray]:
    """Quantize a (rows, K) float32 matrix with error feedback. `amax`: one, or one per row; None for MX formats.

    `request` has the method `feedback.objective`.
    """
    rule, block = request.rule, request.format.block
    elements, stored, multiplier = _elements(request, amax)
    rows, width = w.shape
    columns = feedback.columns
    target = shifted(w, feedback.shift)
    updated = target[:, columns]
    error = np.zeros_like(updated)
    codes, scales = np.zeros((rows, width), np.uint8), np.zeros((rows, width // block), np.uint8)
    aim = target[:, columns]
    for place, number in enumerate(feedback.order.tolist()):
        first = place * block
        own = replace(request, method=Hessian(feedback.objective.matrices[number : number + 1]))
        part = _unrounded(updated[:, first : first + block], aim[:, first : first + block], feedback.factor, first)
        bytes_ = quantize_matrix(part, own, amax).scales[:, 0]
        scales[:, number] = bytes_
        for j in range(first, first + block):
            code = elements.encode(updated[:, j], bytes_)
            codes[:, columns[j]] = code
            error[:, j] = elements.value(code, bytes_) - aim[:, j]
            updated[:, j + 1 :] -= error[:, j : j + 1] * feedback.factor[j, j + 1 :]
    for _ in range(feedback.sweeps):
        _descend(codes, scales, aim, error, feedback, elements)
    if not isinstance(rule, NVFP4Rule):
        stored = multiplier = None
    return Parts(pack(codes, request.format), scales, stored, multiplier)


def _unrounded(updated: F32, aim: F32, factor: F32, first: int) -> F32:
    """The columns of a block as they would make good all errors so far, were they not rounded themselves."""
    part = updated.copy()
    for j in range(part.shape[1]):
        moved = part[:, j : j + 1] - aim[:, j : j + 1]
        part[:, j + 1 :] -= moved * factor[first + j, first + j + 1 : first + part.shape[1]]
    return part


def shifted(w: F32, shift: F32 | None) -> F32:
    """W − W·N, the terms of each element taken in index order."""
    target = w.copy()
    if shift is not None:
        for k in range(w.shape[1]):
            target -= w[:, k : k + 1] * shift[k]
    return target


def _elements(request: Request, amax: F32 | None) -> tuple[Elements, F32 | None, F32 | None]:
    """The contract's formulas for one column of elements, and the tensor scale as it is stored and as it multiplies."""
    rule, element = request.rule, request.format.element
    if isinstance(rule, NVFP4Rule):
        if amax is None:
            raise TypeError("NVFP4 needs an amax")
        t = tensor_scale(amax.reshape(-1), rule, request.method, request.dtype)
        stored, multiplier = stored_scale(rule, t)

        def nvfp4(x: F32, bytes_: U8) -> U8:
            return round_elements(x, rule.element(x, decode(bytes_, E4M3), t), element, rule.rounding)[0]

        return Elements(nvfp4, lambda bytes_: decode(bytes_, E4M3) * multiplier, element), stored, multiplier
    if not isinstance(rule, MXRule):
        raise UnsupportedError(f"contract {request.contract.name} decodes {request.format.name} only")
    statistics = statistics_dtype(rule, request.dtype)

    def mx(x: F32, bytes_: U8) -> U8:
        scale = E8M0.values[bytes_]
        if rule.nearest is not None:
            return rule.nearest(x, scale)
        return round_elements(x, rule.quotient(x, scale, statistics), element, rule.rounding)[0]

    return Elements(mx, lambda bytes_: E8M0.values[bytes_], element), None, None


def _descend(codes: U8, scales: U8, aim: F32, error: F32, feedback: Feedback, elements: Elements) -> None:
    """One sweep: each code in turn moves by one step of the grid if that lowers the error of the row's output.

    `codes` and `error` are changed in place. The lower neighbour is tried first; the upper one wins only if it is
    better still.
    """
    element, columns = elements.format, feedback.columns
    block = columns.size // feedback.order.size
    grid = np.unique(element.values[np.isfinite(element.values)] + np.float32(0))
    grid_codes = np.array([_code_of(value, element) for value in grid], np.uint8)
    h = feedback.moments
    if h is None:
        raise TypeError("the descent needs second moments")
    for place, number in enumerate(feedback.order.tolist()):
        first = place * block
        scale = elements.scale(scales[:, number])
        slope = np.zeros((codes.shape[0], block), np.float32)
        for j in range(columns.size):
            slope -= error[:, j : j + 1] * h[j, first : first + block]
        for k in range(block):
            j = first + k
            kept = codes[:, columns[j]]
            position = np.searchsorted(grid, decode(kept, element) + np.float32(0))
            now = grid[position] * scale
            best, moved = np.zeros_like(scale), position
            step = np.zeros_like(scale)
            for way in (-1, 1):
                tried = np.clip(position + way, 0, grid.size - 1)
                difference = grid[tried] * scale - now
                change = difference * (difference * h[j, j] - np.float32(2) * slope[:, k])
                better = change < best
                best, moved = np.where(better, change, best), np.where(better, tried, moved)
                step = np.where(better, difference, step)
            codes[:, columns[j]] = np.where(moved != position, grid_codes[moved], kept)
            error[:, j] = np.where(moved != position, (grid[moved] * scale + np.float32(0)) - aim[:, j], error[:, j])
            slope[:, k + 1 :] -= step[:, None] * h[j, j + 1 : first + block]


def _code_of(value: np.float32, element: ElementFormat) -> int:
    magnitude = int(np.searchsorted(element.magnitudes, abs(value)))
    return magnitude | (element.sign_code if value < 0 else 0)
