"""A checkpoint against its source: every source tensor accounted for, every value decoded and its error measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from halfbyte.checkpoint.io.index import Checkpoint, Tensor
from halfbyte.verify.complete import cache_scales, completeness, split_biases
from halfbyte.verify.diagnose import diagnose
from halfbyte.verify.eights import fp8_problems
from halfbyte.verify.measure import measure
from halfbyte.verify.places import damage_problems, is_off_by_a_factor, is_rounded_otherwise
from halfbyte.verify.problems import Report, WeightError
from halfbyte.verify.rounded import rounding_problems
from halfbyte.verify.stored import Contents, read_contents
from halfbyte.verify.structure import structure_problems
from halfbyte.verify.values import Matrix, Raw, matrices, pieces, view


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
    ours, theirs = matrices(checkpoint, contents), matrices(source, theirs_stored)
    total, done = len(theirs) + len(theirs_stored.plain), 0
    biases = split_biases(checkpoint, source)
    otherwise: list[str] = []
    report.extend(completeness(checkpoint, ours, list(contents.unreadable.values()), source, theirs, biases))
    _check_biases(checkpoint, source, biases, report)
    _check_cache_scales(checkpoint, source, report)
    for name, matrix in theirs.items():
        done += 1
        progress(Progress(done, total))
        if name not in ours:
            continue
        mine = ours[name]
        if mine.plain is not None and matrix.plain is not None and same_type(mine.plain, matrix.plain):
            _equal(checkpoint, source, mine.plain, matrix.plain, report)
        elif mine.shape != matrix.shape:
            text = f"shape {list(mine.shape)}, but {list(matrix.shape)} in the source"
            report.add("error", "shape", name, text)
        else:
            measured = measure(mine, matrix)
            report.errors.append(measured.error)
            if not measured.error.relative <= limit:
                report.add("error", "values", name, _explain(measured.error, limit, mine, matrix, theirs))
                if float(np.median(measured.row_errors)) <= limit:  # a few rows, not the weight
                    report.extend(damage_problems(measured, mine, matrix))
            elif mine.plain is not None:
                report.extend(rounding_problems(checkpoint.path, mine, matrix))
            elif mine.kind.startswith("fp8"):
                report.extend(fp8_problems(mine, matrix, measured) if measured.error.relative else ())
            else:
                report.extend(damage_problems(measured, mine, matrix))
                if is_rounded_otherwise(measured) and not is_off_by_a_factor(measured):
                    otherwise.append(name)
    if otherwise:
        report.add("warning", "rounding", otherwise[0], _otherwise(len(otherwise)))
    used = {tensor for matrix in theirs.values() for tensor in matrix.sources}
    for name, tensor in theirs_stored.plain.items():
        done += 1
        progress(Progress(done, total))
        if name not in used and name in contents.plain:
            _equal(checkpoint, source, contents.plain[name], tensor, report)
    report.errors.sort(key=lambda error: (not math.isnan(error.relative), -error.relative, error.name))


def same_type(a: Tensor, b: Tensor) -> bool:
    return (a.info.dtype, a.info.shape) == (b.info.dtype, b.info.shape)


def _check_biases(
    checkpoint: Checkpoint, source: Checkpoint, biases: dict[str, tuple[str, int, slice]], report: Report
) -> None:
    for name, (origin, expert, elements) in biases.items():
        wanted = view(source.path, source.tensors[origin])[expert, elements]
        if view(checkpoint.path, checkpoint.tensors[name]).tobytes() == wanted.tobytes():
            report.equal += 1
        else:
            text = f"is not row {expert} of {origin}, elements {elements.start or 0}::{elements.step or 1}"
            report.add("error", "kept", name, text)


def _check_cache_scales(checkpoint: Checkpoint, source: Checkpoint, report: Report) -> None:
    """Scales that moved to another name must have kept their value."""
    before = cache_scales(source)
    for scale, mine in cache_scales(checkpoint).items():
        theirs = before.get(scale)
        if theirs is None or mine.name in source.tensors:
            continue
        if view(checkpoint.path, mine).tobytes() == view(source.path, theirs).tobytes():
            report.equal += 1
        else:
            report.add("error", "kept", mine.name, f"is not what {theirs.name} is in the source")


def _equal(checkpoint: Checkpoint, source: Checkpoint, mine: Tensor, theirs: Tensor, report: Report) -> None:
    """Plain tensors: the same bytes, or, in another dtype, the same values rounded once."""
    if mine.info.shape != theirs.info.shape:
        text = f"shape {list(mine.info.shape)}, but {list(theirs.info.shape)} in the source"
        report.add("error", "shape", mine.name, text)
        return
    at = 0
    for got, wanted in zip(pieces(checkpoint.path, mine), pieces(source.path, theirs), strict=True):
        if not same_type(mine, theirs):
            with np.errstate(over="ignore"):
                wanted = wanted.astype(np.float32).astype(got.dtype)
        if got.tobytes() != wanted.tobytes():
            how = f"kept as {mine.info.dtype}"
            if not same_type(mine, theirs):
                how = f"{theirs.info.dtype} rounded to {mine.info.dtype}"
            first = at * got.itemsize + _first_difference(got, wanted)
            text = f"{how}, but not as in the source: they differ from {_place(mine, first)} on"
            report.add("error", "kept", mine.name, text)
            return
        at += got.size
    report.equal += 1


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
    more = f" (and {count - 1} weights more)" if count > 1 else ""
    return (
        f"most rows have codes that are not the nearest to the source{more}: the writer rounded in another way "
        "(GPTQ, at random), so damage is found only where it is large"
    )


def _explain(error: WeightError, limit: float, mine: Matrix, source: Matrix, theirs: dict[str, Matrix]) -> str:
    text = f"{mine.kind}: relative error {error.relative:.3g}, more than {limit:g}"
    reason = diagnose(mine, source, theirs)
    return f"{text}; {reason}" if reason else text
