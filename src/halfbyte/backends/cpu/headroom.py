"""The headroom of a tensor by the compiled search: sums of errors under each candidate (backends/headroom.py).

It gives the choice of the reference. Amaxes outside the range in which the kernels are exact go to the reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.call import NVFP4Call
from halfbyte.backends.cpu.choose import Kernel, choose
from halfbyte.backends.cpu.general_search import Search, nvfp4_search
from halfbyte.backends.cpu.library import native, one_thread, over_ranges, pointer
from halfbyte.backends.cpu.ranges import each_in_range
from halfbyte.backends.cpu.structs import MOST_HEADROOMS, Survey
from halfbyte.backends.headroom import (
    ALONE,
    EVERY,
    FRACTION_BITS,
    Candidate,
    Ends,
    Sample,
    Total,
    best,
    candidate,
    ends,
    exponents,
    headrooms,
    of_rows,
    only,
    probe,
    widened,
)
from halfbyte.backends.reference import headroom as reference
from halfbyte.codec.bits import F32, widen
from halfbyte.codec.blocks import split
from halfbyte.contracts import NVFP4Rule
from halfbyte.request import Request

KERNELS = (Kernel.EXACT_BLOCKS, Kernel.EXACT_ROWS, Kernel.EXACT_GENERAL)
"""The kernels whose requests the general search serves too."""

FIRST_STEP = 1 << 14
"""Elements of the first step of a decision on several threads. Every step is twice as long as the one before."""


def raised_amax(x: npt.NDArray[Any], amax: F32, request: Request, size: int) -> F32:
    """The amaxes to quantize with: one, or one per row, times the best headroom of each.

    x: a contiguous matrix of whole blocks. size: the number of elements without padding.
    """
    candidates = headrooms(request, size)
    if candidates == ALONE:
        return amax
    flat = amax.reshape(-1)
    if len(candidates) == 1:
        return only(flat, candidates[0], request)
    looked = probe(request, size)
    if looked is not None:
        found = survey(x, flat, request, looked.candidates, sample=Sample(0, looked.step))
        if looked.finds(of_rows(found, len(looked.candidates))):
            candidates = looked.candidates
    chosen = [best(candidates, totals) for totals in survey(x, flat, request, candidates, decides=True)]
    return widened(flat, np.array(chosen))


def survey(
    x: npt.NDArray[Any],
    amax: F32,
    request: Request,
    candidates: tuple[float, ...],
    decides: bool = False,
    sample: Sample = EVERY,
) -> list[tuple[Total, ...]]:
    """For each amax (one, or one per row), T_h of each candidate, up to a number that all of them share.

    x: a contiguous matrix of whole blocks, which may be a part of a tensor: the sums of all parts are added.
    decides: x is all that shares the amax. Then only the order of the sums has to be right, which needs fewer searches.
    sample: the blocks that count. Of a sample the sums are T_h themselves.
    """
    flat = np.ascontiguousarray(amax, np.float32).reshape(-1)
    by_row = request.scaling == "row"
    found = [candidate(flat, headroom, request) for headroom in candidates]
    served = _served(x, request, found, flat)
    totals: list[tuple[Total, ...]] = [()] * flat.size
    if not by_row:
        compiled = _one_scale(x, request, candidates, found, flat, decides, sample) if served[0] else None
        totals[0] = _by_reference(x, flat[0], request, candidates, sample) if compiled is None else compiled
        return totals
    rows = np.flatnonzero(served)
    samples = [sample.behind(row * (x.shape[1] // request.format.block)) for row in range(flat.size)]
    if rows.size:
        part = x if rows.size == flat.size else np.ascontiguousarray(x[rows])
        chosen = found if rows.size == flat.size else [candidate(flat[rows], h, request) for h in candidates]
        firsts = np.array([samples[row].first for row in rows], np.int64)
        made = _many_scales(part, request, candidates, chosen, flat[rows], decides, (firsts, sample.step))
        for row, total in zip(rows, made, strict=True):
            totals[row] = total
    for row in np.flatnonzero([not total for total in totals]):
        totals[row] = _by_reference(x[row : row + 1], flat[row], request, candidates, samples[row])
    return totals


def _served(x: npt.NDArray[Any], request: Request, found: list[Candidate], amax: F32) -> npt.NDArray[np.bool_]:
    """For each amax, whether the compiled search is exact under every candidate."""
    if choose(request) not in KERNELS or len(found) > MOST_HEADROOMS:
        return np.zeros(amax.size, bool)
    served = np.isfinite(amax) & (amax > 0)
    for one in found:
        served &= each_in_range(amax, _call(x, request, one))
    return served


def _one_scale(
    x: npt.NDArray[Any],
    request: Request,
    candidates: tuple[float, ...],
    found: list[Candidate],
    amax: F32,
    decides: bool,
    sample: Sample,
) -> tuple[Total, ...] | None:
    own, held = _survey(x, request, candidates, found, sample.step)
    edge = _ends(candidates, found, request)[0]
    if edge is None:
        own.one = own.two = -1
    else:
        own.bottom, own.top = float(edge.bottom), float(edge.top)
    own.shift[: len(found)] = _shifts(amax, found, request)[0].tolist()
    library, isa = native()
    size, columns = int(x.strides[0]), x.shape[1] // request.format.block

    def run(start: int, stop: int) -> npt.NDArray[np.int64] | None:
        sums = np.zeros((len(found), 2), np.int64)
        failed = library.hb_survey(
            isa, pointer(x, start * size), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
            ctypes.c_int64(sample.behind(start * columns).first), ctypes.byref(own), pointer(sums),
        )  # fmt: skip
        return None if failed else sums

    def over_rows(start: int, stop: int) -> tuple[int, ...] | None:
        parts = over_ranges(lambda a, b: run(start + a, start + b), stop - start, size, request.threads)
        if any(part is None for part in parts):
            return None
        return tuple(sum(int(part[c, 0]) + (int(part[c, 1]) << 32) for part in parts) for c in range(len(found)))

    own.decides = int(decides and one_thread(x.nbytes, request.threads))
    if own.decides or not decides or edge is None or len(found) > 2:
        totals = over_rows(0, x.shape[0])
    else:
        totals = _by_steps(own, edge, x, over_rows)
    del held
    return totals


def _by_steps(
    own: Survey, edge: Ends, x: npt.NDArray[Any], over_rows: Callable[[int, int], tuple[int, ...] | None]
) -> tuple[int, ...] | None:
    """What survey.cpp does on one thread, on several: all blocks at the bottom, then others until 2 is ahead."""
    own.top = float("inf")
    totals = over_rows(0, x.shape[0])
    own.bottom, own.top = 0.0, float(edge.top)
    start, step = 0, max(1, FIRST_STEP // x.shape[1])
    while totals is not None and start < x.shape[0] and totals[own.two] >= totals[own.one]:
        more = over_rows(start, min(start + step, x.shape[0]))
        totals = None if more is None else (totals[0] + more[0], totals[1] + more[1])
        start, step = start + step, 2 * step
    return totals


def _many_scales(
    x: npt.NDArray[Any],
    request: Request,
    candidates: tuple[float, ...],
    found: list[Candidate],
    amax: F32,
    decides: bool,
    sample: tuple[npt.NDArray[np.int64], int],
) -> list[tuple[Total, ...]]:
    """For each row. sample: the first block of each row that counts, and the step from one to the next."""
    own, held = _survey(x, request, candidates, found, sample[1])
    own.decides = int(decides)
    edges = np.array(
        [(-1, -1) if edge is None else (edge.bottom, edge.top) for edge in _ends(candidates, found, request)]
    )
    edges = np.ascontiguousarray(edges, np.float32)
    shifts = np.ascontiguousarray(_shifts(amax, found, request), np.int32)
    sums = np.zeros((x.shape[0], len(found), 2), np.int64)
    library, isa = native()
    size = int(x.strides[0])

    def run(start: int, stop: int) -> int:
        return int(
            library.hb_survey_rows(
                isa, pointer(x, start * size), ctypes.c_int64(stop - start),
                ctypes.c_int64(x.shape[1] // request.format.block), ctypes.c_int64(start), ctypes.byref(own),
                pointer(sample[0], start * 8), pointer(edges, start * 8), pointer(shifts, start * 4 * len(found)),
                pointer(sums, start * 16 * len(found)),
            )
        )  # fmt: skip

    failed = any(over_ranges(run, x.shape[0], size, request.threads))
    del held
    if failed:
        return [()] * x.shape[0]
    if sums[..., 1].max(initial=0) < 1 << 30 and sums[..., 0].max(initial=0) < 1 << 61:
        return list(map(tuple, (sums[..., 0] + (sums[..., 1] << 32)).tolist()))
    whole = sums[..., 0].astype(object) + sums[..., 1].astype(object) * (1 << 32)
    return [tuple(map(int, row)) for row in whole]


def _survey(
    x: npt.NDArray[Any], request: Request, candidates: tuple[float, ...], found: list[Candidate], step: int
) -> tuple[Survey, list[Search]]:
    """The structure for the library, without ends and shifts; and what its pointers need."""
    both = 1.0 in candidates and 2.0 in candidates
    own = Survey(count=len(found), step=step)
    own.one, own.two = (candidates.index(1.0), candidates.index(2.0)) if both else (-1, -1)
    held = [nvfp4_search(_call(x, request, one)) for one in found]
    for place, search in enumerate(held):
        own.search[place] = search.native
    return own, held


def _call(x: npt.NDArray[Any], request: Request, found: Candidate) -> NVFP4Call:
    rule = request.rule
    if not isinstance(rule, NVFP4Rule):
        raise TypeError(f"{request.format.name} has no tensor scale")
    none = np.empty((0, x.shape[1] // request.format.block), np.uint8)
    return NVFP4Call(
        x=x, request=request, codes=none, scales=none, amax=found.amax, rule=rule, t=found.t,
        multiplier=found.multiplier,
    )  # fmt: skip


def _ends(candidates: tuple[float, ...], found: list[Candidate], request: Request) -> list[Ends | None]:
    if not (1.0 in candidates and 2.0 in candidates):
        return [None] * found[0].amax.size
    return ends(found[candidates.index(1.0)], found[candidates.index(2.0)], request)


def _shifts(amax: F32, found: list[Candidate], request: Request) -> npt.NDArray[np.int32]:
    """(amaxes, candidates): 2·(k_h − k_1) + 16."""
    base = exponents(candidate(amax, 1.0, request).multiplier)
    return np.stack([2 * (exponents(one.multiplier) - base) + FRACTION_BITS for one in found], axis=1)


def _by_reference(
    x: npt.NDArray[Any], amax: np.float32, request: Request, candidates: tuple[float, ...], sample: Sample
) -> tuple[Total, ...]:
    return reference.survey(split(widen(x), request.format.block), amax, request, candidates, sample)
