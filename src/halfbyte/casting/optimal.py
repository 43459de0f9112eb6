"""Our algorithm: lossless if anything is; else the best scale and codes of every half, and the global scale chosen
knowing them.

1. Scales alone, then nibbles: if the blocks fit one window, keep them (m = k_max - 8).
2. If a global scale 2^m or 3·2^m leaves every half exact, take it; only halves outside its window get other codes.
3. Otherwise every m that can be best is tried, each half outside the window costing what its best scale and codes cost.
   Then global scales that are no power of two: algorithm 1's, those that put the largest value on E4M3's upper end, and
   a grid, on a sample of the halves first. A search of the whole range (bound.py) proves how good the result is.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from halfbyte.casting.bound import Bounded, prove
from halfbyte.casting.hybrid import outside, recode
from halfbyte.casting.lossless import find_lossless
from halfbyte.casting.rows import Group, Piece
from halfbyte.casting.scales import GlobalScale, hold, power
from halfbyte.casting.tables import best_scales, largest_value, least_errors, make_table, total_error
from halfbyte.casting.verbatim import keep
from halfbyte.casting.window import HIGHEST, LOWEST
from halfbyte.codec.bits import U8
from halfbyte.contracts import Contract
from halfbyte.errors import UnsupportedError
from halfbyte.formats import E2M1, E4M3

SAMPLE = 8192
"""How many halves a quick look takes, spread over the exponents; all halves of rare exponents."""

FINALISTS = 4
"""How many of the sampled global scales are measured on all halves."""

CLEARLY = 1 - 1e-12
"""Another global scale has to be better by more than the rounding of sums, so that every machine takes the same."""

LARGEST = E2M1.max * E4M3.max


def choose_lossless(group: Group, contract: Contract) -> GlobalScale | None:
    """The global scale under which every value is kept, if there is one."""
    found = find_lossless(group)
    return None if found is None else hold(np.ldexp(float(found.odd), found.m), contract)


def choose(group: Group, contract: Contract, others: Iterable[float] = ()) -> Bounded:
    """The best global scale found for a group that no scale leaves as it is, and how much better one could be.

    `others`: multipliers to try as well (algorithm 1's).
    """
    best, error = best_power(group, contract)
    candidates = [hold(value, contract) for value in others]
    candidates += sampled_candidates(group, contract)
    for scale in candidates:
        tried = total_error(group, scale, _kept(scale))
        if tried < error * CLEARLY:
            best, error = scale, tried
    if best.exponent is None:
        best, error = _polished(group, contract, best, error)
    return prove(group, best, error, contract)


def _polished(group: Group, contract: Contract, scale: GlobalScale, error: float) -> tuple[GlobalScale, float]:
    """The best of a few neighbours in float32: values that round to the same decode leave room for the others."""
    bits = int(scale.multiplier.view(np.uint32))
    for step in (-64, -16, -4, -2, -1, 1, 2, 4, 16, 64):
        neighbour = hold(np.uint32(bits + step).view(np.float32), contract)
        tried = total_error(group, neighbour)
        if tried < error * CLEARLY:
            scale, error = neighbour, tried
    return scale, error


def write(piece: Piece, scale: GlobalScale) -> tuple[U8, U8]:
    """Codes and scales of a piece: blocks inside the window of 2^m kept, every other half at its best."""
    m = scale.exponent
    if m is not None:
        codes, scales = keep(piece, m)
        where = outside(piece, m)
    else:
        codes, scales = keep(piece, int(np.floor(np.log2(float(scale.multiplier)))))
        where = piece.nonzero_half
    if not where.any():
        return codes, scales
    exponents, counts = piece.half_exponents[where], piece.counts[where]
    byte, new = np.empty(len(counts), np.uint8), np.empty((len(counts), 8), np.uint8)
    decoded = scale.decoded()
    for k in np.unique(exponents):
        here = exponents == k
        table = make_table(int(k), scale, decoded)
        columns = best_scales(counts[here], table)
        byte[here] = columns + table.first
        new[here] = table.codes[columns]
    scales[where] = byte
    return recode(piece, codes, where, new), scales


def _kept(scale: GlobalScale) -> tuple[int, int] | None:
    """The exponents that a power of two keeps as they are."""
    m = scale.exponent
    return None if m is None else (m + LOWEST, m + HIGHEST)


def best_power(group: Group, contract: Contract) -> tuple[GlobalScale, float]:
    """The best 2^m, found among those that can be best: from k_max - 8 down, until clipping alone costs more.

    A larger m than k_max - 8 only loses small scales (docs/cast.md), so no power of two is better than this one.
    """
    largest = largest_value(group)
    best: tuple[GlobalScale, float] | None = None
    for m in range(group.closed_form, -150, -1):
        clipped = largest - LARGEST * 2.0**m
        if best is not None and clipped > 0 and clipped**2 > best[1]:
            break
        try:
            scale = power(m, contract)
        except UnsupportedError:
            if best is None:
                raise
            break
        error = total_error(group, scale, _kept(scale))
        if best is None or error < best[1] * CLEARLY:
            best = scale, error
    if best is None:
        raise UnsupportedError(f"contract {contract.name} holds no power of two that fits this tensor")
    return best


def sampled_candidates(group: Group, contract: Contract) -> list[GlobalScale]:
    """Global scales that are no power of two and look best on a sample of the halves, the best first."""
    sample = _sample(group)
    largest = largest_value(group)
    if not np.isfinite(largest):
        return []
    # The largest value as a product of E2M1's 6 or 4 and one of the upper E4M3 scales: it is then decoded exactly.
    upper = E4M3.magnitudes[E4M3.magnitudes >= 128].astype(np.float64)
    multipliers = [largest / (element * scale) for element in (6.0, 4.0) for scale in upper]
    multipliers += (largest / LARGEST * 2.0 ** (np.arange(-16, 40) / 16)).tolist()
    tried = _rated(multipliers, sample, contract)
    for step in (1 / 32, 1 / 128):
        around = [float(tried[0][1].multiplier) * 2.0 ** (step * i / 4) for i in range(-4, 5)]
        tried = sorted(tried + _rated(around, sample, contract), key=_rating)
    return [scale for _, scale in tried[:FINALISTS]]


def _rating(entry: tuple[float, GlobalScale]) -> tuple[float, float]:
    return entry[0], float(entry[1].multiplier)


def _rated(
    multipliers: Iterable[float], sample: dict[int, tuple[U8, float]], contract: Contract
) -> list[tuple[float, GlobalScale]]:
    rated = []
    for value in multipliers:
        try:
            scale = hold(value, contract)
        except UnsupportedError:
            continue
        decoded = scale.decoded()
        error = sum(
            weight * float(least_errors(counts, make_table(k, scale, decoded)).sum())
            for k, (counts, weight) in sample.items()
        )
        rated.append((error, scale))
    return sorted(rated, key=_rating)


def _sample(group: Group) -> dict[int, tuple[U8, float]]:
    """{k: (some of its halves, how many each stands for)}."""
    share = max(SAMPLE // max(len(group.by_exponent), 1), 1)
    sample = {}
    for k, counts in group.by_exponent.items():
        step = -(-len(counts) // share)
        part = counts[::step]
        sample[k] = (part, len(counts) / len(part))
    return sample
