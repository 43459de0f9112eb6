"""The command: parse, call the library, print. No numerics here."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import halfbyte
from halfbyte.backends import BACKENDS
from halfbyte.conform import Report, load_vectors, run_vectors
from halfbyte.contracts import CONTRACTS, Contract
from halfbyte.contracts.spec import DecodeRule, defined_methods, formulas
from halfbyte.errors import HalfbyteError, unknown_name

app = typer.Typer(
    name="halfbyte",
    help="Tensors and checkpoints in 4-bit floating point, bit for bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def out() -> Console:
    """Standard output. Made when needed, so that the width is that of the moment."""
    return Console(highlight=False)


def err() -> Console:
    return Console(stderr=True, highlight=False)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"halfbyte {halfbyte.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Tensors and checkpoints in 4-bit floating point, bit for bit."""


@app.command()
def conform(
    vectors: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A directory of vectors (index.json and .safetensors), or a zip of one."),
    ],
    backend: Annotated[str, typer.Option(help=f"Which engine computes: auto, {', '.join(BACKENDS)}.")] = "auto",
    allow_pending: Annotated[
        bool, typer.Option("--allow-pending", help="Exit 0 although cases wait for a feature, if none differs.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the same as JSON.")] = None,
    show: Annotated[int, typer.Option(help="How many differing cases to print in full.", min=0)] = 10,
) -> None:
    """Run golden vectors through the public API and compare every output tensor bit for bit.

    Exit code 0: every case agrees (with --allow-pending: none differs). 1: some do not. 2: the vectors cannot be read.
    """
    try:
        if backend not in ("auto", *BACKENDS):
            raise unknown_name("backend", backend, ["auto", *BACKENDS])
        cases = load_vectors(vectors)
    except HalfbyteError as error:
        err().print(f"halfbyte conform: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    columns = (TextColumn("conform"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("conform", total=len(cases))
        report = run_vectors(cases, backend, lambda result: progress.advance(bar))
    _print_report(report, show)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    typer.echo(report.last_line)
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
    out().print(table)
    waiting = sorted({result.detail for result in report.results if result.status == "pending"})
    for reason in waiting:
        count = sum(result.detail == reason for result in report.results)
        out().print(f"pending: {count} {reason}", markup=False)


@app.command()
def contracts(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One contract, with its formulas.")] = None,
) -> None:
    """List the contracts, or show one: whose bytes it gives, its options, its formulas in rounding order."""
    if name is None:
        table = Table()
        table.add_column("contract", no_wrap=True)
        for column in ("formats", "methods", "source"):
            table.add_column(column, overflow="fold")
        for contract in (make() for make in CONTRACTS.values()):
            table.add_row(contract.name, ", ".join(_formats(contract)), ", ".join(_methods(contract)), contract.source)
        out().print(table)
        return
    if name not in CONTRACTS:
        err().print(f"halfbyte contracts: {unknown_name('contract', name, CONTRACTS)}", markup=False, soft_wrap=True)
        raise typer.Exit(2)
    make = CONTRACTS[name]
    contract = make()
    out().print(f"{contract.name}: {contract.source}\n", markup=False)
    out().print((inspect.getdoc(inspect.getmodule(make)) or "") + "\n", markup=False, soft_wrap=True)
    for option, default in (make.__kwdefaults__ or {}).items():
        out().print(f"  {option}={default!r}", markup=False)
    for format, rule in contract.rules.items():
        table = Table("slot", "formula", title=f"{contract.name}, {format}", title_justify="left")
        for slot, formula in formulas(rule).items():
            table.add_row(slot, formula)
        out().print(table)


def _formats(contract: Contract) -> list[str]:
    return [f"{name} (decode)" if isinstance(rule, DecodeRule) else name for name, rule in contract.rules.items()]


def _methods(contract: Contract) -> list[str]:
    rules = contract.rules.values()
    return list(dict.fromkeys(method.name for rule in rules for method in defined_methods(rule)))
