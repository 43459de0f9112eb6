"""The headroom of a tensor in the reference: every block is searched under every candidate (backends/headroom.py)."""

from __future__ import annotations

import numpy as np

from halfbyte.backends.headroom import (
    ALONE,
    EVERY,
    Sample,
    Total,
    best,
    candidate,
    exponents,
    headrooms,
    of_rows,
    only,
    probe,
    steps_of,
    widened,
)
from halfbyte.backends.reference.search import Encode, ScaleGrid, least_errors
from halfbyte.codec.bits import F32, I32, U8
from halfbyte.codec.element import decode
from halfbyte.contracts.arithmetic import first_scale_byte
from halfbyte.contracts.rounding import round_elements
from halfbyte.contracts.spec import NVFP4Rule, TensorScale
from halfbyte.formats import E4M3
from halfbyte.methods import Optimal
from halfbyte.request import Request


def raised_amax(blocks: F32, amax: F32, request: Request, size: int) -> F32:
    """The amaxes to quantize with: the tensor's own, or those of its rows, times the best headroom of each.

    blocks: (rows, blocks, block). amax: one, or one per row. size: the number of elements without padding.
    """
    candidates = headrooms(request, size)
    if candidates == ALONE:
        return amax
    flat = amax.reshape(-1)
    if len(candidates) == 1:
        return only(flat, candidates[0], request)
    by_row = request.scaling == "row"
    looked = probe(request, size)
    if looked is not None:
        if by_row:
            found = survey_rows(blocks[:: looked.step], flat[:: looked.step], request, looked.candidates)
        else:
            found = [survey(blocks, flat[0], request, looked.candidates, Sample(0, looked.step))]
        if looked.finds(of_rows(found, len(looked.candidates))):
            candidates = looked.candidates
    rows = survey_rows(blocks, flat, request, candidates) if by_row else [survey(blocks, flat[0], request, candidates)]
    chosen = [best(candidates, totals) for totals in rows]
    return np.concatenate([widened(own, h).reshape(1) for own, h in zip(flat, chosen, strict=True)])


@np.errstate(all="ignore")
def survey(
    blocks: F32, amax: np.float32, request: Request, candidates: tuple[float, ...], sample: Sample = EVERY
) -> tuple[Total, ...]:
    """T_h of blocks that share an amax, for each candidate; None for a headroom that is left out.

    The blocks may be a part of a tensor: the sums of all parts are added. sample: those that count.
    """
    if not np.isfinite(amax) or amax <= 0:
        return _of_none(candidates)
    if sample.step > 1 and isinstance(request.method, Optimal) and request.method.weights is None:
        blocks, sample = blocks.reshape(1, -1, blocks.shape[2])[:, sample.first :: sample.step], EVERY
    return _surveyed(blocks, np.asarray(amax).reshape(1), request, candidates, sample)[0]


@np.errstate(all="ignore")
def survey_rows(blocks: F32, amax: F32, request: Request, candidates: tuple[float, ...]) -> list[tuple[Total, ...]]:
    """The same for each row with an amax of its own."""
    searched = np.isfinite(amax) & (amax > 0)
    found = iter(_surveyed(blocks[searched], amax[searched], request, candidates, EVERY) if searched.any() else ())
    return [next(found) if there else _of_none(candidates) for there in searched]


def _of_none(candidates: tuple[float, ...]) -> tuple[Total, ...]:
    """Of blocks that are not searched."""
    return tuple(0 if h == candidates[0] else None for h in candidates)


def _surveyed(
    blocks: F32, amax: F32, request: Request, candidates: tuple[float, ...], sample: Sample
) -> list[tuple[Total, ...]]:
    """Totals by amax: of one for all blocks, or of one per row."""
    own = exponents(candidate(amax, 1.0, request).multiplier)
    return list(zip(*(_totals(blocks, amax, h, own, request, sample) for h in candidates), strict=True))


def _totals(blocks: F32, amax: F32, headroom: float, own: I32, request: Request, sample: Sample) -> list[Total]:
    rule = request.rule
    found = candidate(amax, headroom, request)
    taken = found.usable | (headroom == 1)
    if not isinstance(rule, NVFP4Rule) or not taken.any():
        return [None] * amax.size
    t = found.t
    shaped = TensorScale(t.amax.reshape(-1, 1, 1), t.factor.reshape(-1, 1, 1), t.largest, t.top, t.statistics)
    k = exponents(np.where(found.usable, found.multiplier, np.float32(1)))
    grid = ScaleGrid(first_scale_byte(rule), E4M3, found.multiplier.reshape(-1, 1, 1), k.reshape(-1, 1, 1))
    error = least_errors(blocks, grid, _encoder(blocks, shaped, rule, request), request.format.element, request.method)
    errors = error.reshape(amax.size, -1)[:, sample.first :: sample.step]
    shifts = (k - own).tolist()
    rows = zip(errors, shifts, taken, strict=True)
    return [steps_of(row, shift) if there else None for row, shift, there in rows]


def _encoder(blocks: F32, t: TensorScale, rule: NVFP4Rule, request: Request) -> Encode:
    def encode_with(byte: U8) -> U8:
        y = rule.element(blocks, decode(byte, E4M3), t)
        return round_elements(blocks, y, request.format.element, rule.rounding)[0]

    return encode_with
