"""The study as one HTML page that contains its plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from halfbyte.study import plots
from halfbyte.study.methods import MethodRow
from halfbyte.study.run import ALGORITHMS, COLUMNS, Row, Study

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
table { border-collapse: collapse; font-size: 13px } th, td { padding: .2rem .6rem; text-align: right }
th { border-bottom: 2px solid #1f2937 } td { border-bottom: 1px solid #e5e7eb }
th:first-child, td:first-child { text-align: left } .best { font-weight: 600; color: #15803d }
figure { display: inline-block; margin: .5rem 1rem .5rem 0 } figcaption { font-size: 12px }
.wide { overflow-x: auto } svg { max-width: 100% }
"""


def study_page(study: Study) -> str:
    """The page of the cast study. It needs no other files."""
    errors = {row.name: {name: row.outcomes[name].mse for name in COLUMNS} for row in study.rows}
    sections = [
        "<h1>MXFP4 to NVFP4</h1>",
        f"<p>{escape(summary(study))}</p>",
        *(f"<p>{escape(sentence)}</p>" for sentence in findings(study)),
        "<h2>Mean squared error against the MXFP4 source</h2>",
        f'<div class="wide">{plots.dots(errors, "mean squared error by scenario and algorithm")}</div>',
        "<h2>All figures</h2>",
        _table(study),
        "<h2>Block exponents</h2>",
        "<p>Blue: inside the window of the 18 largest powers of two. Red: outside; these blocks are changed.</p>",
        *(_histogram(row) for row in study.rows),
    ]
    maps = [_maps(row) for row in study.inexact]
    if any(maps):
        sections += [
            "<h2>Where the error is</h2>",
            "<p>Root mean square error of each patch of the tensor, logarithmic: red is the largest of the scenario, "
            "white a millionth of it or none.</p>",
            *maps,
        ]
    return _page(sections)


def methods_page(rows: Sequence[MethodRow]) -> str:
    """The method study: relative errors of every tensor on a log axis."""
    errors = {row.name: row.errors for row in rows}
    return _page([
        "<h1>The error of each method</h1>",
        "<p>Relative root mean square error of NVFP4; the ideal scale is a real number for each block of 16, the "
        "Shannon bound holds for independent normal numbers.</p>",
        f'<div class="wide">{plots.dots(errors, "relative error by tensor and method")}</div>',
    ])  # fmt: skip


def _page(sections: Sequence[str]) -> str:
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>halfbyte study</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def summary(study: Study) -> str:
    """One sentence: how many scenarios are exact under each algorithm."""
    exact = ", ".join(f"{name} {study.exact(name)}" for name in COLUMNS)
    wins = ", ".join(f"{name} {study.wins(name)}" for name in ALGORITHMS)
    return f"{len(study.rows)} scenarios. Exact: {exact}. Least error alone: {wins}; shared by several: {study.ties}."


def findings(study: Study) -> list[str]:
    """What the figures show, as a list of sentences."""
    found = [
        f"hybrid is worse than requantize on {loss.scenario}: ratio {loss.ratio:.4f}." for loss in study.losses
    ] or ["hybrid is never worse than requantize."]
    for row in study.inexact:
        best = row.outcomes["optimal"].squared_error
        others = {name: row.outcomes[name].squared_error for name in ALGORITHMS if name != "optimal"}
        name = min(others, key=lambda key: others[key])
        gain = 1 - best / others[name]
        compared = f"{gain:.2%} below {name}" if gain > 1e-6 else f"equal to {name} within a millionth"
        found.append(f"{row.name}: optimal is {compared}; no choice can be below {row.bound / best:.2%} of its error.")
    return found


def _table(study: Study) -> str:
    header = ["scenario", "spread", "m", "outside"] + [f"MSE {name}" for name in COLUMNS]
    header += ["SNR optimal", "max error optimal", "winner"]
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>"]
    for row in study.rows:
        cells = [row.name, _number(row.spread), _number(row.m), str(row.outside)]
        best = row.outcomes["optimal"]
        lines.append(
            "<tr>"
            + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            + "".join(
                f'<td class="best">{_error(row, name)}</td>' if name in row.winners else f"<td>{_error(row, name)}</td>"
                for name in COLUMNS
            )
            + f"<td>{decibels(best.snr)}</td><td>{best.max_error:.3g}</td><td>{escape(winner(row))}</td></tr>"
        )
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def winner(row: Row) -> str:
    """The algorithms with the least error, as text."""
    if len(row.winners) == 1:
        return row.winners[0]
    return ("exact: " if row.outcomes["optimal"].squared_error == 0 else "tie: ") + ", ".join(row.winners)


def decibels(snr: float) -> str:
    return "exact" if math.isinf(snr) and snr > 0 else f"{snr:.1f} dB"


def _error(row: Row, name: str) -> str:
    mse = row.outcomes[name].mse
    return "0" if mse == 0 else f"{mse:.4g}"


def _number(value: int | None) -> str:
    return "–" if value is None else str(value)


def _histogram(row: Row) -> str:
    inside = (0, 0) if row.m is None else (row.m - 9, row.m + 8)
    picture = plots.bars(row.exponents, inside, f"block exponents of {row.name}")
    return f"<figure>{picture}<figcaption>{escape(row.name)}, spread {_number(row.spread)}</figcaption></figure>"


def _maps(row: Row) -> str:
    shown = {name: row.outcomes[name].error_map for name in COLUMNS if row.outcomes[name].error_map}
    ceiling = max((value for error_map in shown.values() for line in error_map for value in line), default=0.0)
    figures = [
        f"<figure>{plots.heat_map(error_map, ceiling, f'errors of {name} on {row.name}')}"
        f"<figcaption>{escape(row.name)}, {escape(name)}</figcaption></figure>"
        for name, error_map in shown.items()
    ]
    return f"<div>{''.join(figures)}</div>" if figures else ""
