"""Error feedback by the backend that the caller names: the compiled kernel, or the numpy reference that defines it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from halfbyte.backends import get_backend
from halfbyte.backends.cpu import feedback as compiled
from halfbyte.backends.cpu import headroom as compiled_headroom
from halfbyte.backends.feedback_problem import Feedback
from halfbyte.backends.gpu import Held, hold, raised_on_device, solve_feedback, unserved_feedback
from halfbyte.backends.headroom import by_squared_error
from halfbyte.backends.protocol import Parts
from halfbyte.backends.reference import feedback as reference
from halfbyte.backends.reference import headroom as reference_headroom
from halfbyte.codec.bits import F32
from halfbyte.codec.blocks import split
from halfbyte.errors import BackendError, refuse_array
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch

__all__ = ["Feedback", "Held", "hold", "raised", "solve", "solve_on_device", "unserved_feedback"]

Headroom = float | tuple[float, ...] | None
"""The option of a method: one, several, or the default."""


def raised(w: F32, request: Request, headroom: Headroom, amax: F32, backend: str) -> F32:
    """The amaxes of a (rows, K) float32 matrix, one or one per row, times the headroom that Optimal chooses for it."""
    asked = by_squared_error(request, headroom)
    refuse_array("backend", backend)
    if backend != "auto" and get_backend(backend).name == "reference":
        return reference_headroom.raised_amax(split(w, request.format.block), amax, asked, w.size)
    if request.scaling == "row":
        codes, block = request.format.codes_per_byte, request.format.block
        room = tuple(np.empty((len(w), w.shape[1] // per), np.uint8) for per in (codes, block))
        return compiled_headroom.raised_rows(w, amax, asked, w.size, (room[0], room[1]))[0]
    return compiled_headroom.raised_amax(w, amax, asked, w.size)


def solve(w: F32, request: Request, feedback: Feedback, amax: F32 | None, backend: str) -> Parts[np.ndarray]:
    """Codes, scales and tensor scale of a (rows, K) float32 matrix, quantized with error feedback.

    backend: "reference" is numpy, "cpu" is compiled, "auto" is compiled where a kernel serves the request.
    """
    refuse_array("backend", backend)
    if backend != "auto" and get_backend(backend).takes_tensors:
        raise BackendError(f"backend {backend} takes tensors on a GPU; choose 'auto', 'cpu' or 'reference' for arrays")
    name = "auto" if backend == "auto" else get_backend(backend).name
    if name == "reference":
        return reference.solve(w, request, feedback, amax)
    reason = compiled.unserved(request)
    if reason is None:
        return compiled.solve(w, request, feedback, amax)
    if name == "cpu":
        raise BackendError(f"backend cpu cannot do this: {reason}; or choose backend='auto'")
    return reference.solve(w, request, feedback, amax)


def solve_on_device(
    w: torch.Tensor, request: Request, feedback: Feedback | Held, amax: F32 | None, own: bool, headroom: Headroom
) -> Parts[torch.Tensor]:
    """The same on a GPU, with the same bits, which stay there. own: the amax is that of `w`, and may be raised."""
    on_card = replace(request, device=w.device.type)
    if (reason := unserved_feedback(on_card, feedback.sweeps)) is not None:
        raise BackendError(f"backend gpu cannot do this: {reason}; or choose a tensor on the CPU")
    if amax is not None and own:
        amax = raised_on_device(w, by_squared_error(on_card, headroom), amax)
    return solve_feedback(w, on_card, feedback, amax)
