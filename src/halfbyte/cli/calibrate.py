"""`halfbyte calibrate`: statistics of the inputs of a model's linear layers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from halfbyte import calibration
from halfbyte.calibration.tokens import Windows, read_windows
from halfbyte.cli.app import app, check_file, err, file_option, out, refusals, refuse_unused, write_json
from halfbyte.cli.convert_scale import LOCAL, AddressOption, EngineOption, GpusOption, MaxTasksOption, resolve_cluster
from halfbyte.errors import InputError
from halfbyte.scale.cluster import Settings, connect
from halfbyte.statistics import MOMENTS, Statistics, merge_statistics

LISTED = 8
RUN_OPTIONS = {
    "moments": "--moments",
    "windows": "--windows",
    "length": "--length",
    "skip": "--skip",
    "device": "--device",
    "engine": "--engine",
}
"""Options that say how a model is run."""
KEPT = "and keep a diagonal or nothing"
"""What statistics have of experts that saw too few tokens."""

TextOption = Annotated[Path | None, typer.Option("--text", metavar="FILE", help="A UTF-8 text.")]
TokensOption = Annotated[
    Path | None, typer.Option("--tokens", metavar="FILE", help="Tokens instead of text: .npy, or plain .u16 or .u32.")
]
WindowsOption = Annotated[int, typer.Option("--windows", metavar="N", min=1, help="At most this many windows.")]
LengthOption = Annotated[int, typer.Option("--length", metavar="L", min=2, help="Tokens per window.")]
SkipOption = Annotated[int, typer.Option("--skip", metavar="N", min=0, help="Leave out the first N tokens.")]
DeviceOption = Annotated[str, typer.Option("--device", metavar="cpu|cuda[:i]", help="Where the model runs.")]


@contextmanager
def layers_bar(name: str, of: str = "layers") -> Iterator[Callable[[int, int], None]]:
    """A bar of layers, or of something else, on standard error."""
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TextColumn(of), TimeRemainingColumn())
    with Progress(*columns, console=err(), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@app.command(short_help="Collect statistics of a model's inputs, for gptq and hessian.")
def calibrate(
    context: typer.Context,
    paths: Annotated[list[Path], typer.Argument(metavar="MODEL", help="A checkpoint. With --merge: folders to merge.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to write or continue.")],
    text: TextOption = None,
    tokens: TokensOption = None,
    moments: Annotated[
        str, typer.Option(metavar="|".join(MOMENTS), help="How much of the second moments to keep.")
    ] = "full",
    windows: WindowsOption = 128,
    length: LengthOption = 1024,
    skip: SkipOption = 0,
    device: DeviceOption = "cpu",
    engine: EngineOption = "local",
    address: AddressOption = None,
    gpus_per_task: GpusOption = None,
    max_tasks: MaxTasksOption = None,
    parts: Annotated[
        int, typer.Option("--parts", metavar="K", min=1, help="With --engine ray: cut the windows into K parts.")
    ] = 8,
    merge: Annotated[bool, typer.Option("--merge", help="Merge folders of statistics, weighted by tokens.")] = False,
    json_file: Annotated[
        Path | None,
        file_option("--json", "Also write what was collected to this file as JSON"),
    ] = None,
) -> None:
    """Run a model over a text, layer by layer, and write statistics of every linear layer's input.

    If it stops, the same command continues after the last finished layer. With --merge, the arguments are folders of
    statistics (or imatrix files of llama.cpp), and no model runs. Exit code 0: complete. 2: refused.

    With --engine ray, each task runs the model over a part of the windows, and the parts are added up. The statistics
    depend on --parts in their last bits, and on nothing else of the cluster.
    """
    with refusals("calibrate"):
        check_file(json_file)
        if engine == LOCAL:
            refuse_unused(context, "--engine ray", parts="--parts")
        else:
            refuse_unused(context, "--engine local; use --num-gpus-per-task", device="--device")
        if merge:
            if text is not None or tokens is not None:
                raise InputError("--merge runs no model: leave out --text and --tokens")
            refuse_unused(context, "a run of the model: leave it out with --merge", **RUN_OPTIONS)
            found = merge_statistics(paths, output)
        else:
            if len(paths) != 1:
                raise InputError(f"one model at a time, not {len(paths)}; --merge adds up folders of statistics")
            cluster = resolve_cluster(engine, address, gpus_per_task, max_tasks)
            read = read_windows(paths[0], text, tokens, windows=windows, length=length, skip=skip)
            if cluster is None:
                found = _collect(paths[0], read, output, moments, device)
            else:
                found = _collect_on(cluster, paths[0], read, output, moments, parts)
    if few := found.header.get("few_tokens"):
        out().print(few_line(few, KEPT), markup=False, soft_wrap=True)
    out().print(f"{len(found.names)} linear layers: {output}", markup=False, soft_wrap=True)
    if json_file is not None:
        write_json("calibrate", json_file, dict(found.header) | {"modules": list(found.names)})


def _collect(model: Path, windows: Windows, output: Path, moments: str, device: str) -> Statistics:
    run = calibration.calibrate
    from halfbyte.calibration.collect import Options

    with layers_bar("calibrate") as progress:
        return run(model, windows, output, Options(moments, device), progress)


def _collect_on(
    settings: Settings, model: Path, windows: Windows, output: Path, moments: str, parts: int
) -> Statistics:
    _ = calibration.calibrate  # raises if torch is missing
    from halfbyte.calibration.collect import Options
    from halfbyte.scale.calibrate import calibrate_on_cluster

    options = Options(moments, "cuda" if settings.gpus else "cpu")
    with connect(settings) as cluster, layers_bar("calibrate", "parts") as progress:
        return calibrate_on_cluster(model, windows, output, cluster, options, parts, progress)


def few_line(few: dict[str, int], so: str) -> str:
    """Experts that saw too few tokens, by name and tokens, and what comes of it."""
    listed = ", ".join(f"{name} ({count})" for name, count in list(few.items())[:LISTED])
    more = f" and {len(few) - LISTED} more" if len(few) > LISTED else ""
    return f"{len(few)} experts saw too few tokens, {so}: {listed}{more}"
