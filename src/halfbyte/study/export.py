"""A study as JSON and as CSV. Infinite decibels are null in JSON and empty in CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import TypeAlias

from halfbyte.study.methods import MethodRow
from halfbyte.study.run import ALGORITHMS, COLUMNS, CastOutcome, Row, Study

Json: TypeAlias = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

CSV_HEADER = (
    "scenario", "shape", "spread", "m", "blocks", "zero", "outside", "algorithm", "mse", "squared_error", "max_error",
    "snr_db", "global_scale", "label", "wins", "bound",
)  # fmt: skip


def study_json(study: Study) -> dict[str, Json]:
    """Everything that the study measured, with the error maps if they were computed."""
    wins: dict[str, Json] = {name: study.wins(name) for name in ALGORITHMS}
    exact: dict[str, Json] = {name: study.exact(name) for name in COLUMNS}
    return {
        "scenarios": len(study.rows),
        "summary": {
            "exact": exact,
            "outright_wins": wins,
            "ties": study.ties,
            "hybrid_worse_than_requantize": [
                {"scenario": loss.scenario, "ratio": _finite(loss.ratio)} for loss in study.losses
            ],
        },
        "rows": [_row(row) for row in study.rows],
    }


def _row(row: Row) -> Json:
    return {
        "scenario": row.name,
        "about": row.about,
        "shape": list(row.shape),
        "k_min": row.k_min,
        "k_max": row.k_max,
        "spread": row.spread,
        "m": row.m,
        "blocks": row.blocks,
        "zero": row.zero,
        "outside": row.outside,
        "exponents": {str(k): count for k, count in row.exponents.items()},
        "winners": list(row.winners),
        "bound": row.bound,
        "algorithms": {name: _outcome(outcome) for name, outcome in row.outcomes.items()},
    }


def _outcome(outcome: CastOutcome) -> Json:
    found: dict[str, Json] = {
        "mse": _finite(outcome.mse),
        "squared_error": _finite(outcome.squared_error),
        "max_error": _finite(outcome.max_error),
        "snr_db": _finite(outcome.snr),
        "m": outcome.m,
        "global_scale": outcome.global_scale,
        "label": outcome.label,
        "requantized": outcome.requantized,
    }
    if outcome.error_map:
        found["error_map"] = [list(line) for line in outcome.error_map]
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def methods_json(rows: Sequence[MethodRow]) -> dict[str, Json]:
    """Every relative error that was measured."""
    return {
        "rows": [
            {
                "tensor": row.name,
                "shape": list(row.shape),
                "rows_measured": row.rows,
                "relative_error": {name: row.errors[name] for name in row.errors},
                "relative_output_error": {name: row.output_errors[name] for name in row.output_errors},
            }
            for row in rows
        ]
    }


def methods_csv(rows: Sequence[MethodRow]) -> str:
    """One line per tensor and column."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["tensor", "shape", "rows_measured", "method", "relative_error", "relative_output_error"])
    for row in rows:
        for name, error in row.errors.items():
            output = row.output_errors.get(name)
            shape = "x".join(map(str, row.shape))
            lines.writerow([row.name, shape, row.rows, name, repr(error), "" if output is None else repr(output)])
    return text.getvalue()


def study_csv(study: Study) -> str:
    """One line per scenario and algorithm."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(CSV_HEADER)
    for row in study.rows:
        for name in COLUMNS:
            outcome = row.outcomes[name]
            lines.writerow([
                row.name, "x".join(map(str, row.shape)), row.spread, row.m, row.blocks, row.zero, row.outside, name,
                repr(outcome.mse), repr(outcome.squared_error), repr(outcome.max_error), _finite(outcome.snr),
                repr(outcome.global_scale), outcome.label, int(name in row.winners), repr(row.bound),
            ])  # fmt: skip
    return text.getvalue()
