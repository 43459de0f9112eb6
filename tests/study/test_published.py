"""The public study: its counts exactly, its figures up to sampling noise, both rules for a scale of zero."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.study import SCENARIOS, Study, run_study
from halfbyte.study.export import study_json
from halfbyte.study.published import APRIL, EXACT, PUBLISHED, TIES, WINS, rule_of_april
from halfbyte.study.words import beside_published, error_text, published_rows

NOISE = 0.1
"""The public study drew its numbers with another generator, so figures differ by a few percent."""


@pytest.fixture(scope="module")
def study() -> Study:
    return run_study()


def test_the_published_counts_are_met_exactly(study: Study) -> None:
    assert len(study.public.rows) == 27
    assert study.public.exact("hybrid") == EXACT == 22
    assert study.public_wins == WINS == {"requantize": 1, "verbatim": 0, "hybrid": 4}
    assert 27 - sum(study.public_wins.values()) == TIES == 22
    assert {row.name for row in study.public.inexact} == set(PUBLISHED)
    third, second = ({row.name: row.outcomes[name].mse for row in study.public.rows} for name in ("hybrid", "verbatim"))
    assert all(third[name] <= second[name] for name in third), "algorithm 3 is never worse than algorithm 2"


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_figures_are_met_under_the_rule_of_that_day(study: Study, name: str) -> None:
    row = next(row for row in study.rows if row.name == name)
    figures = PUBLISHED[name]
    assert figures.spread in (None, row.spread)
    for algorithm in ("requantize", "verbatim", "hybrid"):
        wanted = figures.mse(algorithm)
        if wanted is not None:
            assert row.outcomes[APRIL.get(algorithm, algorithm)].mse == pytest.approx(wanted, rel=NOISE)


def test_the_rule_matters_to_algorithm_3_and_not_to_the_counts(study: Study) -> None:
    """Under today's rule blocks that the rule of April lost keep some of their values."""
    for row in study.public.inexact:
        assert row.outcomes["hybrid"].mse < row.outcomes["hybrid-april"].mse / 4
    april = {
        row.name: [row.outcomes[name].mse for name in ("requantize-april", "verbatim", "hybrid-april")]
        for row in study.public.rows
    }
    winners = [min(range(3), key=errors.__getitem__) for errors in april.values() if errors.count(min(errors)) == 1]
    assert [winners.count(index) for index in range(3)] == [1, 0, 4]


def test_the_single_outlier_reads_otherwise_under_each_rule(study: Study) -> None:
    (loss,) = [loss for loss in study.losses if loss.scenario in PUBLISHED]
    assert loss.scenario == "single-outlier"
    assert loss.ratio == pytest.approx(8.8, rel=0.01)
    assert 1 < loss.ratio_of_april < 1.01
    row = next(row for row in study.rows if row.name == "single-outlier")
    for name in APRIL.values():
        assert row.outcomes[name].mse == pytest.approx(0.005**2, rel=0.02), "every small value became zero"


def test_the_rule_of_april_replaces_a_scale_that_rounds_to_zero_by_one() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 16] = 2688.0, 6 * 2.0**-10
    today = hb.quantize(x, "nvfp4", "modelopt")
    april = hb.quantize(x, "nvfp4", rule_of_april())
    assert np.asarray(today.scales).tolist() == [[0x7E, 0x01]]
    assert np.asarray(april.scales).tolist() == [[0x7E, 0x38]]
    assert np.asarray(april.codes)[0, 8] == 0


def test_algorithm_3_of_april_keeps_the_blocks_inside_the_window(study: Study) -> None:
    row = next(row for row in study.rows if row.name == "spread-18")
    assert row.outcomes["hybrid-april"].requantized == row.outcomes["hybrid"].requantized == row.outside
    source = hb.quantize(SCENARIOS["spread-18"].tensor(), "mxfp4", "modelopt")
    y = np.asarray(hb.dequantize(source), np.float64).reshape(-1, 32)
    exponents = np.asarray(source.scales).reshape(-1).astype(int) - 127
    lost = (y[exponents < exponents.max() - 17] ** 2).sum()
    assert row.outcomes["hybrid-april"].squared_error == pytest.approx(lost, rel=1e-12)


def test_published_figures_have_a_column_of_their_own(study: Study) -> None:
    lines = published_rows(study)
    assert len(lines) == 3 * len(PUBLISHED)
    assert ("mixed-scales", "3 hybrid", "1.58e-05", "1.55e-05", "8.34e-07") in lines
    assert ("single-outlier", "2 verbatim", "–") in {line[:3] for line in lines}
    assert beside_published(study) == (
        "The 27 scenarios of the public study, its counts in brackets: algorithm 3 is exact on 22 (22); alone ahead is "
        "algorithm 1 on 1 (1), 2 on 0 (0), 3 on 4 (4); tied 22 (22)."
    )
    data = study_json(study)["rows"]
    assert isinstance(data, list)
    (row,) = (row for row in data if isinstance(row, dict) and row["scenario"] == "spread-50")
    algorithms = row["algorithms"]
    assert isinstance(algorithms, dict)
    published = {name: entry["published_mse"] for name, entry in algorithms.items() if isinstance(entry, dict)}
    assert {name for name, figure in published.items() if figure} == {"requantize", "verbatim", "hybrid"}
    assert published["hybrid"] == 945


def test_counts_are_not_compared_unless_all_scenarios_were_run() -> None:
    assert beside_published(run_study(["conv"])) is None


def test_the_tables_of_the_docs_are_what_a_run_gives(study: Study) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cast.md").read_text()
    for line in published_rows(study):
        assert f"| {' | '.join(line)} |\n" in page
    for row in study.inexact:
        shown = [error_text(row, name) for name in ("requantize", "midpoint", "verbatim", "hybrid", "optimal")]
        share = row.bound / row.outcomes["optimal"].squared_error
        assert f"| {row.name} | {row.spread} | {' | '.join(shown)} | {share:.4f} |\n" in page
    (loss,) = study.public.losses
    assert f"by a factor of {loss.ratio_of_april:.4f} under the old one (published: 1.0021)" in page
