"""The cast study: its figures equal those of the public functions, and its summary agrees with its rows."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import xml.dom.minidom

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.arrays import like
from halfbyte.study import SCENARIOS, Study, run_study
from halfbyte.study.export import study_csv, study_json
from halfbyte.study.page import study_page
from halfbyte.study.run import ALGORITHMS, COLUMNS, MEASURED, run_scenario
from halfbyte.study.words import findings, summary, winner

NAMES = ["gaussian", "mixed-scales", "blocks-17", "blocks-18", "spread-50", "single-outlier", "constant", "conv"]


@pytest.fixture(scope="module")
def study() -> Study:
    return run_study(NAMES, maps=True)


def test_rows_come_in_the_order_asked_for(study: Study) -> None:
    assert [row.name for row in study.rows] == NAMES
    assert all(set(row.outcomes) == set(MEASURED) for row in study.rows)


def test_figures_are_those_of_cast(study: Study) -> None:
    row = next(row for row in study.rows if row.name == "spread-50")
    source = hb.quantize(SCENARIOS["spread-50"].tensor(), "mxfp4", "modelopt")
    for name in ("requantize", "midpoint", "verbatim", "hybrid"):
        if name == "midpoint":
            result, report = hb.cast(source, "nvfp4", algorithm="verbatim", m="midpoint")
        else:
            result, report = hb.cast(source, "nvfp4", algorithm=name)
        error = np.asarray(hb.dequantize(result), np.float64) - np.asarray(hb.dequantize(source), np.float64)
        assert row.outcomes[name].mse == report.mse == pytest.approx(float((error**2).mean()), rel=1e-12)
        assert row.outcomes[name].max_error == np.abs(error).max()
    exponents = np.asarray(source.scales).astype(int) - 127
    assert (row.k_min, row.k_max, row.m) == (exponents.min(), exponents.max(), exponents.max() - 8)
    assert row.outside == (exponents < exponents.max() - 17).sum()
    assert sum(row.exponents.values()) == exponents.size


def test_exact_scenarios_are_exact_under_every_cast_that_keeps_blocks(study: Study) -> None:
    exact = {row.name for row in study.rows if row.outcomes["hybrid"].label == "bit-exact"}
    assert exact == {"gaussian", "blocks-17", "constant", "conv"}
    assert study.exact("hybrid") == study.exact("optimal") == study.exact("modelopt") == 4
    assert {row.name for row in study.inexact} == set(NAMES) - exact


def test_optimal_is_best_everywhere_and_within_the_bound(study: Study) -> None:
    for row in study.rows:
        best = row.outcomes["optimal"].squared_error
        assert best == min(row.outcomes[name].squared_error for name in ALGORITHMS)
        assert 0.999 * best <= row.bound <= best


def test_strictly_better_but_where_another_is_at_the_bound(study: Study) -> None:
    """On blocks-18 algorithm 3 is already optimal, on the single outlier algorithm 1 is, and the bound proves it."""
    ahead = {row.name for row in study.inexact if row.winners == ("optimal",)}
    assert ahead == {"mixed-scales", "spread-50"}
    for name, other in (("blocks-18", "hybrid"), ("single-outlier", "requantize")):
        tie = next(row for row in study.rows if row.name == name)
        assert tie.winners == (other, "optimal")
        assert tie.bound > 0.999 * tie.outcomes[other].squared_error


def test_hybrid_loses_to_requantize_on_the_single_outlier_only(study: Study) -> None:
    (loss,) = study.losses
    assert loss.scenario == "single-outlier"
    row = next(row for row in study.rows if row.name == loss.scenario)
    assert loss.ratio == row.outcomes["hybrid"].squared_error / row.outcomes["requantize"].squared_error > 1


def test_summary_counts(study: Study) -> None:
    assert summary(study).startswith(
        "8 scenarios. Exact: requantize 1, midpoint 4, verbatim 4, hybrid 4, modelopt 4, optimal 4."
    )
    assert summary(Study(study.rows[:1])).startswith("1 scenario. Exact: requantize ")
    assert study.ties + sum(study.wins(name) for name in ALGORITHMS) == len(study.rows)
    text = " ".join(findings(study))
    assert "hybrid is worse than requantize on single-outlier" in text
    assert "blocks-18: optimal is equal to hybrid" in text
    assert winner(study.rows[0]) == "exact: verbatim, hybrid, optimal"


def test_json_and_csv_hold_every_figure(study: Study) -> None:
    data = json.loads(json.dumps(study_json(study)))
    assert data["summary"]["exact"]["hybrid"] == 4
    lines = list(csv.DictReader(io.StringIO(study_csv(study))))
    assert len(lines) == len(NAMES) * len(MEASURED)
    for line in lines:
        row = next(row for row in study.rows if row.name == line["scenario"])
        outcome = row.outcomes[line["algorithm"]]
        assert float(line["mse"]) == outcome.mse
        assert (line["snr_db"] == "") == math.isinf(outcome.snr)
        stored = next(entry for entry in data["rows"] if entry["scenario"] == row.name)["algorithms"][line["algorithm"]]
        assert stored["squared_error"] == outcome.squared_error


def test_the_page_is_whole_and_needs_nothing_else(study: Study) -> None:
    page = study_page(study)
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(pictures) == 1 + len(NAMES)
    for picture in pictures:
        xml.dom.minidom.parseString(picture)
    assert page.count("data:image/png;base64,") == len(study.inexact) * len(COLUMNS)
    assert page.count("<circle") == len(NAMES) * len(COLUMNS)
    width = float(re.findall(r'viewBox="0 0 (\S+) ', pictures[0])[0])
    positions = [float(x) for x in re.findall(r'<circle cx="(\S+)"', pictures[0])]
    assert all(0 < x < width for x in positions)
    assert len(set(positions)) > 5, "zeros in one column, the rest along the axis"
    assert not re.search(r'(src|href)="http', page)
    assert "<script" not in page
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page, "phones do not zoom out"


def test_error_maps_lie_where_the_errors_are(study: Study) -> None:
    row = next(row for row in study.rows if row.name == "spread-50")
    error_map = np.array(row.outcomes["hybrid"].error_map)
    assert error_map.shape == (24, 48)
    source = hb.quantize(SCENARIOS["spread-50"].tensor(), "mxfp4", "modelopt")
    signal = float(np.mean(np.asarray(hb.dequantize(source), np.float64) ** 2))
    assert np.sqrt(np.mean(error_map**2) * signal) == pytest.approx(np.sqrt(row.outcomes["hybrid"].mse), rel=0.05)
    assert study.rows[0].outcomes["hybrid"].error_map == []


def test_workers_change_nothing(study: Study) -> None:
    assert run_study(["blocks-18", "constant"], workers=1).rows == run_study(["blocks-18", "constant"], workers=3).rows


def test_torch_tensors_give_the_same_figures() -> None:
    """The same path as `--device cuda`, on a device that every machine has."""
    import torch

    for name in ("conv", "blocks-18"):
        row = run_scenario(SCENARIOS[name], lambda x: like(x, torch.empty(0)))
        assert row == run_scenario(SCENARIOS[name], lambda x: x)
