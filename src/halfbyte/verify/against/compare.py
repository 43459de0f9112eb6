"""A checkpoint against its source: every source tensor accounted for, every value decoded and its error measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from halfbyte.checkpoint.io.index import Checkpoint, Tensor
from halfbyte.smoothing import Smoothing
from halfbyte.verify.against.complete import cache_scales, completeness, split_biases
from halfbyte.verify.against.diagnose import diagnose
from halfbyte.verify.against.eights import fp8_problems
from halfbyte.verify.against.measure import measure
from halfbyte.verify.against.places import damage_problems, is_off_by_a_factor, is_rounded_otherwise
from halfbyte.verify.against.rounded import rounding_problems
from halfbyte.verify.against.smoothed import smoothed, smoothing_of, vector_problem
from halfbyte.verify.parallel import InOrder, in_order
from halfbyte.verify.problems import Problem, Report, WeightError, number
from halfbyte.verify.reading import NUMPY, Raw, read_pieces, read_rows, read_whole
from halfbyte.verify.rules.structure import structure_problems
from halfbyte.verify.stored import Contents, read_contents
from halfbyte.verify.values import Matrix, matrices


@dataclass(frozen=True)
class Progress:
    """How far a comparison is."""

    done: int
    total: int


def compare(
    checkpoint: Checkpoint,
    contents: Contents,
    source: Checkpoint,
    limit: float,
    report: Report,
    progress: Callable[[Progress], None] = lambda progress: None,
    each: InOrder = in_order,
) -> None:
    """Add to the report what differs from the source beyond what quantization explains.

    Unreadable weights count as there; what is wrong with them is reported elsewhere.
    limit: the relative error from which a quantized weight counts as wrong.
    """
    theirs_stored = read_contents(source)
    damaged = [problem for problem in structure_problems(theirs_stored) if problem.rule in ("shape", "dtype")]
    for problem in damaged:
        report.add("error", "source", problem.name, f"in the source: {problem.text}")
    theirs_stored = theirs_stored.without({problem.name for problem in damaged})
    smoothing, wrong = smoothing_of(checkpoint)
    report.extend(wrong)
    ours, theirs = matrices(checkpoint, contents), matrices(source, theirs_stored)
    theirs = {name: smoothed(matrix, smoothing) for name, matrix in theirs.items()}
    used = {tensor for matrix in theirs.values() for tensor in matrix.sources}
    rest = {name: tensor for name, tensor in theirs_stored.plain.items() if name not in used and name in contents.plain}
    total = len(theirs) + len(rest)
    biases = split_biases(checkpoint, source)
    otherwise: list[str] = []
    report.extend(completeness(checkpoint, ours, list(contents.unreadable.values()), source, theirs, biases))
    _check_biases(checkpoint, source, biases, report)
    _check_cache_scales(checkpoint, source, report)
    judge = _Judge(checkpoint, source, ours, theirs, limit, smoothing)
    for done, found in enumerate(each(judge.weight, theirs), 1):
        progress(Progress(done, total))
        report.extend(found.problems)
        report.errors += found.errors
        report.equal += found.equal
        otherwise += found.otherwise
    if otherwise:
        report.add("warning", "rounding", otherwise[0], _otherwise(len(otherwise)))
    pairs = ((contents.plain[name], tensor) for name, tensor in rest.items())
    kept = each(lambda pair: judge.kept(*pair), pairs)
    for done, found in enumerate(kept, len(theirs) + 1):
        progress(Progress(done, total))
        report.extend(found.problems)
        report.equal += found.equal
    report.errors.sort(key=lambda error: (not math.isnan(error.relative), -error.relative, error.name))


@dataclass
class Found:
    """What the comparison of one weight or tensor gave."""

    problems: list[Problem] = field(default_factory=list)
    errors: list[WeightError] = field(default_factory=list)
    equal: int = 0
    otherwise: list[str] = field(default_factory=list)
    """The weight, if most of its codes are not the nearest."""


@dataclass(frozen=True)
class _Judge:
    """Compares single weights and tensors. Several threads use it at once, so it changes nothing."""

    checkpoint: Checkpoint
    source: Checkpoint
    ours: dict[str, Matrix]
    theirs: dict[str, Matrix]
    limit: float
    smoothing: Smoothing

    def weight(self, name: str) -> Found:
        """A weight of the source against the same weight of the checkpoint."""
        theirs = self.theirs[name]
        mine, found = self.ours.get(theirs.name), Found()
        if mine is None:
            return found
        if mine.plain is not None and theirs.plain is not None and same_type(mine.plain, theirs.plain):
            return self.kept(mine.plain, theirs.plain)
        if mine.shape != theirs.shape:
            text = f"shape {list(mine.shape)}, but {list(theirs.shape)} in the source"
            found.problems.append(Problem("error", "shape", theirs.name, text))
            return found
        measured = measure(mine, theirs)
        found.errors.append(measured.error)
        if not measured.error.relative <= self.limit:
            text = _explain(measured.error, self.limit, mine, theirs, self.theirs)
            found.problems.append(Problem("error", "values", theirs.name, text))
            if np.median(np.nan_to_num(measured.row_errors, nan=np.inf)) <= self.limit:  # a few rows, not the weight
                found.problems += damage_problems(measured, mine, theirs)
        elif mine.plain is not None:
            found.problems += rounding_problems(self.checkpoint.path, mine, theirs)
        elif mine.kind.startswith("fp8"):
            found.problems += fp8_problems(mine, theirs, measured) if measured.error.relative else ()
        else:
            found.problems += damage_problems(measured, mine, theirs)
            if is_rounded_otherwise(measured) and not is_off_by_a_factor(measured, mine, theirs):
                found.otherwise.append(theirs.name)
        return found

    def kept(self, mine: Tensor, theirs: Tensor) -> Found:
        """A tensor that was not quantized."""
        if mine.name in self.smoothing.vectors:
            problem = vector_problem(self.checkpoint, self.source, mine, theirs, self.smoothing)
        else:
            problem = _difference(self.checkpoint, self.source, mine, theirs)
        return Found(equal=1) if problem is None else Found([problem])


def same_type(a: Tensor, b: Tensor) -> bool:
    return (a.info.dtype, a.info.shape) == (b.info.dtype, b.info.shape)


def _check_biases(
    checkpoint: Checkpoint, source: Checkpoint, biases: dict[str, tuple[str, int, slice]], report: Report
) -> None:
    for name, (origin, expert, elements) in biases.items():
        wanted = read_rows(source.path, source.tensors[origin], elements, 1, expert)
        if read_whole(checkpoint.path, checkpoint.tensors[name]).tobytes() == wanted.tobytes():
            report.equal += 1
        else:
            there = f"{elements.start}:{elements.stop}:{elements.step}"
            text = f"is not row {expert} of {origin}, elements {there}"
            report.add("error", "kept", name, text)


def _check_cache_scales(checkpoint: Checkpoint, source: Checkpoint, report: Report) -> None:
    """Scales that moved to another name must have kept their value."""
    before = cache_scales(source)
    for scale, mine in cache_scales(checkpoint).items():
        theirs = before.get(scale)
        if theirs is None or mine.name in source.tensors:
            continue
        if read_whole(checkpoint.path, mine).tobytes() == read_whole(source.path, theirs).tobytes():
            report.equal += 1
        else:
            report.add("error", "kept", mine.name, f"is not what {theirs.name} is in the source")


def _difference(checkpoint: Checkpoint, source: Checkpoint, mine: Tensor, theirs: Tensor) -> Problem | None:
    """Plain tensors: None for the same bytes or, in another dtype, the same values rounded once."""
    if mine.info.shape != theirs.info.shape:
        text = f"shape {list(mine.info.shape)}, but {list(theirs.info.shape)} in the source"
        return Problem("error", "shape", mine.name, text)
    if not same_type(mine, theirs) and not {mine.dtype, theirs.dtype} <= NUMPY.keys():
        text = f"{mine.dtype}, but {theirs.dtype} in the source, and such values cannot be compared"
        return Problem("error", "dtype", mine.name, text)
    at = 0
    for got, wanted in zip(read_pieces(checkpoint.path, mine), read_pieces(source.path, theirs), strict=True):
        if not same_type(mine, theirs):
            with np.errstate(over="ignore"):
                wanted = wanted.astype(np.float32).astype(got.dtype)
        if not np.array_equal(got.view(np.uint8), wanted.view(np.uint8)):
            how = f"kept as {mine.info.dtype}"
            if not same_type(mine, theirs):
                how = f"{theirs.info.dtype} rounded to {mine.info.dtype}"
            first = at * got.itemsize + _first_difference(got, wanted)
            text = f"{how}, but not as in the source: they differ from {_place(mine, first)} on"
            return Problem("error", "kept", mine.name, text)
        at += got.size
    return None


def _first_difference(got: Raw, wanted: Raw) -> int:
    """The first byte in which two arrays of one dtype differ."""
    ours, theirs = (np.frombuffer(values.tobytes(), np.uint8) for values in (got, wanted))
    return int((ours != theirs).argmax())


def _place(tensor: Tensor, byte: int) -> str:
    """Which element of a tensor a byte belongs to."""
    width = tensor.info.bytes // math.prod(tensor.info.shape)
    if not width or not tensor.info.shape:
        return f"byte {byte}"
    return f"element {[int(index) for index in np.unravel_index(byte // width, tensor.info.shape)]}"


def _otherwise(count: int) -> str:
    more = f" (and {number(count - 1, 'more weight')})" if count > 1 else ""
    return (
        f"most rows have codes that are not the nearest to the source{more}: the writer rounded in another way "
        "(GPTQ, at random), so damage is found only where it is large"
    )


def _explain(error: WeightError, limit: float, mine: Matrix, source: Matrix, theirs: dict[str, Matrix]) -> str:
    text = f"{mine.kind}: relative error {error.relative:.3g}, more than {limit:g}"
    reason = diagnose(mine, source, theirs)
    return f"{text}; {reason}" if reason else text
