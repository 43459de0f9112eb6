"""`halfbyte study`: compare the errors of the casts from MXFP4 to NVFP4, or of the quantization methods."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from halfbyte.cli.app import app, check_file, err, file_option, out, refusals, refuse_unused, write_text
from halfbyte.cli.tables import print_table
from halfbyte.errors import InputError, UnsupportedError
from halfbyte.study import MethodRow, Study, get_scenario, run_methods, run_study
from halfbyte.study.device import DEVICES, on_device
from halfbyte.study.export import methods_csv, methods_json, study_csv, study_json
from halfbyte.study.methods import COLUMNS as METHOD_COLUMNS
from halfbyte.study.methods import SAMPLE
from halfbyte.study.page import methods_page, study_page
from halfbyte.study.run import COLUMNS, MEASURED, Row
from halfbyte.study.scenarios import SCENARIOS
from halfbyte.study.weights import read_statistics, read_weights
from halfbyte.study.words import (
    APRIL_NOTE,
    beside_published,
    decibels,
    error_text,
    findings,
    number_text,
    published_rows,
    summary,
    winner,
)

DETAILED = 3
"""If at most this many scenarios are studied, every algorithm gets a separate line."""


@app.command(short_help="Compare casts, or quantization methods.")
def study(
    context: typer.Context,
    scenario: Annotated[list[str] | None, typer.Option(help="Study this scenario; may be given several times.")] = None,
    methods: Annotated[bool, typer.Option("--methods", help="Study quantization methods instead of casts.")] = False,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="With --methods: study the weights in this safetensors file or directory."),
    ] = None,
    statistics: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --weights: a file with activations or Hessians, under the names of the weights."
        ),
    ] = None,
    sample: Annotated[
        int, typer.Option(help="With --methods: about how many elements of each tensor to measure.", min=16)
    ] = SAMPLE,
    device: Annotated[str, typer.Option(help=f"Where to compute: {', '.join(DEVICES)}.")] = "cpu",
    json_file: Annotated[
        Path | None,
        file_option("--json", "Write the figures as JSON"),
    ] = None,
    csv_file: Annotated[
        Path | None,
        file_option("--csv", "Write the figures as CSV"),
    ] = None,
    html_file: Annotated[
        Path | None,
        file_option("--html", "Write a page with the figures and plots"),
    ] = None,
) -> None:
    """Compare the casts from MXFP4 to NVFP4 on 31 kinds of tensors, or with --methods the ways to quantize to NVFP4.

    27 of them are those of the public study, whose figures are printed beside ours.

    Exit code 0: done. 2: a scenario, device or file does not exist.
    """
    with refusals("study"):
        chosen = [get_scenario(name).name for name in scenario] if scenario else list(SCENARIOS)
        if (weights or statistics) and not methods:
            raise UnsupportedError("--weights and --statistics belong to --methods")
        if statistics and not weights:
            raise UnsupportedError("--statistics needs --weights: it holds the inputs of those layers")
        if weights and scenario:
            raise UnsupportedError("--scenario and --weights name two things to study; give one of them")
        if not methods:
            refuse_unused(context, "--methods", sample="--sample")
        for file in (json_file, csv_file, html_file):
            check_file(file)
        if methods:
            rows = _run_methods(chosen, weights, statistics, sample, device)
            _write(json_file, json.dumps(methods_json(rows), indent=1) + "\n")
            _write(csv_file, methods_csv(rows))
            _write(html_file, methods_page(rows))
            _print_methods(rows)
        else:
            with _bar(len(chosen)) as advance:
                result = run_study(chosen, device, maps=html_file is not None, progress=lambda row: advance())
            _write(json_file, json.dumps(study_json(result), indent=1) + "\n")
            _write(csv_file, study_csv(result))
            _write(html_file, study_page(result))
            _print_study(result)


class _Advance:
    """Called after each finished scenario or tensor."""

    def __init__(self, progress: Progress, total: int | None) -> None:
        self._progress, self._task = progress, progress.add_task("study", total=total)

    def __call__(self) -> None:
        self._progress.advance(self._task)


@contextmanager
def _bar(total: int | None) -> Iterator[_Advance]:
    columns = (TextColumn("study"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True, disable=not sys.stderr.isatty()) as progress:
        yield _Advance(progress, total)


def _run_methods(
    chosen: Sequence[str], weights: Path | None, statistics: Path | None, sample: int, device: str
) -> list[MethodRow]:
    tensors: Iterator[tuple[str, npt.NDArray[np.generic]]]
    if weights is None:
        tensors = ((name, SCENARIOS[name].tensor()) for name in chosen)
    else:
        tensors = read_weights(weights)
    given = None if statistics is None else read_statistics(statistics)
    with _bar(len(chosen) if weights is None else None) as advance:
        rows = run_methods(tensors, given, on_device(device), sample, lambda row: advance())
    if not rows:
        raise InputError(f"{weights} holds no float matrix whose rows are multiples of 16")
    return rows


def _print_study(result: Study) -> None:
    table = Table("scenario", title="mean squared error against the MXFP4 source", title_justify="left")
    for column in ("spread", "m", "outside", *COLUMNS, "SNR of optimal", "max error of optimal"):
        table.add_column(column, justify="right")
    table.add_column("least error")
    for row in result.rows:
        best = row.outcomes["optimal"]
        cells = [number_text(value) for value in (row.spread, row.m, row.outside)]
        cells += [_shown(row, name) for name in COLUMNS]
        table.add_row(row.name, *cells, decibels(best.snr), f"{best.max_error:.3g}", winner(row))
    optional = (
        "least error",
        "outside",
        "m",
        "max error of optimal",
        "SNR of optimal",
        "modelopt",
        "midpoint",
        "spread",
    )
    print_table(table, optional)
    if len(result.rows) <= DETAILED:
        for row in result.rows:
            _print_details(row)
    if lines := published_rows(result):
        _print_published(lines)
    for sentence in (summary(result), beside_published(result), *findings(result)):
        if sentence:
            out().print(sentence, markup=False, soft_wrap=True)


def _print_details(row: Row) -> None:
    """Every algorithm on one scenario."""
    table = Table("algorithm", title=f"{row.name}: {row.about}, {row.blocks} blocks", title_justify="left")
    for column in ("MSE", "SNR", "max error", "global scale", "blocks changed", "label"):
        table.add_column(column, justify="right")
    for name in MEASURED:
        outcome = row.outcomes[name]
        scale = f"2^{outcome.m}" if outcome.m is not None else f"{outcome.global_scale:.6g}"
        figures = (_shown(row, name), decibels(outcome.snr), f"{outcome.max_error:.3g}", scale)
        table.add_row(name, *figures, str(outcome.requantized), outcome.label)
    print_table(table, ("max error", "SNR"))


def _print_published(lines: Sequence[tuple[str, ...]]) -> None:
    """The figures of the public study beside ours."""
    table = Table("scenario", "algorithm", title="beside the published mean squared errors", title_justify="left")
    for column in ("published", "rule of April 2026", "today's rule"):
        table.add_column(column, justify="right")
    for line in lines:
        table.add_row(*line)
    print_table(table)
    out().print(APRIL_NOTE, markup=False, soft_wrap=True)


def _shown(row: Row, name: str) -> str:
    shown = error_text(row, name)
    return f"[bold green]{shown}[/]" if name in row.winners else shown


def _print_methods(rows: Sequence[MethodRow]) -> None:
    for title, errors in (
        ("relative RMS error", {row.name: row.errors for row in rows}),
        ("relative RMS error of the layer's output", {row.name: row.output_errors for row in rows}),
    ):
        columns = [name for name in METHOD_COLUMNS if any(name in found for found in errors.values())]
        if not columns:
            continue
        table = Table(title=title, title_justify="left")
        table.add_column("tensor", overflow="fold")
        for column in columns:
            table.add_column(column, justify="right")
        for name, found in errors.items():
            table.add_row(name, *(f"{found[column]:.2%}" if column in found else "–" for column in columns))
        print_table(table, [column for column in columns if column.startswith("4over6")], markup=False)


def _write(path: Path | None, text: str) -> None:
    if path is not None:
        write_text("study", path, text)
