"""`halfbyte convert` on tiny models, for the clients to load."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from halfbyte.cli import app
from tests.tiny_models import make


def convert(source: Path, target: Path, *options: str) -> Path:
    """The command itself, as a user types it."""
    result = CliRunner().invoke(app, ["convert", str(source), str(target), "--quiet", *options], env={"COLUMNS": "200"})
    if result.exit_code:
        raise AssertionError(f"halfbyte convert {' '.join(options)} ended with {result.exit_code}:\n{result.output}")
    return target


def converted(directory: Path, model: str, *options: str) -> Path:
    """A tiny model, made and converted."""
    source = directory / model
    if not source.exists():
        make(model, source)
    return convert(source, directory / "-".join([model, *options]).replace("--", ""), *options)
