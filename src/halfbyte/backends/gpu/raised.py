"""The choice of a headroom by the host: what each candidate costs comes from a device, which the host waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from halfbyte.backends.gpu.backend import survey_matrix, total_of
from halfbyte.backends.headroom import ALONE, Total, Trial, best, candidate, headrooms, only, probe, widened
from halfbyte.codec.bits import F32
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch


def raised_amax(x: torch.Tensor, request: Request, amax: F32) -> F32:
    """The amax of a matrix, one number, times its best headroom (reference/headroom.py)."""
    candidates = headrooms(request, x.numel())
    if candidates == ALONE or not (np.isfinite(amax).all() and (amax > 0).all()):
        return amax
    if len(candidates) == 1:
        return only(amax, candidates[0], request)
    looked = probe(request, x.numel())
    if looked is not None and looked.finds(_totals(x, request, amax, looked)):
        candidates = looked.candidates
    return widened(amax, best(candidates, _totals(x, request, amax, Trial(candidates))))


def _totals(x: torch.Tensor, request: Request, amax: F32, trial: Trial) -> tuple[Total, ...]:
    """The sums for each candidate; None for one without a usable scale, but for 1."""
    words = survey_matrix(x, request, float(amax.reshape(())), trial).tolist()
    tried = np.array(trial.candidates)
    usable = candidate(np.full(len(tried), amax.reshape(()), np.float32), tried, request).usable
    return tuple(
        total_of(each) if h == 1 or kept else None
        for each, h, kept in zip(words, trial.candidates, usable.tolist(), strict=True)
    )
