"""CastReport: what a cast did to the values, block by block, measured on what both tensors decode to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Label = Literal["bit-exact", "value-exact", "lossy"]


@dataclass(frozen=True)
class ShareCost:
    """What one way of sharing the global scale costs."""

    share: str
    """"tensor": one for all that was given. "expert": one per index of the first axis, partners sharing it. "alone":
    one per expert of each tensor."""
    scales: int
    """How many global scales that makes."""
    lossless: bool
    exact_blocks: int
    """Blocks whose values are kept, zero blocks among them."""
    squared_error: float


@dataclass(frozen=True)
class CastReport:
    """The outcome of a cast. Errors compare the float32 that source and result decode to, summed in float64."""

    source: str
    """Name of the source's format."""
    target: str
    """Name of the result's format, or of its dtype."""
    algorithm: str
    shape: tuple[int, ...]
    label: Label
    """"bit-exact": the source's own codes, and every decoded float32 has the source's bits. "value-exact": equal values
    in other codes, or in a format without codes. "lossy": some value changed."""
    blocks: int
    """Blocks of the source."""
    zero: int
    """Of these: all codes ±0."""
    verbatim: int
    """Of the rest: codes kept, and their scale too."""
    recoded: int
    """Of the rest: equal values with other codes or scales."""
    requantized: int
    """Of the rest: some value changed."""
    squared_error: float
    max_error: float
    signal: float
    """Sum of the squared values of the source; 0 where all codes were kept, because then no value is decoded."""
    elements: int
    k_min: int | None = None
    """Smallest exponent of the blocks that are not zero; None if all are, or if the source has no E8M0 scales."""
    k_max: int | None = None
    m: int | None = None
    """The global scale is 2^m; None if it is no power of two, if there are several, or none."""
    global_scales: tuple[float, ...] = ()
    bound: float | None = None
    """No choice of global scale, block scales and codes has a smaller squared error than this; None: not looked for."""
    share: str = "tensor"
    costs: tuple[ShareCost, ...] = ()
    """For stacks and partners: every way of sharing the global scale, the coarsest first."""
    parts: tuple[CastReport, ...] = ()
    """With several global scales: the report of each."""

    @property
    def lossless(self) -> bool:
        return self.label != "lossy"

    @property
    def spread(self) -> int | None:
        """k_max - k_min; up to 17 every block can be kept."""
        return None if self.k_min is None or self.k_max is None else self.k_max - self.k_min

    @property
    def mse(self) -> float:
        return self.squared_error / self.elements if self.elements else 0.0

    @property
    def snr(self) -> float:
        """Signal over error in decibels; Inf where there is no error."""
        if self.squared_error == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.squared_error) if self.signal > 0 else -math.inf

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        lines = [f"{self.source} -> {self.target}, {self.algorithm}, {size}: {self.label}"]
        if self.spread is not None:
            lines.append(f"  exponents  {self.k_min} to {self.k_max}, spread {self.spread}{self._scale()}")
        lines.append(
            f"  blocks     {self.blocks}: {self.zero} zero, {self.verbatim} verbatim, {self.recoded} recoded, "
            f"{self.requantized} requantized"
        )
        if not self.lossless:
            lines.append(
                f"  error      squared {self.squared_error:.6g}, max {self.max_error:.6g}, SNR {self.snr:.2f} dB"
            )
        if not self.lossless and self.bound is not None:
            lines.append(
                f"  bound      no choice has less than {self.bound:.6g}, {self.bound / self.squared_error:.2%}"
            )
        for cost in self.costs:
            exact = "lossless" if cost.lossless else f"squared error {cost.squared_error:.6g}"
            scales = f"{cost.scales} global scale{'s' if cost.scales > 1 else ''}"
            lines.append(f"  share {cost.share:<7}{scales}, {cost.exact_blocks} blocks exact, {exact}")
        return "\n".join(lines)

    def _scale(self) -> str:
        if self.m is not None:
            return f", m {self.m}"
        if len(self.global_scales) == 1:
            return f", global scale {self.global_scales[0]:.9g}"
        return f", {len(self.global_scales)} global scales"


@dataclass(frozen=True)
class Tally:
    """Counts and sums of some rows; they add up."""

    blocks: int
    zero: int
    verbatim: int
    recoded: int
    requantized: int
    squared_error: float
    max_error: float
    signal: float
    elements: int
    same_codes: bool
    """Every code is the source's, and every decoded float32 has its bits."""

    @property
    def label(self) -> Label:
        if self.requantized or self.squared_error > 0:
            return "lossy"
        return "bit-exact" if self.same_codes else "value-exact"


def add(tallies: Sequence[Tally]) -> Tally:
    """The tally of all rows together; sums are rounded once."""
    return Tally(
        blocks=sum(t.blocks for t in tallies),
        zero=sum(t.zero for t in tallies),
        verbatim=sum(t.verbatim for t in tallies),
        recoded=sum(t.recoded for t in tallies),
        requantized=sum(t.requantized for t in tallies),
        squared_error=_sum([t.squared_error for t in tallies]),
        max_error=max((t.max_error for t in tallies), default=0.0),
        signal=_sum([t.signal for t in tallies]),
        elements=sum(t.elements for t in tallies),
        same_codes=all(t.same_codes for t in tallies),
    )


def describe(tally: Tally, source: str, target: str, algorithm: str, shape: tuple[int, ...]) -> CastReport:
    """The report of what a tally counted, without what is known of global scales."""
    return CastReport(
        source=source,
        target=target,
        algorithm=algorithm,
        shape=shape,
        label=tally.label,
        blocks=tally.blocks,
        zero=tally.zero,
        verbatim=tally.verbatim,
        recoded=tally.recoded,
        requantized=tally.requantized,
        squared_error=tally.squared_error,
        max_error=tally.max_error,
        signal=tally.signal,
        elements=tally.elements,
    )


def _sum(values: Sequence[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
