"""`halfbyte convert`: convert a checkpoint to FP4, streaming and resumable."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from halfbyte.checkpoint import Event, Options, Outcome, Plan, Resources, Rules, make_plan, run
from halfbyte.checkpoint.execute.conversion import sizes_for
from halfbyte.checkpoint.execute.destination import check_destination
from halfbyte.checkpoint.execute.target_device import resolve_device
from halfbyte.cli.app import app
from halfbyte.cli.convert_output import JsonLog, Quiet, Reporter, Screen
from halfbyte.errors import HalfbyteError, InputError
from halfbyte.layouts import writable_layouts

if TYPE_CHECKING:
    from typer._click.core import Context  # typer's own copy of click: for the signature alone

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
LAYOUT_NAMES = ", ".join(name for name, layout in writable_layouts().items() if not layout.replaces)
SEVERAL = ("--keep", "--include", "--extra-high-precision-layers-hf")


class Convert(TyperCommand):
    """An option for patterns takes several of them: `--keep a b c` means `--keep a --keep b --keep c`.

    This is so after SRC and DST. Before them a pattern could be mistaken for a path, so an option takes only one.
    """

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, expand(args))


def expand(args: list[str]) -> list[str]:
    """The arguments, with the option repeated before each of its further patterns."""
    result: list[str] = []
    option = None
    positional = 0
    takes_value = False
    for argument in args:
        if argument.startswith("-") and argument != "-":
            option = argument if argument in SEVERAL else None
            takes_value = "=" not in argument and argument not in FLAGS
            result.append(argument)
        elif takes_value:
            takes_value = False
            result.append(argument)
        elif option is not None and positional >= 2:
            result += [option, argument]
        else:
            positional += 1
            result.append(argument)
    return result


FLAGS = ("--experts-only", "--dry-run", "--overwrite", "--quiet", "-q", "--json-log", "--help")


def memory_size(text: str) -> int:
    """The number of bytes in a text such as 2GB, 512MiB or 1e9.

    >>> memory_size("2GB"), memory_size("1.5GiB")
    (2000000000, 1610612736)
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    try:
        size = int(float(found.group(1)) * UNITS[(found.group(2) or "").upper()]) if found else 0
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise InputError(f"--max-memory {text!r} is not a size; examples: 2GB, 512MiB")
    return size


@app.command(cls=Convert)
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A directory with config.json and safetensors.")],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="The directory to write; new, empty, or unfinished.")
    ],
    to: Annotated[str, typer.Option(help="nvfp4, mxfp4, or bf16 (decode).")] = "nvfp4",
    method: Annotated[
        str | None,
        typer.Option(help="How scales are chosen: amax, four_six, sweep, optimal. Default: optimal for NVFP4."),
    ] = None,
    layout: Annotated[str | None, typer.Option(help=f"{LAYOUT_NAMES}. Default: the format's usual one.")] = None,
    contract: Annotated[
        str | None,
        typer.Option(
            help="Whose bytes to write (`halfbyte contracts` lists the names). Default: modelopt, or ocp for MXFP4."
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            metavar="none|unit|FILE",
            help="none: weights alone (W4A16). unit: W4A4, input scale 1.0. FILE: W4A4, JSON of module: input amax.",
        ),
    ] = None,
    experts_only: Annotated[bool, typer.Option("--experts-only", help="Quantize only experts.")] = False,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN…", help="Quantize exactly these modules, even those that the model family usually keeps."
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep",
            "--extra-high-precision-layers-hf",
            metavar="PATTERN…",
            help="Do not quantize these. A pattern with * ? [ must match the whole name, other text any part of it.",
        ),
    ] = None,
    keep_first: Annotated[
        int,
        typer.Option(
            "--keep-first", "--num-layers-at-start-in-bf16", min=0, help="Do not quantize the first N layers."
        ),
    ] = 0,
    keep_last: Annotated[
        int,
        typer.Option("--keep-last", "--num-layers-at-end-in-bf16", min=0, help="Do not quantize the last N layers."),
    ] = 0,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda[:i]", help="Where to compute.")] = "auto",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of threads. Default: the number of processors.")
    ] = None,
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory for buffers, such as 2GB.")] = "2GB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the files that an earlier conversion wrote to DST.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    json_log: Annotated[
        bool, typer.Option("--json-log", help="Print one JSON object per line on standard output, for programs.")
    ] = False,
) -> None:
    """Convert a Hugging Face checkpoint to FP4, without model code and in bounded memory.

    If a conversion stops, the same command continues from there. Exit code 0: DST is complete. 1: an error stopped the
    work; finished shards are kept. 2: refused before anything was written. 130: stopped by Ctrl-C.
    """
    reporter: Reporter = JsonLog() if json_log else Quiet() if quiet else Screen()
    began: list[Event] = []
    try:
        options = Options(
            to=to,
            layout=layout or ("compressed-tensors" if to == "mxfp4" else "modelopt"),
            method=method,
            contract=contract,
            activations=activations,
            rules=Rules(experts_only, tuple(include or ()), tuple(keep or ()), keep_first, keep_last),
        )
        check_destination(source, destination)
        plan = make_plan(source, options)
        resources = Resources(workers, memory_size(max_memory), resolve_device(device))
        reporter.plan(plan, resources, sizes_for(plan, resources))
        if dry_run:
            return
        reporter.finish(plan, destination, *_run(plan, destination, resources, overwrite, reporter, began))
    except HalfbyteError as error:
        reporter.error(str(error))
        raise typer.Exit(1 if began else 2) from error
    except KeyboardInterrupt as error:
        reporter.error(
            "stopped. Finished shards are kept; the same command continues from there, --overwrite starts again"
        )
        raise typer.Exit(130) from error


def _run(
    plan: Plan, destination: Path, resources: Resources, overwrite: bool, reporter: Reporter, began: list[Event]
) -> tuple[Outcome, float]:
    """Run the plan, and note when the work begins: an error before that is a refusal."""
    start = time.perf_counter()

    def report(event: Event) -> None:
        if event.kind == "begin":
            began.append(event)
        reporter.event(event)

    with reporter:
        outcome = run(plan, destination, resources, overwrite, report)
    return outcome, time.perf_counter() - start
