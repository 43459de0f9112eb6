"""Our algorithm, in three steps that take rows a chunk at a time: survey them, choose the global scale, write them.

1. If the blocks fit one window, keep them (m = k_max - 8). The exponents of the chunks are enough to know.
2. Otherwise survey all rows. If a global scale 2^m or 3·2^m leaves every half exact, take it; only halves outside its
   window get other codes.
3. Otherwise try every m that can be best, each half outside the window costing what its best scale and codes cost. Then
   global scales that are no power of two: algorithm 1's, those that put the largest value on E4M3's upper end, and a
   grid, on a sample of the halves first. A search of the whole range (bound.py) proves how good the result is.

The choice depends on the survey and the contract alone, so it is the same for any order and size of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from halfbyte.casting.bound import Bounded, prove
from halfbyte.casting.lossless import find_lossless
from halfbyte.casting.rows import Rows, by_exponent
from halfbyte.casting.scales import NVFP4, GlobalScale, hold, power, scale_of
from halfbyte.casting.survey import Halves, Survey
from halfbyte.casting.tables import Table, best_scales, largest_value, least_error, make_table, total_error
from halfbyte.casting.verbatim import keep
from halfbyte.casting.window import HIGHEST, LOWEST, NO_BLOCKS, Exponents
from halfbyte.codec.bits import BFLOAT16, U8
from halfbyte.contracts import Contract
from halfbyte.errors import UnsupportedError
from halfbyte.formats import E2M1, E4M3
from halfbyte.quantize import quantize

SAMPLE = 8192
"""How many halves a quick look takes, spread over the exponents; all halves of rare exponents."""

FINALISTS = 4
"""How many of the sampled global scales are measured on all halves."""

CLEARLY = 1 - 1e-12
"""Another global scale has to be better by more than the rounding of sums, so that every machine takes the same."""

LARGEST = E2M1.max * E4M3.max


@dataclass(frozen=True)
class Choice:
    """The global scale that some rows share."""

    scale: GlobalScale
    keeps: bool
    """Whether every block fits its window: codes stay as they are, and no half has to be looked at."""
    bound: float
    """No choice of global scale, block scales and codes has a smaller squared error; 0 where this one is lossless."""


@dataclass(frozen=True)
class Written:
    """Rows under the chosen scale."""

    codes: U8
    scales: U8
    changed: int
    """MXFP4 blocks of which some value changed."""


def choose(
    exponents: Exponents | None, survey: Callable[[], Survey], contract: Contract, quantizer: Contract
) -> Choice:
    """The global scale of all rows whose exponents and survey are given. The survey is asked for only if they differ
    by more than the window.

    contract: how the result stores its scale and decodes. quantizer: the contract whose scale algorithm 1 would take.
    """
    placed = exponents or NO_BLOCKS
    if placed.fit:
        return Choice(power(placed.m, contract), True, 0.0)
    found = survey()
    lossless = choose_lossless(found, contract)
    if lossless is not None:
        return Choice(lossless, False, 0.0)
    best = choose_lossy(found, contract, quantizer)
    return Choice(best.scale, False, best.bound)


def choose_lossless(survey: Survey, contract: Contract) -> GlobalScale | None:
    """The global scale under which every value is kept, if there is one that the contract can store."""
    found = find_lossless(survey)
    if found is None:
        return None
    scale = hold(np.ldexp(float(found.odd), found.m), contract)
    return scale if total_error(survey, scale, _kept(scale)) == 0 else None


def choose_lossy(survey: Survey, contract: Contract, quantizer: Contract) -> Bounded:
    """The best global scale found where none keeps every value, and how much better one could be."""
    best, error = best_power(survey, contract)
    requantized = requantized_scale(survey, contract, quantizer)
    candidates = [] if requantized is None else [requantized]
    for scale in [*candidates, *sampled_candidates(survey, contract)]:
        tried = total_error(survey, scale, _kept(scale))
        if tried < error * CLEARLY:
            best, error = scale, tried
    if best.exponent is None:
        best, error = _polished(survey, contract, best, error)
    return prove(survey, best, error, contract)


def write(rows: Rows, choice: Choice, backend: str = "auto", threads: int | None = None) -> Written:
    """Codes and scales of some rows: blocks inside the window of 2^m kept, every other half at its best."""
    scale, m = choice.scale, choice.scale.exponent
    base = int(np.floor(np.log2(float(scale.multiplier)))) if m is None else m
    codes, scales = keep(rows, base, backend=backend, threads=threads)
    if choice.keeps:
        return Written(codes, scales, 0)
    tables = TablesByExponent(scale)
    changed = 0
    for start, stop, part in rows.slices():
        where = part.nonzero_half if m is None else part.outside(m)
        exponents, counts = part.half_exponents[where], part.counts[where]
        byte, new = np.empty(len(counts), np.uint8), np.empty((len(counts), 8), np.uint8)
        wrong = np.zeros(len(counts), np.bool_)
        for k, here in by_exponent(exponents):
            table = tables[k]
            found = counts[here]
            columns = best_scales(found, table)
            byte[here] = columns + table.first
            new[here] = table.codes[columns]
            wrong[here] = ((found > 0) & (table.errors.T[columns] > 0)).any(axis=1)
        scales[start:stop][where] = byte
        part.recode(codes[start:stop], where, new)
        halves = np.zeros(where.shape, np.bool_)
        halves[where] = wrong
        changed += part.count_blocks(halves)
    return Written(codes, scales, changed)


class TablesByExponent(dict[int, Table]):
    """The table of each exponent under one global scale, made when it is first asked for."""

    def __init__(self, scale: GlobalScale) -> None:
        self._scale, self._decoded = scale, scale.decoded()

    def __missing__(self, k: int) -> Table:
        return self.setdefault(k, make_table(k, self._scale, self._decoded))


def _polished(survey: Survey, contract: Contract, scale: GlobalScale, error: float) -> tuple[GlobalScale, float]:
    """The best of a few neighbours in float32: values that round to the same decode leave room for the others."""
    bits = int(scale.multiplier.view(np.uint32))
    for step in (-64, -16, -4, -2, -1, 1, 2, 4, 16, 64):
        neighbour = hold(np.uint32(bits + step).view(np.float32), contract)
        tried = total_error(survey, neighbour)
        if tried < error * CLEARLY:
            scale, error = neighbour, tried
    return scale, error


def _kept(scale: GlobalScale) -> tuple[int, int] | None:
    """The exponents that a power of two keeps as they are."""
    m = scale.exponent
    return None if m is None else (m + LOWEST, m + HIGHEST)


def best_power(survey: Survey, contract: Contract) -> tuple[GlobalScale, float]:
    """The best 2^m, found among those that can be best: from k_max - 8 down, until clipping alone costs more.

    A larger m than k_max - 8 only loses small scales (docs/cast.md), so no power of two is better than this one.
    """
    largest = largest_value(survey)
    best: tuple[GlobalScale, float] | None = None
    for m in range((survey.exponents or NO_BLOCKS).m, -150, -1):
        clipped = largest - LARGEST * 2.0**m
        if best is not None and clipped > 0 and clipped**2 > best[1]:
            break
        try:
            scale = power(m, contract)
        except UnsupportedError:
            if best is None:
                raise
            break
        error = total_error(survey, scale, _kept(scale))
        if best is None or error < best[1] * CLEARLY:
            best = scale, error
    if best is None:
        raise UnsupportedError(f"contract {contract.name} holds no power of two that fits this tensor")
    return best


def requantized_scale(survey: Survey, contract: Contract, quantizer: Contract) -> GlobalScale | None:
    """Algorithm 1's global scale: what the quantizer's contract takes for the decoded bfloat16; None if not usable."""
    largest = largest_value(survey)
    if not np.isfinite(largest):
        return None
    probe = quantize(np.zeros((1, NVFP4.block), BFLOAT16), NVFP4, quantizer, global_amax=largest, backend="reference")
    try:
        scale = scale_of(probe, contract)
    except UnsupportedError:
        return None  # the contract cannot store it
    return scale if np.isfinite(scale.multiplier) and scale.multiplier > 0 else None


def sampled_candidates(survey: Survey, contract: Contract) -> list[GlobalScale]:
    """Global scales that are no power of two and look best on a sample of the halves, the best first."""
    sample = _sample(survey)
    largest = largest_value(survey)
    if not np.isfinite(largest):
        return []
    # The largest value as a product of E2M1's 6 or 4 and one of the upper E4M3 scales: it is then decoded exactly.
    upper = E4M3.magnitudes[E4M3.magnitudes >= 128].astype(np.float64)
    multipliers = [largest / (element * scale) for element in (6.0, 4.0) for scale in upper]
    multipliers += (largest / LARGEST * 2.0 ** (np.arange(-16, 40) / 16)).tolist()
    tried = _rated(multipliers, sample, contract)
    if not tried:
        return []
    for step in (1 / 32, 1 / 128):
        around = [float(tried[0][1].multiplier) * 2.0 ** (step * i / 4) for i in range(-4, 5)]
        tried = sorted(tried + _rated(around, sample, contract), key=_rating)
    return [scale for _, scale in tried[:FINALISTS]]


def _rating(entry: tuple[float, GlobalScale]) -> tuple[float, float]:
    return entry[0], float(entry[1].multiplier)


def _rated(
    multipliers: Iterable[float], sample: dict[int, Halves], contract: Contract
) -> list[tuple[float, GlobalScale]]:
    rated = []
    for value in multipliers:
        try:
            scale = hold(value, contract)
        except UnsupportedError:
            continue
        decoded = scale.decoded()
        error = sum(least_error(halves, make_table(k, scale, decoded).errors) for k, halves in sample.items())
        rated.append((error, scale))
    return sorted(rated, key=_rating)


def _sample(survey: Survey) -> dict[int, Halves]:
    """Some halves of each exponent, at equal distances in the order of their multisets."""
    share = SAMPLE // len(survey.halves)
    sample = {}
    for k, halves in survey.halves.items():
        if len(halves.number) <= share:
            sample[k] = halves
            continue
        behind = np.cumsum(halves.number)
        total = int(behind[-1])
        places = (2 * np.arange(share, dtype=np.int64) + 1) * total // (2 * share)
        picked, times = np.unique(np.searchsorted(behind, places, side="right"), return_counts=True)
        sample[k] = Halves(halves.ranks[picked], times * np.float64(total / share))
    return sample
