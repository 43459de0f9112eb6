"""Error feedback by the compiled kernel: the bits of reference/feedback.py, which does the rows that it leaves out."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.call import MXCall, NVFP4Call
from halfbyte.backends.cpu.choose import Kernel, choose
from halfbyte.backends.cpu.general_search import Search, grid_of, mx_search, nvfp4_search
from halfbyte.backends.cpu.library import native, over_ranges, pointer
from halfbyte.backends.cpu.ranges import LARGEST_OVER_MULTIPLIER, in_range
from halfbyte.backends.cpu.structs import FeedbackSteps
from halfbyte.backends.cpu.tables_mx import ELEMENTS, element_number
from halfbyte.backends.cpu.tables_nvfp4 import sign_number
from halfbyte.backends.feedback_problem import Feedback
from halfbyte.backends.protocol import Parts, Reason
from halfbyte.backends.reference import feedback as reference
from halfbyte.codec.bits import F32
from halfbyte.contracts import MXRule, NVFP4Rule
from halfbyte.contracts.arithmetic import stored_scale, tensor_scale
from halfbyte.formats import E4M3, E8M0
from halfbyte.request import Request

SIGN_OF_CODE = 4
"""The sign bit is set for negative codes other than zero (gguf); the number in native/searches.h."""

MOST_MX = np.float32(2.0**100)
"""Rows with larger magnitudes than this are left to the reference."""

KERNELS = (Kernel.EXACT_BLOCKS, Kernel.EXACT_GENERAL, Kernel.MX_HESSIAN)
"""Searches whose objective the kernel evaluates itself."""


def unserved(request: Request) -> Reason | None:
    """Why the kernel does not serve a request; None if it does."""
    found = choose(request)
    if isinstance(found, Reason):
        return found
    if found not in KERNELS:
        return Reason("its error feedback has no kernel for a contract with a scale search of its own")
    return None


def solve(w: F32, request: Request, feedback: Feedback, amax: F32 | None) -> Parts[npt.NDArray[Any]]:
    """Quantize a contiguous (rows, K) float32 matrix with error feedback."""
    rows, width = w.shape
    block = request.format.block
    codes, scales = np.empty((rows, width // 2), np.uint8), np.empty((rows, width // block), np.uint8)
    prepared = _nvfp4(w, request, amax, codes, scales) if amax is not None else _mx(w, request, codes, scales)
    if prepared is None:
        return reference.solve(w, request, feedback, amax)
    search, steps, stored, multiplier = prepared
    strips = strips_of(feedback)
    held = steps.point(width, feedback, strips)
    library, isa = native()
    grid = grid_of(request.format.element)
    left_out = np.empty(rows, np.int64)

    def run(start: int, stop: int) -> npt.NDArray[np.int64]:
        found = library.hb_feedback(
            isa, pointer(w, start * width * 4), ctypes.c_int64(stop - start), ctypes.c_int64(start),
            ctypes.byref(search.native), ctypes.byref(held), ctypes.byref(grid), pointer(codes, start * codes.shape[1]),
            pointer(scales, start * scales.shape[1]), pointer(left_out, start * 8),
        )  # fmt: skip
        return left_out[start : start + int(found)].copy()

    listed = np.concatenate(over_ranges(run, rows, width * 4 * 16, request.threads)) if rows else left_out
    if listed.size:
        own = amax[listed] if amax is not None and request.scaling == "row" else amax
        parts = reference.solve(w[listed], request, feedback, own)
        codes[listed], scales[listed] = parts.codes, parts.scales
    return Parts(codes, scales, stored, multiplier)


@dataclass(frozen=True)
class Strips:
    """A Feedback in the order in which the kernel reads it."""

    factor: F32
    shift: F32 | None
    moments: F32 | None
    order: npt.NDArray[np.int32]


_STRIPS: weakref.WeakKeyDictionary[Feedback, Strips] = weakref.WeakKeyDictionary()


def strips_of(feedback: Feedback) -> Strips:
    """The strips of a Feedback, kept as long as it lives."""
    if feedback not in _STRIPS:
        count = feedback.order.size
        width = feedback.factor.shape[0]
        block = width // count
        ends = np.cumsum([block * (turn + block) for turn in range(0, width, block)])
        factor = np.empty(ends[-1], np.float32)
        for turn, end in zip(range(0, width, block), ends.tolist(), strict=True):
            strip = feedback.factor[: turn + block, turn : turn + block]
            factor[end - strip.size : end] = strip.reshape(-1)

        def columns(matrix: F32) -> F32:
            return np.ascontiguousarray(matrix.reshape(width, count, block).transpose(1, 0, 2))

        _STRIPS[feedback] = Strips(
            factor=factor,
            shift=None if feedback.shift is None else columns(feedback.shift),
            moments=columns(feedback.moments) if feedback.sweeps and feedback.moments is not None else None,
            order=np.ascontiguousarray(feedback.order, np.int32),
        )
    return _STRIPS[feedback]


@dataclass(frozen=True)
class Steps:
    """What the kernel needs of the contract besides the search."""

    sign: int
    nan_code: int
    per_row: bool
    scale: F32
    """(256,) or (rows, 256): what a code is multiplied by under each byte."""
    most: F32

    def point(self, width: int, feedback: Feedback, strips: Strips) -> FeedbackSteps:
        def address(array: npt.NDArray[Any] | None) -> int | None:
            return None if array is None else array.ctypes.data

        return FeedbackSteps(
            width=width, sign=self.sign, nan_code=self.nan_code, sweeps=feedback.sweeps, per_row=int(self.per_row),
            order=address(strips.order), factor=address(strips.factor), shift=address(strips.shift),
            moments=address(strips.moments), scale=address(self.scale), most=address(self.most),
        )  # fmt: skip


Prepared = tuple[Search, Steps, F32 | None, F32 | None]


@np.errstate(all="ignore")
def _nvfp4(
    w: F32, request: Request, amax: F32, codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]
) -> Prepared | None:
    """The search and the numbers of an NVFP4 tensor; None if they are beyond the range of the kernel."""
    rule = request.rule
    if not isinstance(rule, NVFP4Rule):
        raise TypeError("only NVFP4 has an amax")
    t = tensor_scale(amax.reshape(-1, 1, 1), rule, request.method, request.dtype)
    stored, multiplier = stored_scale(rule, t)
    call = NVFP4Call(
        x=w, request=request, codes=codes, scales=scales, amax=amax, rule=rule, t=t, multiplier=multiplier, largest=0.0
    )
    if not in_range(0.0, call):
        return None
    search = nvfp4_search(call)
    scale = np.zeros((multiplier.size, 256), np.float32)
    scale[:, : E4M3.magnitudes.size] = E4M3.magnitudes * multiplier.reshape(-1, 1)
    most = (multiplier.astype(np.float64) * LARGEST_OVER_MULTIPLIER).astype(np.float32).reshape(-1)
    steps = Steps(sign_number(rule.rounding), rule.rounding.nan_code, call.by_row, np.ascontiguousarray(scale), most)
    return search, steps, stored, multiplier


def _mx(w: F32, request: Request, codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> Prepared:
    rule, element = request.rule, request.format.element
    if not isinstance(rule, MXRule):
        raise TypeError("only MX formats have no amax")
    call = MXCall(x=w, request=request, codes=codes, scales=scales, rule=rule)
    number = element_number(rule, element, request.dtype)
    if number is None:
        raise TypeError(f"{request.contract} has no compiled search")
    nearest = rule.nearest is not None
    search = mx_search(call, "first nearest" if nearest else [*ELEMENTS][number])
    scale = np.append(E8M0.magnitudes, np.zeros(256 - E8M0.magnitudes.size, np.float32)).astype(np.float32)
    sign = SIGN_OF_CODE if nearest else sign_number(rule.rounding)
    return search, Steps(sign, rule.rounding.nan_code, False, scale, np.array([MOST_MX])), None, None
