"""The headroom of a tensor by the compiled search: sums of errors under each candidate (backends/headroom.py).

It gives the choice of the reference. Amaxes outside the range in which the kernels are exact go to the reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.call import NVFP4Call
from halfbyte.backends.cpu.choose import Kernel, choose
from halfbyte.backends.cpu.general_search import Search, nvfp4_search, row_search
from halfbyte.backends.cpu.library import native, one_thread, over_ranges, pointer
from halfbyte.backends.cpu.ranges import each_in_range
from halfbyte.backends.cpu.structs import MOST_HEADROOMS, Survey
from halfbyte.backends.cpu.whole import WholeCall, whole_call
from halfbyte.backends.headroom import (
    ALONE,
    DEFAULT,
    EVERY,
    FRACTION_BITS,
    MOST_LOST,
    SMALL,
    Candidate,
    Ends,
    Sample,
    Total,
    Trial,
    best,
    candidate,
    each_ends,
    ends,
    exponents,
    headrooms,
    only,
    probe,
    widened,
)
from halfbyte.backends.numbering import DTYPE_NUMBERS
from halfbyte.backends.reference import headroom as reference
from halfbyte.codec.bits import DTYPES, F32, U8, widen
from halfbyte.codec.blocks import split
from halfbyte.contracts import NVFP4Rule
from halfbyte.methods import Optimal
from halfbyte.request import Request

KERNELS = (Kernel.EXACT_BLOCKS, Kernel.EXACT_ROWS, Kernel.EXACT_GENERAL)
"""The kernels whose requests the general search serves too."""

MOST_TRIED = 4
"""Headrooms of one whole call. (native/whole_call.cpp)"""

ROWS_AT_ONCE = 1 << 16
"""Elements of rows that the reference surveys together: arrays of this size stay in a cache."""

FIRST_STEP = 1 << 14
"""Elements of the first step of a decision on several threads. Every step is twice as long as the one before."""


def raised_amax(x: npt.NDArray[Any], amax: F32, request: Request, size: int) -> F32:
    """The amax to quantize with: that of the tensor times the best headroom.

    x: a contiguous matrix of whole blocks. size: the number of elements without padding.
    """
    candidates = headrooms(request, size)
    if candidates == ALONE:
        return amax
    if len(candidates) == 1:
        return only(amax, candidates[0], request)
    looked = probe(request, size)
    if looked is not None:
        (total,) = survey(x, amax, request, looked.candidates, decides=True, sample=Sample(0, looked.step))
        if looked.finds(total):
            candidates = looked.candidates
    large = size > SMALL  # a small tensor is searched sooner than tables are made for a decision
    return widened(amax, best(candidates, survey(x, amax, request, candidates, decides=large)[0]))


def raised_rows(
    x: npt.NDArray[Any], amax: F32, request: Request, size: int, outputs: tuple[U8, U8]
) -> tuple[F32, npt.NDArray[np.bool_]]:
    """The same for rows with a scale each; and which rows' codes and scales are written to `outputs` already."""
    candidates, none = headrooms(request, size), np.zeros(amax.size, bool)
    if candidates == ALONE:
        return amax, none
    if len(candidates) == 1:
        return only(amax, candidates[0], request), none
    looked = probe(request, size)
    if looked is not None and looked.finds(_sampled_rows(x, amax, request, looked)):
        candidates = looked.candidates
    call = _call_of_row(request) if set(DEFAULT) <= set(candidates) and len(candidates) <= MOST_TRIED else None
    if call is None:
        return widened(amax, _row_totals(x, amax, request, candidates, True).best(candidates)), none
    chosen = _chosen_rows(x, amax, request, call, candidates, outputs)
    left, taken = chosen < 0, np.array(candidates)[chosen]
    if left.any():
        taken[left] = _row_totals(np.ascontiguousarray(x[left]), amax[left], request, candidates, True).best(candidates)
    return widened(amax, taken), ~left


def _chosen_rows(
    x: npt.NDArray[Any],
    amax: F32,
    request: Request,
    call: WholeCall,
    candidates: tuple[float, ...],
    outputs: tuple[U8, U8],
) -> npt.NDArray[np.int8]:
    """The place of each row's headroom, with its codes and scales written; -1 and nothing where it cannot be told."""
    chosen = np.empty(amax.size, np.int8)
    codes, scales = outputs
    library, isa = native()
    size, columns = int(x.strides[0]), int(scales.shape[1])
    tried = (ctypes.c_double * len(candidates))(*candidates)

    def run(start: int, stop: int) -> None:
        library.hb_choose_rows(
            ctypes.c_void_p(call.address), isa, pointer(x, start * size), ctypes.c_int64(stop - start),
            ctypes.c_int64(columns), pointer(amax, start * 4), len(candidates), tried,
            pointer(scales, start * columns), pointer(codes, start * codes.shape[1]), pointer(chosen, start),
        )  # fmt: skip

    over_ranges(run, len(x), size, request.threads)
    return chosen


def _sampled_rows(x: npt.NDArray[Any], amax: F32, request: Request, trial: Trial) -> tuple[Total, ...]:
    """What each candidate of a trial costs on its rows, but for those that leave one out."""
    call, count = _call_of_row(request), len(trial.candidates)
    if call is not None and count <= MOST_TRIED:
        library, isa = native()
        sums = (ctypes.c_int64 * (2 * count))()
        failed = library.hb_survey_sampled_rows(
            ctypes.c_void_p(call.address), isa, pointer(x), ctypes.c_int64(len(x)),
            ctypes.c_int64(x.shape[1] // request.format.block), pointer(amax), count,
            (ctypes.c_double * count)(*trial.candidates), ctypes.c_int64(trial.step), sums,
        )  # fmt: skip
        if not failed:
            return _totals_of(sums)
    some = np.ascontiguousarray(x[:: trial.step])
    return _row_totals(some, amax[:: trial.step], request, trial.candidates, False).total()


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
    sample: the blocks that count, of a tensor with one scale. Of more candidates than 1 and 2 the least sum is T_h.
    """
    flat = np.ascontiguousarray(amax, np.float32).reshape(-1)
    if request.scaling == "row":
        return _row_totals(x, flat, request, candidates, decides).listed()
    whole = None if decides else _by_whole_call(x, float(flat[0]), request, candidates, sample)
    if whole is not None:
        return [whole]
    found = [candidate(flat, headroom, request) for headroom in candidates]
    served = _served(x, request, found, flat)[0]
    compiled = _one_scale(x, request, candidates, found, flat, decides, sample) if served else None
    return [_by_reference(x, flat[0], request, candidates, sample) if compiled is None else compiled]


_CALLS: dict[int, tuple[Request, WholeCall | None]] = {}
"""Whole calls by the identity of their requests, which are kept so that it stays theirs."""
MOST_CALLS = 64


def _call_of(request: Request) -> WholeCall | None:
    """What knows the numbers of every amax in the library; None if nothing does, or arrays would be kept with it."""
    return None if request.scaling == "row" else _kept_call(request)


def _call_of_row(request: Request) -> WholeCall | None:
    """The same for a row of a request that gives each row a scale, if the library knows how to choose for it."""
    return _kept_call(request) if choose(request) is Kernel.EXACT_ROWS else None


def _kept_call(request: Request) -> WholeCall | None:
    kept = _CALLS.get(id(request))
    if kept is not None and kept[0] is request:
        return kept[1]
    if choose(request) not in KERNELS or (isinstance(request.method, Optimal) and request.method.weights is not None):
        return None
    if len(_CALLS) >= MOST_CALLS:
        _CALLS.clear()
    found = whole_call(replace(request, scaling="tensor"))
    _CALLS[id(request)] = request, found
    return found


def _by_whole_call(
    x: npt.NDArray[Any], amax: float, request: Request, candidates: tuple[float, ...], sample: Sample
) -> tuple[Total, ...] | None:
    """T_h of a part of a tensor in one call, without a look at the contract. None: another way has to tell."""
    call = _call_of(request)
    if call is None or len(candidates) > MOST_TRIED or not call.serves(x.nbytes):
        return None
    library, isa = native()
    count = len(candidates)
    sums = (ctypes.c_int64 * (2 * count))()
    failed = library.hb_survey_part(
        ctypes.c_void_p(call.address), isa, pointer(x), ctypes.c_int64(x.shape[0]),
        ctypes.c_int64(x.shape[1] // request.format.block), ctypes.c_float(amax), count,
        (ctypes.c_double * count)(*candidates), ctypes.c_int64(sample.first), sample.step, sums,
    )  # fmt: skip
    return None if failed else _totals_of(sums)


def _totals_of(sums: ctypes.Array[ctypes.c_int64]) -> tuple[int, ...]:
    """native/searches.h: Sum, two words each."""
    return tuple(sums[c] + (sums[c + 1] << 32) for c in range(0, len(sums), 2))


@dataclass(frozen=True)
class RowTotals:
    """T_h of every row, which has a scale of its own, for each candidate."""

    totals: npt.NDArray[Any]
    """(rows, candidates): int64, or Python's integers where they are larger."""
    left_out: npt.NDArray[np.bool_]

    def best(self, candidates: tuple[float, ...]) -> npt.NDArray[np.float64]:
        """The headroom of each row, as `best` chooses it."""
        bound = self.totals.max(initial=0) + 1
        least = np.where(self.left_out, bound, self.totals).argmin(axis=1)
        return np.where(self.left_out.all(axis=1), 1.0, np.array(candidates)[least])

    def total(self) -> tuple[Total, ...]:
        """The sums over rows that leave no headroom out (headroom.of_rows)."""
        kept = self.totals[~self.left_out.any(axis=1)]
        return tuple(
            int(a) + (int(b) << 32) for a, b in zip((kept & _LOW).sum(axis=0), (kept >> 32).sum(axis=0), strict=True)
        )

    def listed(self) -> list[tuple[Total, ...]]:
        return [
            tuple(None if out else int(total) for total, out in zip(totals, outs, strict=True))
            for totals, outs in zip(self.totals, self.left_out, strict=True)
        ]


_LOW = 0xFFFFFFFF


def _row_totals(
    x: npt.NDArray[Any], amax: F32, request: Request, candidates: tuple[float, ...], decides: bool
) -> RowTotals:
    found = [candidate(amax, headroom, request) for headroom in candidates]
    served = _served(x, request, found, amax)
    rows, others = np.flatnonzero(served), np.flatnonzero(~served)
    sums = None
    if rows.size == amax.size:
        sums = _many_scales(x, request, candidates, found, amax, decides)
    elif rows.size:
        some = [candidate(amax[rows], headroom, request) for headroom in candidates]
        sums = _many_scales(np.ascontiguousarray(x[rows]), request, candidates, some, amax[rows], decides)
    if sums is None:
        rows, sums, others = rows[:0], np.zeros((0, len(candidates)), np.int64), np.arange(amax.size)
    whole = others.size and (amax[others] > 0).any()  # sums by the reference may be larger
    totals = np.zeros((amax.size, len(candidates)), object if whole else sums.dtype)
    totals[rows] = sums
    left_out = np.zeros(totals.shape, bool)
    at_once = max(1, ROWS_AT_ONCE // max(1, x.shape[1]))
    for start in range(0, others.size, at_once):
        those = others[start : start + at_once]
        blocks = split(widen(x[those]), request.format.block)
        for row, made in zip(those, reference.survey_rows(blocks, amax[those], request, candidates), strict=True):
            totals[row] = [total or 0 for total in made]
            left_out[row] = [total is None for total in made]
    return RowTotals(totals, left_out)


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
    edge = ends(found[own.one], found[own.two], request)[0] if own.two >= 0 else None
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
        totals = _by_steps(own, x, request.format.block, over_rows)
    del held
    return totals


def edge_of(request: Request, amax: np.float32) -> Ends | None:
    """The blocks that differ between the headrooms 1 and 2; None: all of them, or the reference has to tell."""
    call, found = _call_of(request), (ctypes.c_float * 2)()
    if call is not None:
        failed = native()[0].hb_survey_ends(ctypes.c_void_p(call.address), ctypes.c_float(float(amax)), found)
        return None if failed else Ends(np.float32(found[0]), np.float32(found[1]))
    own = np.array([amax], np.float32)
    one, two = (candidate(own, headroom, request) for headroom in DEFAULT)
    none = np.empty((0, request.format.block), DTYPES[request.dtype])
    return ends(one, two, request)[0] if _served(none, request, [one, two], own)[0] else None


def ends_listed(
    blocks: npt.NDArray[Any], request: Request, bottom: float, top: float, most: int
) -> npt.NDArray[np.int64]:
    """The first `most` blocks (or a few less) whose amax is above `top`, or above 0 and up to `bottom`."""
    library, isa = native()
    size, found, step = int(blocks.strides[0]), [np.zeros(0, np.int64)], 1 << 14
    listed = np.empty(step, np.int64)
    for start in range(0, len(blocks), step):
        count = library.hb_list_ends(
            isa, pointer(blocks, start * size), ctypes.c_int64(min(step, len(blocks) - start)), request.format.block,
            DTYPE_NUMBERS[request.dtype], ctypes.c_float(bottom), ctypes.c_float(top), pointer(listed),
        )  # fmt: skip
        found.append(listed[:count] + start)
        if sum(map(len, found)) >= most:
            break
    return np.concatenate(found)[:most]


def _by_steps(
    own: Survey, x: npt.NDArray[Any], block: int, over_rows: Callable[[int, int], tuple[int, ...] | None]
) -> tuple[int, ...] | None:
    """What survey.cpp does on one thread, on several: both ends of ever larger parts, until 2 is far enough ahead."""
    totals: tuple[int, ...] | None = (0, 0)
    start, step = 0, max(1, FIRST_STEP // x.shape[1])
    while totals is not None and start < x.shape[0]:
        more = over_rows(start, min(start + step, x.shape[0]))
        totals = None if more is None else (totals[0] + more[0], totals[1] + more[1])
        start, step = start + step, 2 * step
        left = max(0, x.shape[0] - start) * (x.shape[1] // block)
        if totals is not None and totals[own.two] + MOST_LOST[block] * left < totals[own.one]:
            break
    return totals


def _many_scales(
    x: npt.NDArray[Any],
    request: Request,
    candidates: tuple[float, ...],
    found: list[Candidate],
    amax: F32,
    decides: bool,
) -> npt.NDArray[Any] | None:
    """(rows, candidates)."""
    own, held = _survey(x, request, candidates, found, 1)
    own.decides = int(decides)
    edges = np.full((x.shape[0], 2), -1, np.float32)
    if own.two >= 0:
        edges = np.ascontiguousarray(each_ends(found[own.one], found[own.two], request))
    shifts = np.ascontiguousarray(_shifts(amax, found, request), np.int32)
    sums = np.zeros((x.shape[0], len(found), 2), np.int64)
    library, isa = native()
    size = int(x.strides[0])

    def run(start: int, stop: int) -> int:
        return int(
            library.hb_survey_rows(
                isa, pointer(x, start * size), ctypes.c_int64(stop - start),
                ctypes.c_int64(x.shape[1] // request.format.block), ctypes.c_int64(start), ctypes.byref(own),
                pointer(edges, start * 8), pointer(shifts, start * 4 * len(found)),
                pointer(sums, start * 16 * len(found)),
            )
        )  # fmt: skip

    failed = any(over_ranges(run, x.shape[0], size, request.threads))
    del held
    if failed:
        return None
    if sums[..., 1].max(initial=0) < 1 << 29 and sums[..., 0].max(initial=0) < 1 << 61:
        return np.asarray(sums[..., 0] + (sums[..., 1] << 32))
    return np.asarray(sums[..., 0].astype(object) + sums[..., 1].astype(object) * (1 << 32))


def _survey(
    x: npt.NDArray[Any], request: Request, candidates: tuple[float, ...], found: list[Candidate], step: int
) -> tuple[Survey, list[Search]]:
    """The structure for the library, without ends and shifts; and what its pointers need."""
    both = 1.0 in candidates and 2.0 in candidates
    own = Survey(count=len(found), step=step)
    own.one, own.two = (candidates.index(1.0), candidates.index(2.0)) if both else (-1, -1)
    rows = choose(request) is Kernel.EXACT_ROWS
    held = [(row_search if rows else nvfp4_search)(_call(x, request, one)) for one in found]
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


def _shifts(amax: F32, found: list[Candidate], request: Request) -> npt.NDArray[np.int32]:
    """(amaxes, candidates): 2·(k_h − k_1) + 16."""
    base = exponents(candidate(amax, 1.0, request).multiplier)
    return np.stack([2 * (exponents(one.multiplier) - base) + FRACTION_BITS for one in found], axis=1)


def _by_reference(
    x: npt.NDArray[Any], amax: np.float32, request: Request, candidates: tuple[float, ...], sample: Sample
) -> tuple[Total, ...]:
    return reference.survey(split(widen(x), request.format.block), amax, request, candidates, sample)
