"""A study as JSON and as CSV. Infinite decibels are null in JSON and empty in CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import TypeAlias

from halfbyte.study.methods import MethodRow
from halfbyte.study.published import EXACT, NUMBERED, WINS
from halfbyte.study.run import ALGORITHMS, MEASURED, CastOutcome, Row, Study

Json: TypeAlias = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

CSV_HEADER = (
    "scenario", "public", "shape", "spread", "m", "blocks", "zero", "outside", "algorithm", "mse", "squared_error",
    "max_error", "snr_db", "global_scale", "label", "wins", "bound", "published_mse",
)  # fmt: skip


def study_json(study: Study) -> dict[str, Json]:
    """Everything that the study measured, with the error maps if they were computed."""
    wins: dict[str, Json] = {name: study.wins(name) for name in ALGORITHMS}
    exact: dict[str, Json] = {name: study.exact(name) for name in MEASURED}
    return {
        "scenarios": len(study.rows),
        "summary": {
            "exact": exact,
            "outright_wins": wins,
            "ties": study.ties,
            "hybrid_worse_than_requantize": [
                {
                    "scenario": loss.scenario,
                    "ratio": _finite(loss.ratio),
                    "ratio_rule_of_april": _finite(loss.ratio_of_april),
                }
                for loss in study.losses
            ],
            "public": {
                "scenarios": len(study.public.rows),
                "exact": study.public.exact("hybrid"),
                "exact_published": EXACT,
                "outright_wins": dict(study.public_wins),
                "outright_wins_published": dict(WINS),
            },
        },
        "rows": [_row(row) for row in study.rows],
    }


def _row(row: Row) -> Json:
    return {
        "scenario": row.name,
        "about": row.about,
        "public": row.public,
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
        "published_spread": None if row.published is None else row.published.spread,
        "algorithms": {
            name: _outcome(outcome) | {"published_mse": _published(row, name)} for name, outcome in row.outcomes.items()
        },
    }


def _published(row: Row, name: str) -> float | None:
    """The mean squared error that the public study has for an algorithm on this scenario."""
    return None if row.published is None or name not in NUMBERED else row.published.mse(name)


def _outcome(outcome: CastOutcome) -> dict[str, Json]:
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
        for name in MEASURED:
            outcome = row.outcomes[name]
            lines.writerow([
                row.name, int(row.public), "x".join(map(str, row.shape)), row.spread, row.m, row.blocks, row.zero,
                row.outside, name, repr(outcome.mse), repr(outcome.squared_error), repr(outcome.max_error),
                _finite(outcome.snr), repr(outcome.global_scale), outcome.label, int(name in row.winners),
                repr(row.bound), _published(row, name),
            ])  # fmt: skip
    return text.getvalue()
