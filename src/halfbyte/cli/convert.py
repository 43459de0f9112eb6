"""`halfbyte convert`: convert a checkpoint to FP4, streaming and resumable."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from halfbyte.checkpoint import Event, Options, Outcome, Plan, Resources, Rules, make_plan
from halfbyte.checkpoint.execute.conversion import DEFAULT_MEMORY, sizes_for
from halfbyte.checkpoint.execute.destination import Found, check_destination, check_refusal
from halfbyte.checkpoint.execute.device.choice import Choice, choose_device, choose_for_model
from halfbyte.checkpoint.execute.replacing import without_overwrite
from halfbyte.checkpoint.execute.target_device import CPU, kernel_reason, placed, resolve_device
from halfbyte.cli.app import STDOUT, app, check_file, file_option, refuse_unused, sentence, write_json
from halfbyte.cli.convert_arguments import Convert, memory_size
from halfbyte.cli.convert_calibrated import Text, prepare
from halfbyte.cli.convert_output import JsonLog, Quiet, Reporter, Screen
from halfbyte.cli.convert_scale import (
    AddressOption,
    EngineOption,
    GpusOption,
    MaxTasksOption,
    RankOption,
    Scale,
    WorldSizeOption,
    device_of_tasks,
    resolve_cluster,
    resolve_rank_options,
)
from halfbyte.errors import CheckpointError, HalfbyteError, InputError
from halfbyte.layouts import writable_layouts
from halfbyte.load_check import CLIENTS, check_client, check_load

LAYOUT_NAMES = ", ".join(name for name, layout in writable_layouts().items() if not layout.replaces)


@app.command(cls=Convert, short_help="Convert a checkpoint to FP4.")
def convert(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A directory with config.json and safetensors.")],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="The directory to write; new, empty, or unfinished.")
    ],
    to: Annotated[str, typer.Option(metavar="FORMAT", help="nvfp4, mxfp4, or bf16 (decode).")] = "nvfp4",
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How scales are chosen: amax, four_six, sweep, optimal; with --stats also hessian and gptq; "
            "with options: four_six:mse:256, sweep:fused, gptq:headroom=1. `halfbyte contracts` lists what each takes. "
            "Default: optimal for NVFP4; with --contract, the contract's own.",
        ),
    ] = None,
    statistics: Annotated[
        Path | None,
        typer.Option(
            "--stats",
            metavar="DIR",
            help="Statistics of the inputs (halfbyte calibrate), for these two, --activations stats and --smooth.",
        ),
    ] = None,
    strict_statistics: Annotated[
        bool, typer.Option("--strict-stats", help="Refuse modules that have no usable statistics.")
    ] = False,
    solved: Annotated[Path | None, typer.Option("--solved", metavar="DIR", hidden=True)] = None,
    calibrate_on: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            metavar="FILE",
            help="With --method gptq, --activations stats or --smooth: run the model on this text (or .npy, .u16, .u32 "
            "tokens), layer by layer.",
        ),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, metavar="N", help="With --calibrate: at most N windows.")] = 128,
    length: Annotated[int, typer.Option(min=2, metavar="L", help="With --calibrate: tokens per window.")] = 1024,
    layout: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"{LAYOUT_NAMES}. Default: the format's usual one.")
    ] = None,
    contract: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Whose bytes to write (`halfbyte contracts` lists the names). Default: modelopt, or ocp for MXFP4.",
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            metavar="none|unit|stats|FILE",
            help="none: weights alone (W4A16). unit: W4A4, input scale 1.0. stats: W4A4, input scales from --stats. "
            "FILE: W4A4, JSON of module: input amax.",
        ),
    ] = None,
    smooth: Annotated[
        bool,
        typer.Option(
            "--smooth",
            help="Fold factors (powers of two) of single channels into norms and preceding layers, chosen by the error "
            "of the outputs. Needs --stats or --calibrate.",
        ),
    ] = False,
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
            "--keep-first",
            "--num-layers-at-start-in-bf16",
            metavar="N",
            min=0,
            help="Do not quantize the first N layers.",
        ),
    ] = 0,
    keep_last: Annotated[
        int,
        typer.Option(
            "--keep-last", "--num-layers-at-end-in-bf16", metavar="N", min=0, help="Do not quantize the last N layers."
        ),
    ] = 0,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME…", help="Also write these names into the exclude list, as they are. Changes no tensor."
        ),
    ] = None,
    modules_from_model: Annotated[
        bool,
        typer.Option(
            "--modules-from-model",
            help="Ask the installed transformers what the modules of the model are, instead of the table in halfbyte.",
        ),
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="With --modules-from-model or --check-load: run the Python code that comes with SRC.",
        ),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            metavar="auto|cpu|cuda[:i,j]",
            help="Where to compute. cuda: all GPUs, cuda:0,2: these. auto: GPUs if that is faster. "
            "With --calibrate the model runs, and gptq solves, on one of them.",
        ),
    ] = "auto",
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of threads. Default: the number of processors.")
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for buffers and for the factors of --stats, such as 4GB. Default: 2GB for buffers, and "
            "what the factors need.",
        ),
    ] = None,
    max_gpu_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory on each GPU. Default: a quarter of what is free, at most 8 GiB."),
    ] = None,
    rank: RankOption = None,
    world_size: WorldSizeOption = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    gpus_per_task: GpusOption = None,
    max_tasks: MaxTasksOption = None,
    load: Annotated[
        str | None,
        typer.Option(
            "--check-load", metavar="|".join(CLIENTS), help="At the end, check that this client finds each tensor."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, and whether DST will be refused. Write nothing.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the files that an earlier conversion wrote to DST.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    json_log: Annotated[
        bool, typer.Option("--json-log", help="Print one JSON object per line on standard output, for programs.")
    ] = False,
    json_file: Annotated[
        Path | None,
        file_option("--json", "Also write the plan to this file as JSON"),
    ] = None,
) -> None:
    """Convert a Hugging Face checkpoint to FP4, without model code and in bounded memory.

    If a conversion stops, the same command continues from there, also with more modules kept. Exit code 0: DST is
    complete. 1: an error stopped the work (finished shards are kept), or --check-load found fault. 2: refused before
    anything was written. 130: stopped by Ctrl-C.

    On several machines with a shared file system: start the same command on each with --rank R --world-size N, or once
    with --engine ray. The bytes are the same.
    """
    reporter: Reporter = JsonLog() if json_log else Quiet() if quiet else Screen()
    began: list[Event] = []
    try:
        options = Options(
            to=to,
            layout=layout if layout is not None else "compressed-tensors" if to == "mxfp4" else "modelopt",
            method=method,
            contract=contract,
            activations=activations,
            rules=Rules(experts_only, tuple(include or ()), tuple(keep or ()), keep_first, keep_last),
            ignore=tuple(ignore or ()),
            modules_from_model=modules_from_model,
            trust_remote_code=trust_remote_code,
            statistics=statistics,
            strict_statistics=strict_statistics,
            solved=solved,
        )
        if json_log and json_file == STDOUT:
            raise InputError("--json - and --json-log would both write to standard output; name a file for the plan")
        if trust_remote_code and not (modules_from_model or load):
            raise InputError("--trust-remote-code belongs to --modules-from-model or --check-load")
        if calibrate_on is None:
            refuse_unused(context, "--calibrate FILE", windows="--windows", length="--length")
        check_file(json_file)
        refused = {"--overwrite": overwrite, "--calibrate": calibrate_on is not None, "--check-load": load is not None}
        one = resolve_rank_options(rank, world_size, {**refused, "--engine ray": engine != "local"})
        if load is not None:
            check_client(load)
        buffers = None if max_memory is None else memory_size(max_memory, "--max-memory")
        per_task = DEFAULT_MEMORY if buffers is None else buffers
        cluster = resolve_cluster(engine, address, gpus_per_task, max_tasks, workers or 1, per_task)
        check_destination(source, destination)
        text = None
        if calibrate_on is not None:
            text = Text(calibrate_on, windows, length, choose_for_model(device).device)
        smooth_on = choose_for_model(device).device if smooth else None
        options = prepare(source, destination, options, text, smooth_on, dry_run, reporter.few)
        plan = make_plan(source, options)
        if cluster is not None:
            chosen, workers = device_of_tasks(device, cluster), workers or 1
        else:
            chosen = choose_device(plan, workers) if device == "auto" else Choice(device, "")
            if text is not None and (reason := kernel_reason(plan)) is not None:
                chosen = Choice(CPU, f"{reason}; the model {_where(device)}")
        resources = Resources(
            workers,
            buffers,
            chosen.device if cluster is not None else resolve_device(chosen.device),
            chosen.reason,
            None if max_gpu_memory is None else memory_size(max_gpu_memory, "--max-gpu-memory"),
        )
        scale = Scale(one, cluster)
        plan = placed(plan, CPU if cluster is not None else resources.device)
        reporter.plan(plan, resources, sizes_for(plan, resources))
        if json_file is not None:
            write_json("convert", json_file, plan.as_json())
        if dry_run:
            reporter.found(destination, _examine(plan, destination, overwrite, one is not None))
            return
        reporter.finish(plan, destination, *_run(plan, destination, resources, overwrite, reporter, began, scale))
        if load is not None:
            began.append(Event("load", 0, 0))
            report = check_load(destination, load, trust_remote_code=trust_remote_code)
            reporter.load(report)
            if not report.clean:
                raise typer.Exit(1)
    except BrokenPipeError:
        raise
    except (HalfbyteError, OSError) as error:
        reporter.error(sentence(error))
        raise typer.Exit(1 if began else 2) from error
    except KeyboardInterrupt as error:
        again = "" if rank is not None else ", --overwrite starts again"
        reporter.error(f"stopped. Finished shards are kept; the same command continues from there{again}")
        raise typer.Exit(130) from error


def _where(device: str) -> str:
    """Where the model ran, and why there."""
    choice = choose_for_model(device)
    return f"ran on {choice.device}" + (f", because {choice.reason}" if choice.reason else "")


def _examine(plan: Plan, destination: Path, overwrite: bool, ranks: bool) -> Found:
    """What a run would find in the destination."""
    try:
        with without_overwrite(destination) if ranks else nullcontext():
            return check_refusal(plan, destination, overwrite)
    except CheckpointError as error:
        raise CheckpointError(f"DST will be refused: {error}") from error


def _run(
    plan: Plan,
    destination: Path,
    resources: Resources,
    overwrite: bool,
    reporter: Reporter,
    began: list[Event],
    scale: Scale,
) -> tuple[Outcome, float]:
    """Run the plan, and note when the work begins: an error before that is a refusal."""
    start = time.perf_counter()

    def report(event: Event) -> None:
        if event.kind == "begin":
            began.append(event)
        reporter.event(event)

    with reporter:
        outcome = scale.run(plan, destination, resources, overwrite, report)
    return outcome, time.perf_counter() - start
