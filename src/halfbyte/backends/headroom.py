"""By how much an exact search may raise the tensor scale of NVFP4: what all backends agree on. No backend is used here.

NVFP4's tensor scale is g = amax/(6·448), so the block scale of the largest block is at most 448·g, which just reaches
its amax. A larger scale can be better for it. Under a headroom h, the contract gets h·amax for the amax, and the search
is repeated. For each candidate h the errors of all blocks are added, and the least sum wins.

    amax_h = float32(h·amax)                       in place of the amax, as if the caller had given it
    E_h(b)                                         the least objective of block b (reference/search.py), unit 4**k_h
    n_h(b) = floor(E_h(b) · 4**(k_h − k_1) · 2**16)     k_h = floor(log2 g_h); 0 for blocks that are not searched
    T_h    = Σ n_h(b), an exact integer

Integers are added without rounding, so neither chunks nor threads nor the order of blocks change the choice. Tensors
that share a scale add their T_h. Of equal sums the smallest h wins.

For h = 2 most blocks need no search. If g_2 = 2·g_1 exactly, both grids of scales are the same but for two ends, so
E_2·4 = E_1, except where

- some scale in (448·g, 896·g] is tried: the block's amax exceeds 7·240·g (`Ends.top`; below it the search leaves
  these scales out, because 7 times their half reaches the amax);
- some odd multiple of 2**-9·g below 2**-5·g, which 2·g has not, could win: not if the block's amax exceeds 1.5·g
  (`Ends.bottom`). Take s ≤ 15·2**-9·g and the smallest common scale s* ≥ amax/6, so s* ≥ 8·s. Under s the largest
  element alone costs (amax − 6·s)² ≥ (16/3 − 3/4)²·s*² > 21·s*². Under s* it costs at most (2/3·s*)². Any other
  element x costs at most s*²/16 more under s* than under s: up to 6·s ≤ 3/4·s*, s* costs at most (s*/4)²; beyond
  that, x − 6·s exceeds its distance to the grid of s* wherever this distance exceeds s*/4. So 31 other elements lose
  at most 2·s*². Roundings of float32 are far smaller than the difference. With weights there is no such bound, and
  every block is searched under both.

`Ends` says which blocks to search for one pair of multipliers; None: all of them.

A block above `Ends.bottom` never costs more under 2 than under 1: every scale that can win under 1 is tried under 2 as
well, with the same float32 error. A block at the bottom has n_2 − n_1 <= `MOST_LOST`, because it only costs more if an
odd multiple t of 2**-9·g wins under 1. Let M < 48·t be its amax (above) and s the smallest scale of 2 from M/6 on.
Clipping alone costs (M − 6·t)² under t. If s is tried, no element costs more than s² under it, and s <= 9/8·M/6, or
s <= M/6 + 2**-8·g below 2**-4·g. The difference is at most 47·t² for 16 elements, and 828·t² for 32; t <= 15/512·g.
If s is not tried, then s = 2**-7·g and half of it is tried, which costs less, and at most 13²·2**-16·g² an element
where codes wrap. Together: less than 0.042·g² for 16 elements, 0.72·g² for 32, and g² < 4·4**k_1. So to decide between
1 and 2 alone, a backend may add up the ends of one part after the other, and stop as soon as T_2 is smaller than T_1
by more than `MOST_LOST` for all blocks that are left; within a part, the bottom comes first.

The headroom of the contract's 4over6 (448/256) needs a search of every block under it and under 1. Small tensors get
that. Larger ones, or groups that share a scale, are probed first: T_h over a sample of their blocks, for every
headroom, and only if 448/256 is clearly better there is it a candidate for the whole.

    sample    every `step`-th block of each tensor, from its first on, row by row; with one scale per row, all blocks of
              every `step`-th row; step = floor(elements / 2**14), or one more if that is even
    probed    16·T_{448/256} < 15·min(T_1, T_2) over the sample; not if one of them is left out. With one scale per row,
              the sums of its rows are added, but for rows in which a headroom is left out
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from halfbyte.codec.bits import F32, I32
from halfbyte.contracts.arithmetic import stored_scale, tensor_scale
from halfbyte.contracts.spec import NVFP4Rule, TensorScale
from halfbyte.methods import FourSix, Hessian, Optimal
from halfbyte.request import Request

ALONE = (1.0,)
DEFAULT = (1.0, 2.0)
SMALL = 1 << 16
"""Elements of a tensor, or of all tensors that share a scale: up to so many, every headroom of 4over6 is tried too."""
SAMPLED = 1 << 14
"""Elements of a sample, or a few less: 1024 blocks."""
CLEARLY = 15, 16
"""A probed headroom is a candidate if it costs less than 15/16 of the best of the others."""
FRACTION_BITS = 16
"""An error counts in steps of 2**-16 of its unit."""
MOST_LOST = {16: 1 << 14, 32: 1 << 18}
"""By how many of these steps a block of so many elements can cost more under 2 than under 1."""
ORDINARY = (2.0**-60, 2.0**59)
"""Amaxes for which doubling changes nothing but exponents, in every formula that the kernels have."""

Total = int | None
"""T_h of a candidate, up to a number that all candidates share, which changes no comparison; None: it is left out."""


def chooser(request: Request) -> Request:
    """The request whose search chooses the headroom for a request: its own, but for Hessian that of Optimal."""
    method, rule = request.method, request.rule
    if not isinstance(method, Hessian) or (isinstance(rule, NVFP4Rule) and rule.scale_search is not None):
        return request
    return by_squared_error(request, method.headroom)


def by_squared_error(request: Request, headroom: float | tuple[float, ...] | None) -> Request:
    """The request of Optimal in place of another exact search, which has the same tensor scales.

    It is kept, because backends keep what they know of a request and of a method by their identity.
    """
    own = id(request.format), id(request.contract)  # the kept request holds these, so that their identities stay theirs
    key = (*own, headroom, request.tile, request.scaling, request.dtype, request.threads, request.device)
    found = _CHOOSERS.get(key)
    if found is None:
        if len(_CHOOSERS) >= MOST_CHOOSERS:
            _CHOOSERS.clear()
        found = _CHOOSERS[key] = replace(request, method=Optimal(headroom=headroom))
    return found


_CHOOSERS: dict[tuple[object, ...], Request] = {}
MOST_CHOOSERS = 64


def headrooms(request: Request, size: int) -> tuple[float, ...]:
    """The candidates for a tensor, or a group that shares its scale, of `size` elements; (1,) if nothing is chosen.

    An amax that the caller gives has a headroom of 1: do not ask then.
    """
    rule, method = request.rule, request.method
    if not isinstance(rule, NVFP4Rule) or not isinstance(method, Optimal):
        return ALONE
    if rule.stored is None or rule.constant_factor is not None or rule.scale_search is not None:
        return ALONE
    if method.headroom is not None:
        return method.headroom if isinstance(method.headroom, tuple) else (float(method.headroom),)
    if size > SMALL:
        return DEFAULT
    return tuple(sorted({*DEFAULT, *four_six_headrooms(rule)}))


@dataclass(frozen=True)
class Trial:
    """Headrooms that are tried on every block, or on a sample."""

    candidates: tuple[float, ...]
    step: int = 1
    """Blocks (or rows) with a number that is a multiple of this are in the sample."""

    def finds(self, totals: tuple[Total, ...]) -> bool:
        """Whether a headroom besides 1 and 2 costs clearly less. `totals`: of a sample, for each candidate."""
        pairs = list(zip(self.candidates, totals, strict=True))
        usual = [total for headroom, total in pairs if headroom in DEFAULT and total is not None]
        others = [total for headroom, total in pairs if headroom not in DEFAULT and total is not None]
        return len(usual + others) == len(pairs) and CLEARLY[1] * min(others) < CLEARLY[0] * min(usual)


def probe(request: Request, size: int) -> Trial | None:
    """The trial that decides whether further headrooms are candidates for so many elements that share a scale.

    None: `headrooms` are all.
    """
    method = request.method
    if size <= SMALL or not isinstance(method, Optimal) or method.headroom is not None:
        return None
    every = headrooms(request, 0)
    return None if every == headrooms(request, size) else Trial(every, size // SAMPLED | 1)


@dataclass(frozen=True)
class Sample:
    """Some blocks of a matrix, numbered row by row: `first`, and every `step`-th one after it."""

    first: int = 0
    step: int = 1

    def behind(self, blocks: int) -> Sample:
        """The same sample as a part of the tensor sees it that begins after so many blocks."""
        return Sample((self.first - blocks) % self.step, self.step)


EVERY = Sample()


def four_six_headrooms(rule: NVFP4Rule) -> set[float]:
    """The headrooms that the contract's own 4over6 leaves: 448/256 for an e4m3_max of 256."""
    maxes: set[int] = set() if rule.four_six is None else set(rule.four_six.e4m3_maxes)
    searches = rule.search_rule.searches if rule.search_rule is not None else rule.searches
    maxes |= {method.e4m3_max for method in searches if isinstance(method, FourSix)}
    return {rule.e4m3_max / e4m3_max for e4m3_max in maxes if e4m3_max < rule.e4m3_max}


def widened(amax: F32 | np.float32, headroom: float | npt.NDArray[np.float64]) -> F32:
    """float32(h·amax): the amax that the contract is given. NaN, Inf and 0 stay what they are."""
    with np.errstate(all="ignore"):
        return np.asarray(np.asarray(amax, np.float64) * headroom, np.float32)


@dataclass(frozen=True)
class Candidate:
    """The tensor-level numbers under one headroom, for one amax or for an array of them."""

    amax: F32
    t: TensorScale
    multiplier: F32
    usable: npt.NDArray[np.bool_]
    """Whether the multiplier is finite and positive; without it the headroom is left out."""


@np.errstate(all="ignore")
def candidate(amax: F32, headroom: float | npt.NDArray[np.float64], request: Request) -> Candidate:
    """The numbers of a flat array of amaxes under a headroom, or under one for each of them."""
    rule = request.rule
    if not isinstance(rule, NVFP4Rule):
        raise TypeError(f"{request.format.name} has no tensor scale")
    raised = widened(amax, headroom).reshape(-1)
    t = tensor_scale(raised, rule, request.method, request.dtype)
    _, multiplier = stored_scale(rule, t)
    usable = np.isfinite(raised) & (raised > 0) & np.isfinite(multiplier) & (multiplier > 0)
    return Candidate(raised, t, multiplier, usable)


def only(amax: F32, headroom: float, request: Request) -> F32:
    """Amaxes raised by the one headroom there is, wherever it gives a usable scale."""
    found = candidate(amax, headroom, request)
    return np.where(found.usable, found.amax, amax.reshape(-1)).astype(np.float32)


@dataclass(frozen=True)
class Ends:
    """Blocks whose amax is above `top`, or above 0 and up to `bottom`: only these differ between h = 1 and h = 2."""

    bottom: np.float32
    top: np.float32


@np.errstate(all="ignore")
def each_ends(one: Candidate, two: Candidate, request: Request) -> F32:
    """(amaxes, 2): bottom and top of the blocks to search under 1 and 2; both -1 where that is every block."""
    weighted = isinstance(request.method, Optimal) and request.method.weights is not None
    factors = one.t.factor.reshape(-1), two.t.factor.reshape(-1)
    doubled = (two.multiplier == 2 * one.multiplier) & (two.amax == 2 * one.amax)
    doubled &= (factors[0] == 2 * factors[1]) | (factors[1] == 2 * factors[0])
    doubled &= (one.amax >= ORDINARY[0]) & (one.amax <= ORDINARY[1])
    g = one.multiplier
    down = np.frexp(g)[1] - 1
    top = np.ldexp(np.float32(7) * (np.float32(240) * np.ldexp(g, -down).astype(np.float32)), down)
    found = np.stack([np.float32(1.5) * g, top], axis=1)
    return np.where((doubled & ~np.bool_(weighted))[:, None], found, -1).astype(np.float32)


def ends(one: Candidate, two: Candidate, request: Request) -> list[Ends | None]:
    """Which blocks to search under the headrooms 1 and 2, for each amax; None: every block."""
    return [None if top < 0 else Ends(bottom, top) for bottom, top in each_ends(one, two, request)]


def steps_of(error: F32, shift: int) -> int:
    """Σ floor(E·4**shift·2**16) of the errors of blocks, exact. Inf counts as float32's largest."""
    capped = np.minimum(error.astype(np.float64), float(np.finfo(np.float32).max))
    return sum(map(int, np.floor(np.ldexp(capped, 2 * shift + FRACTION_BITS)).reshape(-1).tolist()))


def best(candidates: Sequence[float], totals: Iterable[Total]) -> float:
    """The headroom with the least sum. None: a headroom that is left out. 1 if all are."""
    found = [(total, headroom) for headroom, total in zip(candidates, totals, strict=True) if total is not None]
    return min(found)[1] if found else 1.0


def exponents(multiplier: F32) -> I32:
    """k = floor(log2 g) of positive numbers."""
    return (np.frexp(multiplier)[1] - 1).astype(np.int32)


def of_rows(rows: Iterable[tuple[Total, ...]], count: int) -> tuple[Total, ...]:
    """The sums of a sample over rows with a scale each, but for those that leave a headroom out."""
    usable = [totals for totals in rows if None not in totals]
    return merged(usable) if usable else (0,) * count


def merged(parts: Iterable[tuple[Total, ...]]) -> tuple[Total, ...]:
    """The sums of the parts of a tensor or group. A headroom that is left out of one part is left out of all."""
    return tuple(None if None in column else sum(column) for column in zip(*parts, strict=True))
