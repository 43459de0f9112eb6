"""`halfbyte verify`: check that a checkpoint agrees with its source and that servers can read it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from halfbyte import verify as library
from halfbyte.cli.app import app, check_file, err, file_option, out, refusals, write_json
from halfbyte.cli.convert_scale import AddressOption, EngineOption, MaxTasksOption, checked_by, resolve_cluster
from halfbyte.cli.tables import print_table
from halfbyte.errors import InputError
from halfbyte.load_check import CLIENTS, check_client, check_load
from halfbyte.verify.problems import number

FEW = 3
"""Problems of one kind that are all printed."""


@app.command(short_help="Check a checkpoint, alone or against its source.")
def verify(
    path: Annotated[Path, typer.Argument(metavar="DST", help="The checkpoint directory to check.")],
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="SRC", help="The checkpoint that DST was converted from: decode every tensor and compare."
        ),
    ] = None,
    limit: Annotated[
        float,
        typer.Option(
            "--max-error", help="A quantized weight with more than this relative error counts as wrong.", min=0
        ),
    ] = library.LIMIT,
    headers_only: Annotated[
        bool, typer.Option("--headers-only", help="Read only headers and tensor scales, not block scales.")
    ] = False,
    show: Annotated[int, typer.Option(help="The largest number of problems, and of weights, to print.", min=0)] = 20,
    load: Annotated[
        str | None,
        typer.Option(metavar="|".join(CLIENTS), help="Also check that this client, installed here, finds each tensor."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="With --load: run the Python code that comes with DST.")
    ] = False,
    engine: EngineOption = "local",
    address: AddressOption = None,
    max_tasks: MaxTasksOption = None,
    json_file: Annotated[
        Path | None,
        file_option("--json", "Also write everything to this file as JSON"),
    ] = None,
) -> None:
    """Check names, dtypes, shapes, shared scales, config and exclude lists; with --against, every value.

    Exit code 0: no errors, but there may be warnings. 1: errors were found, or --load found fault. 2: DST or SRC cannot
    be read, or the client of --load is not installed.
    """
    columns = (TextColumn("verify"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with refusals("verify"):
        if load is not None:
            check_client(load)
        elif trust_remote_code:
            raise InputError("--trust-remote-code belongs to --load")
        check_file(json_file)
        cluster = resolve_cluster(engine, address, None, max_tasks)
        with (
            checked_by(cluster) as each,
            Progress(*columns, console=err(), transient=True, disable=not sys.stderr.isatty()) as bar,
        ):
            task = bar.add_task("verify", total=None)
            report = library.verify(
                path if cluster is None else path.absolute(),
                against if cluster is None or against is None else against.absolute(),
                limit=limit,
                headers_only=headers_only,
                progress=lambda step: bar.update(task, completed=step.done, total=step.total),
                each=each,
            )
        loaded = None if load is None else check_load(path, load, trust_remote_code=trust_remote_code)
    _print_errors(report, show)
    _print_problems(report, show)
    if json_file is not None:
        content = report.as_json() | ({} if loaded is None else {"load": loaded.as_json()})
        write_json("verify", json_file, content)
    for sentence in [] if loaded is None else loaded.sentences():
        out().print(sentence, markup=False, soft_wrap=True)
    out().print(report.last_line, markup=False, soft_wrap=True)
    raise typer.Exit(0 if report.clean and (loaded is None or loaded.clean) else 1)


def _print_problems(report: library.Report, show: int) -> None:
    """Errors first. Of more than a few that differ in numbers only, the first stands for all."""
    left = 0
    for place, group in enumerate(report.alike()):
        if place >= show:
            left += len(group)
            continue
        for problem in group if len(group) <= FEW else group[:1]:
            more = f" (and {len(group) - 1} more like it)" if len(group) > FEW else ""
            line = f"{problem.level} [{problem.rule}] {problem.name}: {problem.text}{more}"
            out().print(line, markup=False, soft_wrap=True)
    if left:
        which = f"… and {left} more" if show else f"problems and warnings not shown: {left}"
        out().print(f"{which}; --json FILE has them all", soft_wrap=True)


def _print_errors(report: library.Report, show: int) -> None:
    if report.against is None:
        return
    table = Table(title="relative errors, worst first", title_justify="left")
    table.add_column("weight", overflow="fold")
    table.add_column("stored as", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("largest", justify="right", no_wrap=True)
    for error in report.errors[:show]:
        shape = " × ".join(map(str, error.shape))
        table.add_row(error.name, error.kind, shape, f"{error.relative:.4f}", f"{error.largest:.3g}")
    if report.errors[:show]:
        print_table(table, ("largest", "shape"), markup=False)
    if len(report.errors) > show:
        left = f"… and {len(report.errors) - show} more" if show else number(len(report.errors), "weight")
        out().print(f"{left}, none worse than {report.errors[show].relative:.4f}")
    out().print(f"{report.equal} other tensors are as in the source")
