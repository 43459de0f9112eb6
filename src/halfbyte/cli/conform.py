"""`halfbyte conform`: compare the public API with golden vectors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from halfbyte.backends import ALIASES, BACKENDS
from halfbyte.cli.app import app, check_file, err, file_option, out, refusals, write_json
from halfbyte.cli.tables import print_table
from halfbyte.conform import Report, load_vectors, run_vectors
from halfbyte.errors import unknown_name


@app.command(short_help="Compare with golden vectors.")
def conform(
    vectors: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A directory of vectors (index.json and .safetensors), or a zip of one."),
    ],
    backend: Annotated[str, typer.Option(help=f"The backend that computes: auto, {', '.join(BACKENDS)}.")] = "auto",
    allow_pending: Annotated[
        bool,
        typer.Option(
            "--allow-pending", help="Exit with 0 if no case differs, even if some cases need a feature that is missing."
        ),
    ] = False,
    json_file: Annotated[
        Path | None,
        file_option("--json", "Also write the results to this file as JSON"),
    ] = None,
    show: Annotated[int, typer.Option(help="How many differing cases to print in full.", min=0)] = 10,
) -> None:
    """Run golden vectors through the public API and compare every output tensor bit for bit.

    Exit code 0: every case agrees (with --allow-pending: no case differs). 1: some cases do not agree. 2: the vectors
    cannot be read.
    """
    with refusals("conform"):
        if backend not in ("auto", *BACKENDS, *ALIASES):
            raise unknown_name("backend", backend, ["auto", *BACKENDS])
        check_file(json_file)
        cases = load_vectors(vectors)
    columns = (TextColumn("conform"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("conform", total=len(cases))
        report = run_vectors(cases, backend, lambda result: progress.advance(bar))
    _print_report(report, show)
    if json_file is not None:
        write_json("conform", json_file, report.as_json())
    out().print(report.last_line, markup=False, soft_wrap=True)
    raise typer.Exit(0 if report.passed(allow_pending) else 1)


def _print_report(report: Report, show: int) -> None:
    differing = [result for result in report.results if result.status == "differ"]
    for result in differing[:show]:
        out().print(f"{result.name}\n{result.detail}\n", markup=False, soft_wrap=True)
    if len(differing) > show:
        out().print(f"… and {len(differing) - show} more differing cases\n")
    table = Table("peer")
    for column in ("cases", "agree", "differ", "pending"):
        table.add_column(column, justify="right")
    for peer in (*report.peers, None):
        counts = [report.count("agree", peer), report.count("differ", peer), report.count("pending", peer)]
        table.add_row(peer or "all", *map(str, (sum(counts), *counts)))
    print_table(table, ("pending", "agree"))
    waiting = sorted({result.detail for result in report.results if result.status == "pending"})
    for reason in waiting:
        count = sum(result.detail == reason for result in report.results)
        out().print(f"pending: {count} {reason}", markup=False)
