"""The report of benchmarks/quality.py as lines, and as tables for the documentation.

    python -m benchmarks.quality_tables FILE.json [--than NAME]

Intervals are 95 % bootstrap intervals over windows (2000 draws, seed 0). That of a share of the loss draws the same
windows for the row, for amax and for the source: it says how sure the difference is, not how hard the text. So does
the second table, of each row against the row that --than names.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.calibration.evaluation import CONFIDENCE, DRAWS, SEED, interval

HEADS = {"error": 7, "prose": 8, "of loss": 8, "KL": 7, "top-1": 6, "code": 8, "KL ": 7, "W4A4": 8, "of loss ": 8}
COLUMNS = " ".join([f"{'method':48s}", *(f"{head.strip():>{width}s}" for head, width in HEADS.items()), " seconds"])

Row = dict[str, Any]


def base_of(row: Row, rows: list[Row], part: str) -> Row | None:
    """The row of amax in the same format, if both have the figures of a text."""
    base = next((one for one in rows if one["name"] == "amax" and one["format"] == row["format"]), None)
    return None if base is None or part not in base or part not in row else base


def recovered(row: Row, rows: list[Row], part: str) -> float | None:
    """How much of the loss of amax in the same format the row gives back."""
    base = base_of(row, rows, part)
    if base is None:
        return None
    source, lost = row[part]["source_perplexity"]["value"], base[part]["perplexity"]["value"]
    return float((lost - row[part]["perplexity"]["value"]) / (lost - source))


def recovered_interval(row: Row, rows: list[Row], part: str) -> tuple[float, float] | None:
    """The interval of `recovered`."""
    base = base_of(row, rows, part)
    if base is None:
        return None
    source, found, lost = (
        np.asarray(one["windows"][kind], np.float64)
        for one, kind in ((row[part], "source"), (row[part], "loss"), (base[part], "loss"))
    )
    draws = np.random.default_rng(SEED).integers(0, len(found), (DRAWS, len(found)))

    def perplexity(losses: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray(np.exp(losses[draws].mean(axis=1)), np.float64)

    shares = (perplexity(lost) - perplexity(found)) / (perplexity(lost) - perplexity(source))
    low, high = np.quantile(shares, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def line_of(row: Row, rows: list[Row]) -> str:
    """A row as it is printed while the benchmark runs."""
    name = f"{row['format']} {row['name']}"
    if "prose" not in row:
        return f"{name:48s} " + (f"skipped: {row['skipped']}" if "skipped" in row else f"failed: {row['failed']}")

    def number(part: str, what: str, digits: int) -> str:
        return f"{row[part][what]['value']:.{digits}f}" if part in row else ""

    def share(part: str) -> str:
        found = recovered(row, rows, part)
        return "" if found is None else f"{100 * found:.1f} %"

    return (
        f"{name:48s} {row['weight_error']:7.4f} {number('prose', 'perplexity', 3):>8s} "
        f"{share('prose'):>8s} {number('prose', 'kl', 4):>7s} {number('prose', 'top1', 3):>6s} "
        f"{number('code', 'perplexity', 3):>8s} {number('code', 'kl', 4):>7s} "
        f"{number('prose_w4a4', 'perplexity', 3):>8s} {share('prose_w4a4'):>8s} {row['seconds']:8.1f}"
    )


def table(report: Row, format: str) -> list[str]:
    """Markdown: a line per row, each number with its interval."""
    rows = [row for row in report["rows"] if row["format"] == format]
    heads = ["error of weights", "perplexity, prose", "given back", "KL", "perplexity, code", "KL on code",
             "perplexity, W4A4", "given back", "seconds"]  # fmt: skip
    lines = [f"| {format.upper()} | {' | '.join(heads)} |", f"|---|{'--:|' * len(heads)}"]
    for row in rows:
        if "prose" not in row:
            lines.append(f"| {row['name']} | {row.get('skipped') or row.get('failed')} |")
            continue
        prose, code = ("prose", "perplexity", 2), ("code", "perplexity", 2)
        cells = [
            f"{100 * row['weight_error']:.1f} %", _number(row, *prose), _share(row, rows, "prose"),
            _number(row, "prose", "kl", 3), _number(row, *code), _number(row, "code", "kl", 3),
            _number(row, "prose_w4a4", "perplexity", 2), _share(row, rows, "prose_w4a4"), f"{row['seconds']:.1f}",
        ]  # fmt: skip
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return lines


def _number(row: Row, part: str, what: str, digits: int) -> str:
    if part not in row:
        return ""
    found = row[part][what]
    return f"{found['value']:.{digits}f} ({found['low']:.{digits}f}–{found['high']:.{digits}f})"


def _share(row: Row, rows: list[Row], part: str) -> str:
    found, bounds = recovered(row, rows, part), recovered_interval(row, rows, part)
    if found is None or bounds is None:
        return ""
    return f"{100 * found:.0f} % ({100 * bounds[0]:.0f}–{100 * bounds[1]:.0f})"


def against(row: Row, other: Row) -> str:
    """A row's perplexity on prose divided by another's, less 1, and its KL less the other's, on the same windows."""
    loss, kl = (
        interval(np.subtract(row["prose"]["windows"][kind], other["prose"]["windows"][kind])) for kind in ("loss", "kl")
    )
    share, low, high = (100 * math.expm1(value) for value in (loss.value, loss.low, loss.high))
    cells = f"{share:+.2f} % ({low:+.2f} to {high:+.2f})", f"{kl.value:+.4f} ({kl.low:+.4f} to {kl.high:+.4f})"
    return f"| {row['name']} | {' | '.join(cells)} |"


def comparison(report: Row, name: str) -> list[str]:
    """Markdown: every row against the first one of this name, with intervals of the differences."""
    rows = [row for row in report["rows"] if "prose" in row]
    other = next((row for row in rows if row["name"] == name), None)
    if other is None:
        raise SystemExit(f"no row is called {name!r}; there are {', '.join(repr(row['name']) for row in rows)}")
    lines = [f"| than {name} | perplexity, prose | KL |", "|---|--:|--:|"]
    return lines + [against(row, other) for row in rows if row is not other]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--than", help="a row that all others are compared with")
    given = parser.parse_args()
    report = json.loads(given.file.read_text())
    print(f"`python -m benchmarks.quality {report['command']}`")
    print("; ".join(f"{name} {version}" for name, version in report["versions"].items()))
    print(f"{report['settings']}; unquantized: {report['source']}")
    for format in dict.fromkeys(row["format"] for row in report["rows"]):
        print("", *table(report, format), sep="\n")
    if given.than is not None:
        print("", *comparison(report, given.than), sep="\n")


if __name__ == "__main__":
    main()
