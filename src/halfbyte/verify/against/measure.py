"""One weight against its source in one pass, a few rows at a time: norms, rows, codes and scales."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from halfbyte.backends.compare import Compared, compare_rows
from halfbyte.codec.bits import F32
from halfbyte.formats import E4M3
from halfbyte.verify.against.scale_rules import ScaleRules, judge_numbers, marks_of
from halfbyte.verify.nearest import BY_CODE, F64, BlockSums, Encoded, Raw, block_sums
from halfbyte.verify.problems import WeightError
from halfbyte.verify.values import Matrix


@dataclass
class Measured:
    """What one pass over a weight and its source gave."""

    error: WeightError
    row_errors: F64
    """Relative error of each row; NaN where the row has NaN, Inf where the source is 0 and the row is not."""
    wrong_blocks: dict[int, int] = field(default_factory=dict)
    """Row → how many of its blocks have a code that is not the nearest one."""
    blocks: int = 0
    """Of one row."""
    factors: tuple[float, float] = (1.0, 1.0)
    """Numbers by which the decoded values would fit the source: if the error is independent of the decoded values, as
    after rounding to nearest; if it is independent of the source, as after rounding at random."""
    factor_error: float = math.inf
    """What these numbers are uncertain by, as a standard deviation."""
    explained: float = 0.0
    """The share of the squared error that the first factor undoes."""
    by_amax: bool = False
    """Whether the scales prove that the tensor scale is right."""
    rule: str = ""
    """By which rule the scales were chosen, where that can be told."""
    odd_scales: list[tuple[int, int]] = field(default_factory=list)
    """(row, block) of scales that break the rule, though all codes under them are the nearest ones."""


def measure(mine: Matrix, theirs: Matrix) -> Measured:
    """Errors relative to the source, in the Euclidean norm, sums in float64; for FP4 also codes and scales."""
    rows = mine.shape[0]
    squares, reference = np.zeros(rows), np.zeros(rows)
    largest = 0.0
    codes = _Codes(mine)
    for start, stop in mine.chunks():
        if mine.encoded is not None:
            found = compared(mine.encoded(start, stop), (theirs.stored or theirs.read)(start, stop))
            squares[start:stop], reference[start:stop] = found.off, found.squares
            largest = max(largest, found.largest)
            codes.feed(start, found)
            continue
        wanted = theirs.read(start, stop)
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf count as wrong below
            difference = mine.read(start, stop) - wanted
            squares[start:stop], reference[start:stop] = _square_sums(difference), _square_sums(wanted)
        largest = max(largest, float(np.abs(difference).max(initial=0.0)))
    with np.errstate(invalid="ignore", divide="ignore"):
        row_errors = np.where(squares == 0, 0.0, np.sqrt(squares / reference))
    relative = _relative(float(squares.sum()), float(reference.sum()))
    measured = Measured(WeightError(mine.name, mine.kind, mine.shape, relative, largest), row_errors)
    if mine.encoded is not None:
        codes.conclude(measured)
    return measured


def compared(stored: Encoded, source: Raw) -> Compared:
    """Rows of a block format against the same rows of the source, in float32 or as bfloat16."""
    judged = stored.scale_format is E4M3
    numbers = stored.scale_format.values, stored.tensor_scale, BY_CODE
    judge = judge_numbers(stored.tensor_scale) if judged else None
    found = compare_rows(source, stored.codes, stored.scale_bytes, numbers, judge)
    if found is not None:
        return found
    sums = block_sums(stored, source)
    return Compared(
        sums.squares.sum(axis=1), sums.off.sum(axis=1), sums.wrong.sum(axis=1),
        marks_of(sums, stored) if judged else None, _factor_sums(sums, stored), sums.largest, sums.wrong.shape[1],
    )  # fmt: skip


@np.errstate(all="ignore")
def _factor_sums(sums: BlockSums, stored: Encoded) -> F64:
    """What tells the best factor of a weight: each block in units of its own scale, so that every one counts alike."""
    per_scale = 1 / stored.multiplier()[:, :, 0]
    product, power, squares = sums.product * per_scale, sums.power, sums.squares * per_scale * per_scale
    told = np.isfinite(product) & np.isfinite(squares)
    parts = [part[told].astype(np.float64) for part in (product, power, squares)]
    return np.array([*(part.sum() for part in parts), ((parts[0] - parts[1]) ** 2).sum()])


class _Codes:
    """Sums over the blocks of one weight."""

    def __init__(self, mine: Matrix) -> None:
        self.wrong: dict[int, int] = {}
        self.sums = np.zeros(4)
        self.rules: ScaleRules | None = None
        self.rows = mine.shape[0]
        self.blocks = 0
        """Of one row."""

    def feed(self, start: int, found: Compared) -> None:
        """Take in the rows from `start` on."""
        if found.marks is not None:
            self.rules = self.rules or ScaleRules(self.rows * found.marks.shape[1])
            self.rules.feed(start, found.marks)
        self.sums += found.factor_sums
        self.blocks = found.blocks
        self.wrong |= {start + int(row): int(found.wrong[row]) for row in np.flatnonzero(found.wrong)}

    def conclude(self, measured: Measured) -> None:
        measured.wrong_blocks, measured.blocks = self.wrong, self.blocks
        product, power, squares, spread = (float(part) for part in self.sums)
        if self.rules is not None and power > 0 and product > 0:
            measured.factors = product / power, squares / product
            measured.factor_error = math.sqrt(spread) / power
            error = squares - 2 * product + power
            measured.explained = (measured.factors[0] - 1) ** 2 * power / error if error > 0 else 0.0
        if self.rules is not None:
            measured.rule, measured.odd_scales = self.rules.verdict()
            measured.by_amax = self.rules.by_amax


def _square_sums(values: F32) -> F64:
    """Of each row."""
    return np.asarray(np.einsum("ij,ij->i", values, values, dtype=np.float64))


def _relative(squares: float, reference: float) -> float:
    if math.isnan(squares):
        return math.nan
    if squares == 0:
        return 0.0
    return math.sqrt(squares / reference) if reference else math.inf
