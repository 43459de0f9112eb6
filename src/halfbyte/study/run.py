"""The cast study: quantize every scenario to MXFP4 as Model-Optimizer does, and cast it to NVFP4 by every algorithm."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from halfbyte import CastReport, QuantizedTensor, cast, contracts, dequantize, quantize
from halfbyte.arrays import Array, to_numpy
from halfbyte.casting.measure import compare
from halfbyte.casting.report import describe
from halfbyte.study.device import on_device
from halfbyte.study.published import APRIL, NUMBERED, PUBLISHED, Published, hybrid_of_april, rule_of_april
from halfbyte.study.scenarios import SCENARIOS, Scenario

F64 = npt.NDArray[np.float64]

ALGORITHMS = ("requantize", "verbatim", "hybrid", "optimal")
PEER = "modelopt"
"""Model-Optimizer's own closed-form cast. It is shown next to the algorithms but cannot win."""

MIDPOINT = "midpoint"
"""Algorithm 2 with m in the middle of the exponents, instead of the best m. It cannot win either."""

COLUMNS = ("requantize", MIDPOINT, "verbatim", "hybrid", PEER, "optimal")
MEASURED = (*COLUMNS, *APRIL.values())
"""Everything that is measured: the columns, and algorithms 1 and 3 under the rule of the public study."""

MAP_SHAPE = (24, 48)
"""Rows and columns of an error map."""


@dataclass(frozen=True)
class CastOutcome:
    """One scenario under one algorithm."""

    mse: float
    squared_error: float
    max_error: float
    snr: float
    m: int | None
    global_scale: float
    label: str
    requantized: int
    error_map: list[list[float]] = field(default_factory=list)
    """Root mean square error of each patch, as a share of the tensor's root mean square; empty if the cast is exact."""


@dataclass(frozen=True)
class Row:
    """One scenario under all algorithms."""

    name: str
    about: str
    shape: tuple[int, ...]
    k_min: int | None
    k_max: int | None
    spread: int | None
    m: int | None
    """k_max - 8, as in the closed form."""
    blocks: int
    zero: int
    outside: int
    """The number of blocks that are not zero and are outside the window of this m."""
    exponents: dict[int, int]
    """How many blocks that are not zero have each exponent."""
    outcomes: dict[str, CastOutcome]
    bound: float
    """A lower bound on the squared error of any choice of scales and codes."""
    public: bool = True
    """Whether the public study has this scenario."""

    @property
    def winners(self) -> tuple[str, ...]:
        """The algorithms with the least squared error."""
        return self.best_of(ALGORITHMS)

    def best_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of some algorithms that have the least squared error among them."""
        errors = {name: self.outcomes[name].squared_error for name in names}
        return tuple(name for name, error in errors.items() if error == min(errors.values()))

    @property
    def exact(self) -> tuple[str, ...]:
        """The columns whose cast is exact on this scenario."""
        return tuple(name for name in MEASURED if self.outcomes[name].label != "lossy")

    @property
    def published(self) -> Published | None:
        """The figures that the public study has for this scenario, if it is not exact there."""
        return PUBLISHED.get(self.name)


@dataclass(frozen=True)
class Loss:
    """A scenario in which algorithm 3 is worse than algorithm 1."""

    scenario: str
    ratio: float
    """Squared error of 3 over that of 1."""
    ratio_of_april: float
    """The same under the rule of April 2026, which the public study ran under."""


@dataclass(frozen=True)
class Study:
    """All scenarios that were run."""

    rows: tuple[Row, ...]

    def exact(self, algorithm: str) -> int:
        """The number of scenarios on which an algorithm is exact."""
        return sum(algorithm in row.exact for row in self.rows)

    def wins(self, algorithm: str) -> int:
        """The number of scenarios in which this algorithm alone has the least error."""
        return sum(row.winners == (algorithm,) for row in self.rows)

    @property
    def ties(self) -> int:
        """The number of scenarios in which several algorithms share the least error."""
        return sum(len(row.winners) > 1 for row in self.rows)

    @property
    def public(self) -> Study:
        """The scenarios of the public study alone."""
        return Study(tuple(row for row in self.rows if row.public))

    @property
    def public_wins(self) -> dict[str, int]:
        """On how many scenarios each algorithm of the public study alone has the least error of these three."""
        best = [row.best_of(NUMBERED) for row in self.public.rows]
        return {name: best.count((name,)) for name in NUMBERED}

    @property
    def losses(self) -> list[Loss]:
        """The scenarios in which algorithm 3 is worse than algorithm 1."""
        found = []
        for row in self.rows:
            first, third = row.outcomes["requantize"].squared_error, row.outcomes["hybrid"].squared_error
            if third > first:
                april = (row.outcomes[APRIL[name]].squared_error for name in ("hybrid", "requantize"))
                found.append(Loss(row.name, _ratio(third, first), _ratio(*april)))
        return found

    @property
    def inexact(self) -> list[Row]:
        """The scenarios for which no choice of scales and codes keeps every value."""
        return [row for row in self.rows if row.outcomes["optimal"].label == "lossy"]


def run_study(
    names: Sequence[str] | None = None,
    device: str = "cpu",
    maps: bool = False,
    workers: int | None = None,
    progress: Callable[[Row], None] = lambda row: None,
) -> Study:
    """Run all scenarios, or the named ones. `maps` adds the error maps. `workers` does not change the numbers."""
    chosen = [SCENARIOS[name] for name in (names or SCENARIOS)]
    check = on_device(device)

    def run(scenario: Scenario) -> Row:
        row = run_scenario(scenario, check, maps)
        progress(row)
        return row

    count = workers or min(os.cpu_count() or 1, 2)
    with ThreadPoolExecutor(count) as pool:  # the largest scenario runs first; results keep the requested order
        order = sorted(chosen, key=lambda scenario: -int(np.prod(scenario.shape)))
        done = {scenario.name: pool.submit(run, scenario) for scenario in order}
        return Study(tuple(done[scenario.name].result() for scenario in chosen))


def _ratio(error: float, other: float) -> float:
    return error / other if other else float("inf") if error else 1.0


def run_scenario(scenario: Scenario, place: Callable[[npt.NDArray[np.generic]], Array], maps: bool = False) -> Row:
    """One scenario. `place` puts the tensor on the device that quantizes and decodes."""
    source = quantize(place(scenario.tensor()), "mxfp4", "modelopt")
    reports: dict[str, CastReport] = {}
    outcomes: dict[str, CastOutcome] = {}
    values = to_numpy(dequantize(source)) if maps else None
    results: dict[str, QuantizedTensor] = {}
    for name in COLUMNS:
        results[name], reports[name] = _cast(source, name)
    for name, column in APRIL.items():
        results[column], reports[column] = _cast_of_april(source, name, results[name], reports[name])
    for name, report in reports.items():
        shown = values if name in COLUMNS else None
        outcomes[name] = _outcome(report, _error_map(results[name], shown) if shown is not None else [])
    return _row(scenario, source, reports, outcomes)


def _cast(source: QuantizedTensor, name: str) -> tuple[QuantizedTensor, CastReport]:
    """The cast of one column."""
    if name == PEER:
        contract = contracts.modelopt(mode="quantize_mxfp4_to_nvfp4_lossless")
        return cast(source, "nvfp4", contract=contract, threads=1)
    if name == MIDPOINT:
        return cast(source, "nvfp4", algorithm="verbatim", m="midpoint", threads=1)
    return cast(source, "nvfp4", algorithm=name, threads=1)


def _cast_of_april(
    source: QuantizedTensor, name: str, today: QuantizedTensor, report: CastReport
) -> tuple[QuantizedTensor, CastReport]:
    """Algorithm 1 or 3 under the rule of April 2026, from what today's rule gives."""
    if name == "requantize":
        return cast(source, "nvfp4", algorithm=name, contract=rule_of_april(), threads=1)
    if report.label != "lossy" or report.m is None:
        return today, report  # no block is outside the window
    result = hybrid_of_april(source, today, report.m)
    tally = compare(source, result, threads=1)
    described = describe(tally, report.source, report.target, report.algorithm, report.shape)
    return result, replace(described, m=report.m, global_scales=report.global_scales)


def _outcome(report: CastReport, error_map: list[list[float]]) -> CastOutcome:
    return CastOutcome(
        mse=report.mse,
        squared_error=report.squared_error,
        max_error=report.max_error,
        snr=report.snr,
        m=report.m,
        global_scale=report.global_scales[0],
        label=report.label,
        requantized=report.requantized,
        error_map=error_map if report.label == "lossy" else [],
    )


def _row(
    scenario: Scenario, source: QuantizedTensor, reports: dict[str, CastReport], outcomes: dict[str, CastOutcome]
) -> Row:
    report = reports["optimal"]
    scales = to_numpy(source.scales).reshape(-1)
    codes = to_numpy(source.codes).reshape(len(scales), -1)
    nonzero = ((codes & 0x77) != 0).any(axis=1)
    exponents = {
        int(byte) - 127: int(count) for byte, count in zip(*np.unique(scales[nonzero], return_counts=True), strict=True)
    }
    m = None if report.k_max is None else report.k_max - 8
    return Row(
        name=scenario.name,
        about=scenario.about,
        shape=scenario.shape,
        k_min=report.k_min,
        k_max=report.k_max,
        spread=report.spread,
        m=m,
        blocks=report.blocks,
        zero=report.zero,
        outside=0 if m is None else sum(count for k, count in exponents.items() if not -9 <= k - m <= 8),
        exponents=exponents,
        outcomes=outcomes,
        bound=0.0 if report.bound is None else report.bound,
        public=scenario.public,
    )


def _error_map(result: QuantizedTensor, values: npt.NDArray[np.float32]) -> list[list[float]]:
    """Root mean square error over patches, as a share of the root mean square of the tensor."""
    wanted = values.reshape(-1, values.shape[-1]).astype(np.float64)
    squared = (to_numpy(dequantize(result)).reshape(wanted.shape) - wanted) ** 2
    total = float(np.sqrt((wanted**2).mean()))
    rows = np.array_split(squared, min(MAP_SHAPE[0], squared.shape[0]), axis=0)
    patches = [np.array_split(part.mean(axis=0), min(MAP_SHAPE[1], squared.shape[1])) for part in rows]
    return [[float(np.sqrt(patch.mean())) / total if total else 0.0 for patch in row] for row in patches]
