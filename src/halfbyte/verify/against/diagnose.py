"""Why a weight is wrong: known mistakes are undone one at a time, and the one that restores the values is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np

from halfbyte.codec.bits import F32
from halfbyte.models.names import pattern_of
from halfbyte.models.partners import partners
from halfbyte.verify.values import Matrix

ROWS = 64
SOUGHT = 8
"""Rows that are looked for in other layers."""
CANDIDATES = 512
"""Other layers and experts that are looked at."""
RESTORED = 0.25
"""A mistake is named when undoing it brings the relative error below this, and to less than half."""


def diagnose(mine: Matrix, source: Matrix, theirs: Mapping[str, Matrix]) -> str:
    """What the weight would be right with, or "" if nothing known explains it. Looks at the first rows only."""
    with np.errstate(all="ignore"):  # values may be anything here
        return _diagnose(mine, source, theirs)


def _diagnose(mine: Matrix, source: Matrix, theirs: Mapping[str, Matrix]) -> str:
    rows = min(ROWS, mine.shape[0])
    values, wanted = mine.read(0, rows), source.read(0, rows)
    if np.isnan(values).any():
        return "it decodes to NaN"
    for partner in partners(mine.name):
        other = theirs.get(partner)
        if other is not None and other.shape == mine.shape and _distance(values, other.read(0, rows)) < RESTORED:
            return f"it holds the values of {partner.rpartition('.')[2]}: the two are swapped"
    before = _distance(values, wanted)
    if before < RESTORED:
        return ""  # what is wrong lies further down
    enough = min(RESTORED, before / 2)
    for reason, candidate in _undone(values):
        if _distance(candidate, wanted) < enough:
            return reason
        factor, after = _factor(candidate, wanted)
        if after < enough:
            extra = "" if reason == "as stored" else f", and {reason}"
            return f"it is right when divided by {1 / factor:.6g}: a tensor scale is wrong (reciprocal?){extra}"
    found = _elsewhere(mine, values[:SOUGHT], theirs)
    return "" if found is None else f"it holds the values of {found}"


def _elsewhere(mine: Matrix, values: F32, theirs: Mapping[str, Matrix]) -> str | None:
    """The same module of another layer or expert whose first rows these are."""
    pattern = pattern_of(mine.name)
    alike = (name for name, other in theirs.items() if other.shape == mine.shape and pattern_of(name) == pattern)
    for name in islice(alike, CANDIDATES):
        if name != mine.name and _distance(values, theirs[name].read(0, len(values))) < RESTORED:
            return name
    return None


def _undone(values: F32) -> Iterator[tuple[str, F32]]:
    yield "as stored", values
    pairs = values.reshape(values.shape[0], -1, 2)
    yield "the two nibbles of each byte are swapped", pairs[:, :, ::-1].reshape(values.shape)


def _distance(values: F32, wanted: F32) -> float:
    norm = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(values - wanted)) / norm if norm else np.inf


def _factor(values: F32, wanted: F32) -> tuple[float, float]:
    """The number, not below 0, that brings the values nearest to the wanted ones, and the distance that is left."""
    scale = float(np.abs(values).max(initial=0.0))
    if scale == 0 or not np.isfinite(scale):
        return 0.0, np.inf
    unit = (values / np.float32(scale)).astype(np.float64)
    power = float((unit * unit).sum())
    factor = max(0.0, float((unit * wanted).sum()) / power / scale)
    return factor, _distance((unit * (factor * scale)).astype(np.float32), wanted)
