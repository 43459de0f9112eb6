"""The study in words: sentences and short texts that the terminal and the page share."""

from __future__ import annotations

import math

from halfbyte.study import published
from halfbyte.study.published import APRIL, NUMBERED
from halfbyte.study.run import ALGORITHMS, COLUMNS, Row, Study

APRIL_NOTE = (
    "Rule of April 2026: a block scale that rounds to zero becomes 1, as in the Model-Optimizer of the public study. "
    "Today's rule raises it to the smallest E4M3 number."
)


def summary(study: Study) -> str:
    """How many scenarios are exact under each algorithm, and which algorithm is ahead on how many."""
    exact = ", ".join(f"{name} {study.exact(name)}" for name in COLUMNS)
    wins = ", ".join(f"{name} {study.wins(name)}" for name in ALGORITHMS)
    count = "1 scenario" if len(study.rows) == 1 else f"{len(study.rows)} scenarios"
    return f"{count}. Exact: {exact}. Least error alone: {wins}; shared by several: {study.ties}."


def beside_published(study: Study) -> str | None:
    """The counts of the public study beside ours; None unless all of its scenarios were run."""
    public = study.public
    if len(public.rows) != published.SCENARIOS:
        return None
    wins, exact = study.public_wins, public.exact("hybrid")
    ahead = ", ".join(f"{NUMBERED[name]} on {wins[name]} ({published.WINS[name]})" for name in NUMBERED)
    ties = len(public.rows) - sum(wins.values())
    return (
        f"The {len(public.rows)} scenarios of the public study, its counts in brackets: algorithm 3 is exact on "
        f"{exact} ({published.EXACT}); alone ahead is algorithm {ahead}; tied {ties} ({published.TIES})."
    )


def findings(study: Study) -> list[str]:
    """What the figures show, as a list of sentences."""
    found = [
        f"hybrid is worse than requantize on {loss.scenario}: ratio {loss.ratio:.4f}; by the rule of April 2026 "
        f"{loss.ratio_of_april:.4f}{_published_ratio(loss.scenario)}."
        for loss in study.losses
    ] or ["hybrid is never worse than requantize."]
    for row in study.inexact:
        best = row.outcomes["optimal"].squared_error
        others = {name: row.outcomes[name].squared_error for name in ALGORITHMS if name != "optimal"}
        name = min(others, key=lambda key: others[key])
        gain = 1 - best / others[name]
        compared = f"{gain:.2%} below {name}" if gain > 1e-6 else f"equal to {name} within a millionth"
        found.append(f"{row.name}: optimal is {compared}; no choice can be below {row.bound / best:.2%} of its error.")
    return found


def _published_ratio(scenario: str) -> str:
    figures = published.PUBLISHED.get(scenario)
    return "" if figures is None else f" (published {figures.hybrid / figures.requantize:.4f})"


def published_rows(study: Study) -> list[tuple[str, str, str, str, str]]:
    """Scenario, algorithm, published error, ours under the rule of April 2026, ours under today's rule."""
    lines = []
    for row in study.rows:
        if row.published is None:
            continue
        for name, number in NUMBERED.items():
            figure = row.published.mse(name)
            shown = "–" if figure is None else f"{figure:.3g}"
            april = row.outcomes[APRIL.get(name, name)].mse
            lines.append((row.name, f"{number} {name}", shown, f"{april:.3g}", error_text(row, name)))
    return lines


def winner(row: Row) -> str:
    """The algorithms with the least error, as text."""
    if len(row.winners) == 1:
        return row.winners[0]
    return ("exact: " if row.outcomes["optimal"].squared_error == 0 else "tie: ") + ", ".join(row.winners)


def decibels(snr: float) -> str:
    return "exact" if math.isinf(snr) and snr > 0 else f"{snr:.1f} dB"


def error_text(row: Row, name: str) -> str:
    """The mean squared error of one column."""
    mse = row.outcomes[name].mse
    return "0" if mse == 0 else f"{mse:.3g}"


def number_text(value: int | None) -> str:
    return "–" if value is None else str(value)
