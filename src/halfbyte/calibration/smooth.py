"""Choosing the factors of smoothing: per place, those with the least error of the outputs.

For every place that a model has (`models/folding.py`) some rules give factors: 2^round(α·log2 X − (1 − α)·log2 W), or
without W, where X and W are how large each input and each column is. The rule with the least error is taken, and then
every exponent is tried one higher and one lower, sixteen positions of all blocks one after the other. The error is that
of the outputs, added up over channels as if their errors had nothing to do with each other:

    Σ_j mean_t((x̂_tj − x_tj)²·u_t)·Σ_i w_ij²  +  Σ_j mean_t(x_tj²·u_t)·Σ_i (ŵ_ij − w_ij)²

with inputs x of the sampled tokens and weights w, both with the factors; x̂ and ŵ rounded to the format; u_t makes every
token count alike: one over the mean of its squares. Without quantized activations the first sum is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.calibration.weights import Weights, open_weights
from halfbyte.checkpoint import Plan
from halfbyte.contracts import Contract
from halfbyte.errors import CheckpointError, InputError
from halfbyte.formats import BlockFormat
from halfbyte.models.folding import Fold, folds
from halfbyte.quantize import dequantize, quantize
from halfbyte.smoothing import LARGEST, Link, Smoothing, powers, repeated
from halfbyte.statistics import LinearStatistics, Statistics, open_statistics

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""α: how much of the work the weights take over from the activations."""
ROWS = 1024
"""Rows of a weight that are looked at, evenly spaced, at most."""
NEEDED = ("channel_amax", "sample")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Problem:
    """What the factors of one place are chosen from."""

    x: F32
    """(tokens, K): sampled inputs."""
    largest: F32
    """(K,): the largest magnitude of each input."""
    w: F32
    """(rows, K): rows of all weights that read them."""
    format: BlockFormat
    contract: Contract
    activations: bool
    """Whether activations are quantized."""

    def errors(self, exponents: npt.NDArray[Any]) -> F64:
        """(K,): the part of each channel in the error of the outputs."""
        up = powers(exponents)
        x, w = self.x / up, self.w * up
        token = 1 / np.maximum(np.mean(self.x.astype(np.float64) ** 2, axis=1, keepdims=True), 1e-30)
        squares: F64 = (x.astype(np.float64) ** 2 * token).mean(axis=0)
        found: F64 = squares * _squares(self._rounded(w, float(np.abs(w).max(initial=0))) - w)
        if self.activations:
            lost = self._rounded(x, float((self.largest / up).max(initial=0))) - x
            found += (lost.astype(np.float64) ** 2 * token).mean(axis=0) * _squares(w)
        return found

    def _rounded(self, values: F32, amax: float) -> F32:
        if not self.format.has_global:
            return np.asarray(dequantize(quantize(values, self.format, self.contract)), np.float32)
        if amax == 0:
            return values
        found = quantize(values, self.format, self.contract, "amax", global_amax=np.float32(amax))
        return np.asarray(dequantize(found), np.float32)


def _squares(values: F32) -> F64:
    return np.asarray((values.astype(np.float64) ** 2).sum(axis=0), np.float64)


def fit_smoothing(plan: Plan, statistics: Statistics | Path, progress: Progress | None = None) -> Smoothing:
    """The factors for a plan that has none, from the statistics of its source.

    Places where a weight is not quantized, or has no statistics, keep their factors of 1 and are left out.
    """
    if plan.format is None or plan.contract is None:
        raise InputError("--smooth belongs to conversions to FP4, not to bf16")
    if plan.smoothing is not None:
        raise InputError("the plan has factors of smoothing already")
    known = statistics if isinstance(statistics, Statistics) else open_statistics(statistics)
    weights = open_weights(plan.source)
    quantized = {unit.module for unit in plan.units if unit.action == "quantize" and len(unit.sources) == 1}
    places = list(_usable(weights, known, quantized))
    if not places:
        raise CheckpointError(
            f"--smooth: {known.path} has a sample of the inputs ({', '.join(NEEDED)}) of no place where factors can "
            "go; calibrate again with this halfbyte"
        )
    links = []
    four_bits = plan.activations.startswith("W4A4")
    for number, fold in enumerate(places):
        inputs = known.get(fold.into[0], arrays=NEEDED)
        if inputs is None or inputs.sample is None or inputs.channel_amax is None:
            raise CheckpointError(f"--smooth: {known.path}: the statistics of {fold.into[0]} are gone")
        problem = Problem(
            inputs.sample, inputs.channel_amax, _rows(weights, fold), plan.format, plan.contract, four_bits
        )
        exponents = fit(problem, fold)
        if exponents.any():
            links.append(Link(fold.origin, fold.into, fold.is_norm, exponents, fold.repeats, fold.head))
        if progress is not None:
            progress(number + 1, len(places))
    return Smoothing(tuple(links), smoothing_origin(plan, known))


def smoothing_origin(plan: Plan, statistics: Statistics | Path) -> dict[str, Any]:
    """What factors are chosen from, to tell whether those in a file are still the right ones."""
    known = statistics if isinstance(statistics, Statistics) else open_statistics(statistics)
    digest = hashlib.sha256("\n".join(known.names).encode())
    for file in sorted(known.path.glob("*.safetensors")) if known.path.is_dir() else [known.path]:
        digest.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode())
    modules = [unit.module for unit in plan.units if unit.action == "quantize"]
    files = [(file.name, file.size, file.modified, file.header) for file in plan.files]
    return {
        "activations": "quantized" if plan.activations.startswith("W4A4") else "not quantized",
        "format": plan.choices["to"],
        "contract": plan.choices["contract"],
        "source": hashlib.sha256(repr((files, modules)).encode()).hexdigest(),
        "statistics": digest.hexdigest(),
    }


def _usable(weights: Weights, known: Statistics, quantized: Collection[str]) -> Iterator[Fold]:
    for fold in folds(weights.checkpoint.config, quantized):
        names = {*known.holds(fold.into[0])}
        heads = fold.repeats == 1 or weights.linears[fold.into[0]].columns == fold.repeats * (
            weights.linears[fold.origin].rows
        )
        if names.issuperset(NEEDED) and heads and _fits(weights, known, fold):
            yield fold


def _fits(weights: Weights, known: Statistics, fold: Fold) -> bool:
    """Whether the statistics have tokens; raises if they are of another width."""
    found: LinearStatistics | None = known.get(fold.into[0], weights.linears[fold.into[0]].columns, NEEDED)
    return found is not None and found.sample is not None and len(found.sample) > 0


def _rows(weights: Weights, fold: Fold) -> F32:
    """Rows of the weights that read the channels of a place."""
    found = []
    for module in fold.into:
        matrix = weights.matrix(module)
        count = min(len(matrix), ROWS)
        found.append(matrix[np.arange(count) * len(matrix) // count])
    return np.concatenate(found)


def fit(problem: Problem, fold: Fold) -> npt.NDArray[np.int8]:
    """The exponents of one place, one per channel of its origin."""
    best = np.zeros(problem.w.shape[1] // fold.repeats, np.int8)
    least = float(problem.errors(repeated(best, fold.repeats, fold.head)).sum())
    for candidate in _candidates(problem, fold):
        error = float(problem.errors(repeated(candidate, fold.repeats, fold.head)).sum())
        if error < least:
            best, least = candidate, error
    return _refined(problem, fold, best)


def _candidates(problem: Problem, fold: Fold) -> Iterator[npt.NDArray[np.int8]]:
    tiny = np.float64(1e-30)
    sizes = (
        (np.sqrt(np.mean(problem.x.astype(np.float64) ** 2, axis=0)), np.sqrt(_squares(problem.w) / len(problem.w))),
        (np.abs(problem.x).max(axis=0), np.abs(problem.w).max(axis=0)),
    )
    for of_x, of_w in sizes:
        x, w = np.log2(np.maximum(of_x, tiny)), np.log2(np.maximum(of_w, tiny))
        dead = (of_x == 0) | (of_w == 0)
        for share in SHARES:
            for exponents in (share * x - (1 - share) * w, share * x):
                exponents = np.where(dead, np.nan, exponents)
                if fold.repeats > 1:
                    exponents = exponents.reshape(-1, fold.repeats, fold.head).mean(axis=1).reshape(-1)
                if np.isnan(exponents).all():
                    continue
                exponents = np.nan_to_num(exponents - np.nanmedian(exponents))
                yield np.clip(np.rint(exponents), -LARGEST, LARGEST).astype(np.int8)


def _refined(problem: Problem, fold: Fold, exponents: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """Every exponent tried one higher and one lower; a block keeps what lowers its error."""
    block, head = problem.format.block, fold.head if fold.repeats > 1 else len(exponents)
    if head % block:
        return exponents
    shape = (len(exponents) // head, fold.repeats, head // block, block)

    def blocks(tried: npt.NDArray[np.int8]) -> F64:
        errors = problem.errors(repeated(tried, fold.repeats, fold.head)).reshape(shape)
        return np.asarray(errors.sum(axis=(1, 3)).reshape(-1, 1), np.float64)

    current = blocks(exponents)
    for position in range(block):
        for step in (1, -1):
            tried = exponents.reshape(-1, block).copy()
            tried[:, position] = np.clip(tried[:, position] + step, -LARGEST, LARGEST)
            errors = blocks(tried.reshape(-1))
            better = errors < current
            exponents = np.where(better, tried, exponents.reshape(-1, block)).reshape(-1).astype(np.int8)
            current = np.where(better, errors, current)
    return exponents
