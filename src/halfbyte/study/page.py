"""The study as one HTML page that contains its plots."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from halfbyte.study import plots
from halfbyte.study.methods import MethodRow
from halfbyte.study.run import COLUMNS, Row, Study
from halfbyte.study.words import (
    APRIL_NOTE,
    beside_published,
    decibels,
    error_text,
    findings,
    number_text,
    published_rows,
    summary,
)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
table { border-collapse: collapse; font-size: 13px } th, td { padding: .2rem .6rem; text-align: right }
th { border-bottom: 2px solid #1f2937; vertical-align: bottom } td { border-bottom: 1px solid #e5e7eb }
td { white-space: nowrap } .best { font-weight: 600; color: #15803d }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff }
.names th:nth-child(2), .names td:nth-child(2) { text-align: left }
figure { display: inline-block; margin: .5rem 1rem .5rem 0; max-width: 100% } figcaption { font-size: 12px }
.wide { overflow-x: auto } svg, img { max-width: 100% } img { border: 1px solid #e5e7eb } .wide svg { max-width: none }
"""
"""Wide tables and plots scroll on a small screen, and the names of their rows stay in sight."""


def study_page(study: Study) -> str:
    """The page of the cast study. It needs no other files."""
    errors = {row.name: {name: row.outcomes[name].mse for name in COLUMNS} for row in study.rows}
    sections = [
        "<h1>MXFP4 to NVFP4</h1>",
        f"<p>{escape(summary(study))}</p>",
        *(f"<p>{escape(sentence)}</p>" for sentence in (beside_published(study),) if sentence),
        *_listed(findings(study)),
        "<h2>Mean squared error against the MXFP4 source</h2>",
        f'<div class="wide">{plots.dots(errors, "mean squared error by scenario and algorithm")}</div>',
        *_published(study),
        "<h2>All figures</h2>",
        "<p>Mean squared errors against the MXFP4 source; the least of each scenario in green. Outside: blocks that "
        "do not fit the window of 2^m. SNR and max error are those of optimal.</p>",
        _table(study),
        "<h2>Block exponents</h2>",
        "<p>Blue: inside the window of the 18 largest powers of two. Red: outside; codes cannot be kept.</p>",
        *(_histogram(row) for row in study.rows),
    ]
    maps = [_maps(row) for row in study.inexact]
    if any(maps):
        sections += [
            "<h2>Where the error is</h2>",
            "<p>Root mean square error of each patch of the tensor, as a share of the tensor's root mean square. The "
            "colour is logarithmic: red is the largest of the picture, which its caption gives, white a millionth of "
            "it or none.</p>",
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
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>halfbyte study</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _listed(sentences: Sequence[str]) -> list[str]:
    return ["<ul>", *(f"<li>{escape(sentence)}</li>" for sentence in sentences), "</ul>"]


def _published(study: Study) -> list[str]:
    """The published figures beside ours, where a scenario has some."""
    lines = published_rows(study)
    if not lines:
        return []
    header = ("scenario", "algorithm", "published", "rule of April 2026", "today's rule")
    cells = ["".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines]
    return [
        "<h2>Beside the published figures</h2>",
        f"<p>Mean squared errors. {escape(APRIL_NOTE)} Seeds differ, so figures agree up to sampling noise.</p>",
        _rows(header, cells, "names"),
    ]


def _rows(header: Sequence[str], rows: Sequence[str], kind: str = "figures") -> str:
    lines = [f"<tr>{row}</tr>" for row in ("".join(f"<th>{escape(cell)}</th>" for cell in header), *rows)]
    return f'<div class="wide"><table class="{kind}">{"".join(lines)}</table></div>'


def _table(study: Study) -> str:
    header = ("scenario", "spread", "m", "outside", *COLUMNS, "SNR", "max error")
    rows = []
    for row in study.rows:
        best = row.outcomes["optimal"]
        cells = [f'<td title="{escape(row.about)}">{escape(row.name)}</td>']
        cells += [f"<td>{number_text(value)}</td>" for value in (row.spread, row.m, row.outside)]
        for name in COLUMNS:
            kind = ' class="best"' if name in row.winners else ""
            cells.append(f"<td{kind}>{error_text(row, name)}</td>")
        cells.append(f"<td>{decibels(best.snr)}</td><td>{best.max_error:.3g}</td>")
        rows.append("".join(cells))
    return _rows(header, rows)


def _histogram(row: Row) -> str:
    inside = (0, 0) if row.m is None else (row.m - 9, row.m + 8)
    picture = plots.bars(row.exponents, inside, f"block exponents of {row.name}")
    return f"<figure>{picture}<figcaption>{escape(row.name)}, spread {number_text(row.spread)}</figcaption></figure>"


def _maps(row: Row) -> str:
    """The error maps of one scenario, each with its own largest error as red."""
    figures = []
    for name in COLUMNS:
        if error_map := row.outcomes[name].error_map:
            largest = max(map(max, error_map))
            picture = plots.heat_map(error_map, largest, f"errors of {name} on {row.name}")
            caption = escape(f"{row.name}, {name}: up to {largest:.2g}")
            figures.append(f"<figure>{picture}<figcaption>{caption}</figcaption></figure>")
    return f"<div>{''.join(figures)}</div>" if figures else ""
