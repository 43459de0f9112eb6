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
from halfbyte.codec.bits import F32, U8
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
    parts = [row[None] for row in blocks] if by_row else [blocks]
    looked = probe(request, size)
    if looked is not None:
        step, sample = (looked.step, EVERY) if by_row else (1, Sample(0, looked.step))
        rows = zip(parts[::step], flat[::step], strict=True)
        found = [survey(part, own, request, looked.candidates, sample) for part, own in rows]
        if looked.finds(of_rows(found, len(looked.candidates))):
            candidates = looked.candidates
    totals = [survey(part, own, request, candidates) for part, own in zip(parts, flat, strict=True)]
    chosen = [best(candidates, total) for total in totals]
    return np.concatenate([widened(own, h).reshape(1) for own, h in zip(flat, chosen, strict=True)])


@np.errstate(all="ignore")
def survey(
    blocks: F32, amax: np.float32, request: Request, candidates: tuple[float, ...], sample: Sample = EVERY
) -> tuple[Total, ...]:
    """T_h of blocks that share an amax, for each candidate; None for a headroom that is left out.

    The blocks may be a part of a tensor: the sums of all parts are added. sample: those that count.
    """
    if not np.isfinite(amax) or amax <= 0:
        return tuple(0 if h == candidates[0] else None for h in candidates)
    if sample.step > 1 and isinstance(request.method, Optimal) and request.method.weights is None:
        blocks, sample = blocks.reshape(1, -1, blocks.shape[2])[:, sample.first :: sample.step], EVERY
    own = int(exponents(candidate(np.asarray(amax).reshape(1), 1.0, request).multiplier)[0])
    return tuple(_total(blocks, amax, h, own, request, sample) for h in candidates)


def _total(blocks: F32, amax: np.float32, headroom: float, own: int, request: Request, sample: Sample) -> Total:
    rule = request.rule
    found = candidate(np.asarray(amax).reshape(1), headroom, request)
    if not isinstance(rule, NVFP4Rule) or not (found.usable[0] or headroom == 1):
        return None
    t = found.t
    shaped = TensorScale(t.amax.reshape(-1, 1, 1), t.factor.reshape(-1, 1, 1), t.largest, t.top, t.statistics)
    g = found.multiplier.reshape(1, 1, 1)
    k = int(exponents(found.multiplier)[0]) if found.usable[0] else 0
    grid = ScaleGrid(first_scale_byte(rule), E4M3, g, np.full((1, 1, 1), k, np.int32))
    error = least_errors(blocks, grid, _encoder(blocks, shaped, rule, request), request.format.element, request.method)
    return steps_of(error.reshape(-1)[sample.first :: sample.step], k - own)


def _encoder(blocks: F32, t: TensorScale, rule: NVFP4Rule, request: Request) -> Encode:
    def encode_with(byte: U8) -> U8:
        y = rule.element(blocks, decode(byte, E4M3), t)
        return round_elements(blocks, y, request.format.element, rule.rounding)[0]

    return encode_with
