"""The application that all commands belong to, and its output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
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
    rich_markup_mode=None,
)


WIDE = 1000
"""Columns of output that goes to a file or a pipe, whatever the terminal: no name is cut there."""


def out(markup: bool = True) -> Console:
    """Standard output. It is created for each use, so that it has the current width of the terminal.

    markup: False for text from files, such as names and patterns, whose brackets must be printed as they are.
    """
    console = Console(highlight=False, markup=markup, emoji=markup)
    return console if console.is_terminal else Console(highlight=False, markup=markup, emoji=markup, width=WIDE)


def err() -> Console:
    return Console(stderr=True, highlight=False)


def write_json(command: str, path: Path, content: Mapping[str, object]) -> None:
    """Write the file of --json. If the file cannot be written, the command ends with exit code 2."""
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        message = f"halfbyte {command}: {path} cannot be written: {error.strerror or error}"
        err().print(message, markup=False, soft_wrap=True)
        raise typer.Exit(2) from error


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
