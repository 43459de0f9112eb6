"""The errors of a part of a tensor under several headrooms, for callers that see a tensor or group in parts.

`headrooms` gives the candidates, `survey_part` the sums of each part, `merged` adds them, and `best` chooses
(backends/headroom.py). Between 1 and 2, `Between` stops early. `quantize` then gets the raised amax as `global_amax`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.headroom import edge_of, ends_listed, survey
from halfbyte.backends.headroom import (
    ALONE,
    DEFAULT,
    EVERY,
    Sample,
    Total,
    Trial,
    best,
    headrooms,
    merged,
    probe,
    widened,
)
from halfbyte.errors import UnsupportedError
from halfbyte.request import Request


def survey_part(
    x: npt.NDArray[Any], request: Request, amax: np.float32, trial: Trial, before: int = 0
) -> tuple[Total, ...]:
    """T_h of each candidate over a (rows, K) matrix, up to a number that all candidates share.

    amax: the largest magnitude of all that share the scale. before: rows of the tensor before these. By the compiled
    search if it is installed.
    """
    whole = _whole(x, request)
    columns = whole.shape[1] // request.format.block
    sample = EVERY if trial.step == 1 else Sample(0, trial.step).behind(before * columns)
    return survey(whole, np.array([amax], np.float32), request, trial.candidates, sample=sample)[0]


def raised_together(
    parts: Sequence[npt.NDArray[Any]], amax: np.float32, request_of: Callable[[np.dtype[Any]], Request]
) -> np.float32:
    """The amax of matrices that share it, raised by the headroom that costs least over all of them.

    request_of: what is asked for of matrices of a dtype; its method chooses.
    """
    first, size = request_of(parts[0].dtype), sum(x.size for x in parts)
    candidates = headrooms(first, size)
    if candidates == ALONE or not np.isfinite(amax) or amax == 0:
        return amax

    def totals(trial: Trial) -> tuple[Total, ...]:
        return merged(survey_part(x, request_of(x.dtype), amax, trial) for x in parts)

    looked = probe(first, size)
    if looked is not None and looked.finds(totals(looked)):
        candidates = looked.candidates
    chosen = None
    if candidates == DEFAULT:
        between = Between(first, amax)
        for x in parts:
            between.add(x, request_of(x.dtype))
        chosen = between.headroom()
    return np.float32(widened(amax, best(candidates, totals(Trial(candidates))) if chosen is None else chosen))


def _whole(x: npt.NDArray[Any], request: Request) -> npt.NDArray[Any]:
    """A contiguous matrix of whole blocks."""
    transform = request.contract.transform
    if transform.hadamard or transform.columnwise:
        raise UnsupportedError(f"{request.contract} transforms its operand: a part of it cannot be surveyed")
    below = -x.shape[1] % request.format.block
    return np.require(np.pad(x, ((0, 0), (0, below))) if below else x, requirements=["C", "A"])


class Between:
    """The choice between the headrooms 1 and 2 for parts that are seen once (backends/headroom.py: why it may stop).

    All blocks at the bottom are counted at once. Those at the top are kept, as many as HELD, and counted at the end,
    until 2 is ahead.
    """

    HELD = 1 << 14

    def __init__(self, request: Request, amax: np.float32) -> None:
        self._amax, self._edge = amax, edge_of(request, amax)
        self._parts: list[tuple[Total, ...]] = [(0, 0)]
        self._top: list[tuple[npt.NDArray[Any], Request]] = []
        self._held, self._whole = 0, self._edge is not None

    def add(self, x: npt.NDArray[Any], request: Request) -> None:
        """A part of the tensor. request: with the dtype of this part."""
        edge = self._edge
        if edge is None or edge != edge_of(request, self._amax):  # contracts whose scale depends on the dtype
            self._edge, self._whole = None, False
            return
        blocks = _whole(x, request).reshape(-1, request.format.block)
        at_bottom = ends_listed(blocks, request, float(edge.bottom), np.inf, blocks.shape[0])
        self._count(blocks[at_bottom], request)
        room = self.HELD - self._held
        at_top = ends_listed(blocks, request, 0.0, float(edge.top), room + 1)
        self._whole = self._whole and at_top.size <= room
        self._held += min(room, at_top.size)
        self._top.append((blocks[at_top[:room]], request))

    def headroom(self) -> float | None:
        """1 or 2; None if that takes a search of all parts."""
        for blocks, request in self._top:
            start, step = 0, 16
            while self._edge is not None and start < len(blocks):
                self._count(blocks[start : start + step], request)
                one, two = merged(self._parts)
                if one is not None and two is not None and two < one:
                    return 2.0
                start, step = start + step, 2 * step
        one, two = merged(self._parts)
        if one is None or two is None or not self._whole:
            return None
        return 2.0 if two < one else 1.0

    def _count(self, blocks: npt.NDArray[Any], request: Request) -> None:
        if len(blocks):
            found = survey(np.ascontiguousarray(blocks), np.array([self._amax]), request, DEFAULT)
            self._parts = [merged([*self._parts, found[0]])]
