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
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.threads import thread_count
from halfbyte.calibration.parallel import Workers
from halfbyte.calibration.rounding_errors import DeviceErrors, Errors, HostErrors
from halfbyte.calibration.weights import Weights, open_weights
from halfbyte.checkpoint import Plan
from halfbyte.contracts import Contract
from halfbyte.errors import CheckpointError, InputError
from halfbyte.formats import BlockFormat
from halfbyte.models.folding import Fold, folds
from halfbyte.smoothing import LARGEST, Link, Smoothing, repeated
from halfbyte.statistics import LinearStatistics, Statistics, open_statistics
from halfbyte.subnormals import subnormals_kept

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""α: how much of the work the weights take over from the activations."""
ROWS = 1024
"""Rows of a weight that are looked at, evenly spaced, at most."""
NEEDED = ("channel_amax", "sample")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
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

    device: str = "cpu"

    @cached_property
    def _token(self) -> F64:
        """(tokens, 1): one over the mean square of each token."""
        return np.asarray(1 / np.maximum(np.mean(self.x.astype(np.float64) ** 2, axis=1, keepdims=True), 1e-30))

    @cached_property
    def _inputs(self) -> F64:
        """(K,): the mean of x²·u over tokens. Factors are powers of two, so theirs are powers times these."""
        return np.asarray((self.x.astype(np.float64) ** 2 * self._token).mean(axis=0))

    @cached_property
    def _columns(self) -> F64:
        """(K,): the squares of the columns of the weights."""
        return _squares(self.w)

    @cached_property
    def _lost_weights(self) -> Errors:
        return self._errors(self.w, np.abs(self.w).max(axis=0, initial=0), None)

    @cached_property
    def _lost_inputs(self) -> Errors:
        return self._errors(self.x, self.largest, self._token)

    def _errors(self, values: F32, largest: F32, weights: F64 | None) -> Errors:
        host = HostErrors(values, largest, weights, self.format, self.contract)
        return host if self.device == "cpu" else DeviceErrors(host, self.device)

    def errors(self, exponents: npt.NDArray[Any]) -> F64:
        """(K,): the part of each channel in the error of the outputs."""
        squared = np.ldexp(1.0, 2 * exponents.astype(np.int32))
        found: F64 = self._inputs / squared * self._lost_weights(exponents)
        if self.activations:
            found += self._lost_inputs(-exponents) / len(self.x) * (self._columns * squared)
        return found


def _squares(values: F32) -> F64:
    return np.asarray((values.astype(np.float64) ** 2).sum(axis=0), np.float64)


@subnormals_kept()
def fit_smoothing(
    plan: Plan,
    statistics: Statistics | Path,
    progress: Progress | None = None,
    device: str = "cpu",
    threads: int | None = None,
) -> Smoothing:
    """The factors for a plan that has none, from the statistics of its source.

    Places where a weight is not quantized, or has no statistics, keep their factors of 1 and are left out.

    device: "cpu", or a GPU: "cuda:0". threads: on the CPU; None: HALFBYTE_THREADS, or the processors there are. Neither
    changes a factor.
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
    format, contract, four_bits = plan.format, plan.contract, plan.activations.startswith("W4A4")
    reading = Lock()
    links: list[Link] = []

    def choose(number: int) -> Link | None:
        fold = places[number]
        with reading:  # whole weights are in memory while rows are taken from them: one at a time
            inputs = known.get(fold.into[0], arrays=NEEDED)
            rows = _rows(weights, fold)
        if inputs is None or inputs.sample is None or inputs.channel_amax is None:
            raise CheckpointError(f"--smooth: {known.path}: the statistics of {fold.into[0]} are gone")
        exponents = fit(Problem(inputs.sample, inputs.channel_amax, rows, format, contract, four_bits, device), fold)
        if not exponents.any():
            return None
        return Link(fold.origin, fold.into, fold.is_norm, exponents, fold.repeats, fold.head)

    def take(number: int, link: Link | None) -> None:
        links.extend(() if link is None else (link,))
        if progress is not None:
            progress(number + 1, len(places))

    workers = Workers(thread_count(threads) if device == "cpu" else 1)
    try:
        workers.each(len(places), choose, take)
    finally:
        workers.close()
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
    tried = {best.tobytes()}
    for candidate in _candidates(problem, fold):
        if candidate.tobytes() in tried:
            continue
        tried.add(candidate.tobytes())
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
