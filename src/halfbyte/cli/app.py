"""The application that all commands belong to, and its output."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import halfbyte
from halfbyte.errors import HalfbyteError, InputError

if TYPE_CHECKING:
    from typer._click.core import Command, Context  # typer's own copy of click: for the signature alone


class Commands(TyperGroup):
    """Refuses an empty argument: as a path it would be the current folder."""

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        for before, argument in itertools.pairwise(args):
            if argument == "" and not before.startswith("-"):
                raise typer.BadParameter("an argument is empty; is a variable of the shell not set?", ctx)
        return super().resolve_command(ctx, args)


class Application(typer.Typer):
    """Ctrl-C that no command answers, as while the commands are put together, ends with code 130 and no traceback."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().__call__(*arguments, **options)
        except KeyboardInterrupt:
            raise SystemExit(130) from None


app = Application(
    name="halfbyte",
    cls=Commands,
    help="Tensors and checkpoints in 4-bit floating point, bit for bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)


WIDE = 1000
"""Columns of output that goes to a file or a pipe, whatever the terminal: no name is cut there."""


STDOUT = Path("-")
"""As the file of an option: standard output. All else that would be printed there goes to standard error then."""

_on_stdout: set[Path] = set()  # empty, or STDOUT: shared by all threads


def file_option(name: str, what: str) -> Any:
    """An option that names a file to write a text to; `what`: its help."""
    return typer.Option(name, metavar="FILE", callback=_file_or_stdout, help=f"{what}; - is standard output.")


def _file_or_stdout(context: typer.Context, path: Path | None) -> Path | None:
    """- stands for standard output, which one file can be."""
    if path == STDOUT:
        if _on_stdout:
            raise typer.BadParameter("only one file can be - (standard output)", context)
        _on_stdout.add(STDOUT)
        context.call_on_close(_on_stdout.clear)
    return path


def out(markup: bool = True) -> Console:
    """Standard output. It is created for each use, so that it has the current width of the terminal.

    With a file on standard output it is standard error.

    markup: False for text from files, such as names and patterns, whose brackets must be printed as they are.
    """
    stderr = bool(_on_stdout)
    console = Console(stderr=stderr, highlight=False, markup=markup, emoji=markup)
    if console.is_terminal:
        return console
    return Console(stderr=stderr, highlight=False, markup=markup, emoji=markup, width=WIDE)


def err() -> Console:
    return Console(stderr=True, highlight=False)


def quoted(path: Path) -> str:
    """A path as an argument that can be pasted into a shell; one that begins with a hyphen is no option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def sentence(error: HalfbyteError | OSError) -> str:
    """An error for people: of the operating system's, which file, and what is the matter with it."""
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    return str(error)


@contextmanager
def refusals(command: str) -> Iterator[None]:
    """What a user can mend is one line on standard error and exit code 2: halfbyte's own errors, and those of files."""
    try:
        yield
    except BrokenPipeError:  # nobody reads the output any more
        raise
    except (HalfbyteError, OSError) as error:
        err().print(f"halfbyte {command}: {sentence(error)}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error


def refuse_unused(context: typer.Context, of: str, **options: str) -> None:
    """Raise for an option that was given, but does nothing without another one.

    of: the other option. options: names of parameters, and how they are spelled.
    """
    for name, option in options.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(f"{option} belongs to {of}")


def check_file(path: Path | None) -> None:
    """Raise if a file that is written at the end of long work cannot be written."""
    if path is None or path == STDOUT:
        return
    if path.is_dir():
        raise InputError(f"{path} cannot be written: {os.strerror(errno.EISDIR)}")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {path.absolute().parent}; make it first")


def write_json(command: str, path: Path, content: Mapping[str, object]) -> None:
    """Write the file of --json. If the file cannot be written, the command ends with exit code 2."""
    write_text(command, path, json.dumps(content, indent=1) + "\n")


def write_text(command: str, path: Path, text: str) -> None:
    """The same for any text."""
    if path == STDOUT:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
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
    _on_stdout.clear()  # options that were refused before, in this process, may have left it
