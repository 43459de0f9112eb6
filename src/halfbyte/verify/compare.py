"""A checkpoint against its source: every source tensor accounted for, every value decoded and its error measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from halfbyte.checkpoint.io.index import Checkpoint, Tensor
from halfbyte.codec.bits import F32
from halfbyte.layouts.description import asks_for_fp8_cache
from halfbyte.layouts.kv_cache import CacheScale, cache_scale, is_cache_tensor
from halfbyte.layouts.storage import unneeded_suffixes
from halfbyte.models import model_of
from halfbyte.models.experts import expert_module, is_stack
from halfbyte.verify.diagnose import diagnose
from halfbyte.verify.problems import Problem, Report, WeightError
from halfbyte.verify.stored import Contents, StoredTensors, read_contents
from halfbyte.verify.structure import structure_problems
from halfbyte.verify.values import Matrix, matrices, pieces, view


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
    biases = _split_biases(checkpoint, source)
    report.extend(_completeness(checkpoint, ours, list(contents.unreadable.values()), source, theirs, biases))
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
            error = measure(mine, matrix)
            report.errors.append(error)
            if not error.relative <= limit:
                report.add("error", "values", name, _explain(error, limit, mine, matrix, theirs))
    used = {tensor for matrix in theirs.values() for tensor in matrix.sources}
    for name, tensor in theirs_stored.plain.items():
        done += 1
        progress(Progress(done, total))
        if name not in used and name in contents.plain:
            _equal(checkpoint, source, contents.plain[name], tensor, report)
    report.errors.sort(key=lambda error: (not math.isnan(error.relative), -error.relative, error.name))


def same_type(a: Tensor, b: Tensor) -> bool:
    return (a.info.dtype, a.info.shape) == (b.info.dtype, b.info.shape)


def measure(mine: Matrix, theirs: Matrix) -> WeightError:
    """Relative error in the Euclidean norm, a few rows at a time, sums in float64."""
    squares = reference = largest = 0.0
    for start, stop in mine.chunks():
        wanted = theirs.read(start, stop)
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf count as wrong below
            difference = mine.read(start, stop) - wanted
        squares += _square_sum(difference)
        reference += _square_sum(wanted)
        largest = max(largest, float(np.abs(difference).max(initial=0.0)))
    if math.isnan(squares):
        relative = math.nan
    elif squares == 0:
        relative = 0.0
    else:
        relative = math.sqrt(squares / reference) if reference else math.inf
    return WeightError(mine.name, mine.kind, mine.shape, relative, largest)


def _square_sum(values: F32) -> float:
    flat = values.reshape(-1).astype(np.float64)
    return float(flat @ flat)


def _completeness(
    checkpoint: Checkpoint,
    ours: dict[str, Matrix],
    unread: Sequence[StoredTensors],
    source: Checkpoint,
    theirs: dict[str, Matrix],
    biases: dict[str, tuple[str, int, slice]],
) -> Iterator[Problem]:
    """Source tensors that the checkpoint lacks, and weights that the source does not have."""
    names = {weight.name for weight in unread}
    stacks = tuple(f"{weight.parent}." for weight in unread if weight.storage.stacked)
    for name in theirs:
        if name in ours or name in names or name.startswith(stacks):
            continue
        text = f"in the source ({theirs[name].kind} {list(theirs[name].shape)}), but not in the checkpoint"
        yield Problem("error", "lost", name, text)
    unneeded = unneeded_suffixes()
    cached, cached_before = _cache_scales(checkpoint), _cache_scales(source)
    covered = {tensor for matrix in theirs.values() for tensor in matrix.sources}
    for name, tensor in source.tensors.items():
        if name in covered or name in checkpoint.tensors or name.endswith(unneeded):
            continue
        if any(origin == name for origin, _, _ in biases.values()):
            continue
        if is_cache_tensor(name) and (cache_scale(name) in cached or not asks_for_fp8_cache(checkpoint.quantization)):
            continue
        text = f"in the source ({tensor.info.dtype} {list(tensor.info.shape)}), but not in the checkpoint"
        yield Problem("error", "lost", name, text)
    for name, matrix in ours.items():
        if name not in theirs:
            yield Problem(
                "error", "no-source", name, f"{matrix.kind} {list(matrix.shape)}, but the source has no such weight"
            )
    stored = {tensor for matrix in ours.values() for tensor in matrix.sources}
    stored |= {part.name for weight in unread for part in weight.parts.values()}
    for name, tensor in checkpoint.tensors.items():
        if name not in stored and name not in source.tensors and name not in biases:
            if cache_scale(name) in cached_before:
                continue
            text = f"{tensor.info.dtype} {list(tensor.info.shape)}, but the source has no such tensor"
            yield Problem("error", "no-source", name, text)


def _split_biases(checkpoint: Checkpoint, source: Checkpoint) -> dict[str, tuple[str, int, slice]]:
    """Biases of experts that were one tensor: name → source tensor, expert, which of its elements."""
    model = model_of(source.config)
    found: dict[str, tuple[str, int, slice]] = {}
    for name, tensor in source.tensors.items():
        stack = name.removesuffix("_bias")
        if stack == name or not is_stack(stack) or len(tensor.shape) != 2:
            continue
        for expert in range(tensor.shape[0]):
            for projection, elements in model.projections(stack, tensor.shape[1]).items():
                bias = f"{expert_module(stack, expert, projection)}.bias"
                if bias in checkpoint.tensors:
                    found[bias] = (name, expert, elements)
    return found


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


def _cache_scales(checkpoint: Checkpoint) -> dict[CacheScale | None, Tensor]:
    """The scales of a quantized cache, whatever the layout names them."""
    found = {cache_scale(name): tensor for name, tensor in checkpoint.tensors.items()}
    return {scale: tensor for scale, tensor in found.items() if scale is not None}


def _check_cache_scales(checkpoint: Checkpoint, source: Checkpoint, report: Report) -> None:
    """Scales that moved to another name must have kept their value."""
    before = _cache_scales(source)
    for scale, mine in _cache_scales(checkpoint).items():
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
            text = f"{how}, but some of elements {at} to {at + got.size - 1} differ from the source"
            report.add("error", "kept", mine.name, text)
            return
        at += got.size
    report.equal += 1


def _explain(error: WeightError, limit: float, mine: Matrix, source: Matrix, theirs: dict[str, Matrix]) -> str:
    text = f"{mine.kind}: relative error {error.relative:.3g}, more than {limit:g}"
    reason = diagnose(mine, source, theirs)
    return f"{text}; {reason}" if reason else text
