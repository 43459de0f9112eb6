"""The application that every command joins, and where it prints."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

import halfbyte

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
