"""`halfbyte inspect`: show the contents of a safetensors file or directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from halfbyte.cli.app import app, file_option, out, refusals, write_json
from halfbyte.cli.tables import print_table
from halfbyte.verify import summarize


@app.command(short_help="Show names, dtypes, shapes and sizes.")
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A .safetensors file, or a checkpoint directory.")],
    match: Annotated[str, typer.Option(help="Show only tensors whose name contains this text.")] = "",
    every: Annotated[
        bool, typer.Option("--all", help="Show one line per tensor, without grouping layers and experts.")
    ] = False,
    json_file: Annotated[
        Path | None,
        file_option("--json", "Also write the summary to this file as JSON"),
    ] = None,
) -> None:
    """Show names, dtypes, shapes and sizes. Only headers are read. Layers and experts of equal form share a line.

    Exit code 0: the headers were read. 2: PATH is not a safetensors file or checkpoint, or it is damaged.
    """
    with refusals("inspect"):
        summary = summarize(path, every, match)
    if match and not summary.tensors:
        out().print(f"no tensor's name contains {match!r}", markup=False, soft_wrap=True)
        if json_file is not None:
            write_json("inspect", json_file, summary.as_json())
        return
    table = Table()
    table.add_column("tensor", overflow="fold")
    table.add_column("count", justify="right")
    table.add_column("dtype")
    table.add_column("shape", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    for line in summary.lines:
        shape = " × ".join(map(str, line.shape)) or "scalar"
        table.add_row(line.name, str(line.count), line.dtype, shape, size_text(line.bytes))
    print_table(table, markup=False)
    by_dtype = ", ".join(f"{size_text(size)} {dtype}" for dtype, size in summary.dtypes.items())
    model = f", {summary.model_type}" if summary.model_type else ""
    counts = f"{summary.tensors} tensors in {summary.files} file{'' if summary.files == 1 else 's'}"
    out().print(f"{counts}, {size_text(summary.bytes)} ({by_dtype}){model}", markup=False, soft_wrap=True)
    out().print(summary.quantization, markup=False, soft_wrap=True)
    if json_file is not None:
        write_json("inspect", json_file, summary.as_json())


def size_text(size: int) -> str:
    """A number of bytes, in the unit that gives one to three digits before the point."""
    if size < 1000:
        return f"{size} B"
    value = float(size)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.95 or unit == "TB":
            break
    return f"{value:.1f} {unit}"
