"""What `halfbyte convert` does before it plans: statistics, factors of smoothing, and weights solved by gptq.

Each goes to a folder or file beside DST, and stays until the user deletes it: the same command continues from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from halfbyte import calibration
from halfbyte.calibration.tokens import Windows, read_windows
from halfbyte.checkpoint import Options, make_plan
from halfbyte.checkpoint.plan.target import STATS
from halfbyte.cli.calibrate import layers_bar
from halfbyte.errors import HalfbyteError, InputError
from halfbyte.methods import Gptq
from halfbyte.smoothing import Smoothing, read_smoothing, write_smoothing

SOLVED, COLLECTED, FACTORS = ".solved", ".stats", ".smoothing.json"
"""Behind the name of DST."""
TOKENS = (".npy", ".u16", ".u32")


@dataclass(frozen=True)
class Text:
    """What to calibrate on, and where."""

    path: Path
    windows: int
    length: int
    device: str
    """cpu, or one GPU: cuda:0."""

    def read(self, source: Path) -> Windows:
        is_tokens = self.path.suffix in TOKENS
        text, tokens = (None, self.path) if is_tokens else (self.path, None)
        return read_windows(source, text, tokens, windows=self.windows, length=self.length)


def prepare(
    source: Path,
    destination: Path,
    options: Options,
    text: Text | None,
    smooth: str | None,
    dry_run: bool,
    report_few: Callable[[dict[str, int]], None],
) -> Options:
    """The options with which to plan, once all that comes before is done.

    A dry run with a text runs no model: its plan has unit input scales and no factors, with the same tensors.
    smooth: the device that chooses factors of smoothing; None: none are wanted.
    report_few: gets the experts with too few tokens for gptq, if there are any.
    """
    for_inputs = smooth is not None or options.activations == STATS
    if text is None:
        return options if smooth is None else _smoothed(source, destination, options, smooth, dry_run)
    if options.solved is not None or (options.served != "gptq" and not for_inputs):
        raise InputError("--calibrate belongs to --method gptq, --smooth and --activations stats")
    if options.statistics is not None and not for_inputs:
        raise InputError("--calibrate makes its own statistics: leave out --stats")
    if dry_run:
        return replace(
            options,
            method=None if options.served else options.method,
            statistics=None,
            activations="unit" if options.activations == STATS else options.activations,
        )
    windows = text.read(source)
    if for_inputs and options.statistics is None:
        folder = _beside(destination, COLLECTED)
        _collect(source, windows, folder, options, text)
        options = replace(options, statistics=folder)
    if smooth is not None:
        options = _smoothed(source, destination, options, smooth, dry_run)
    if options.served != "gptq":
        return options
    options, few = _solved(source, destination, options, text, windows)
    if few:
        report_few(few)
    return options


def _beside(destination: Path, suffix: str) -> Path:
    return destination.with_name(destination.name + suffix)


def _collect(source: Path, windows: Windows, folder: Path, options: Options, text: Text) -> None:
    """Statistics of the unquantized model: what smoothing and input scales need."""
    run = calibration.calibrate
    from halfbyte.calibration.collect import Options as Collecting

    moments = "blocks" if options.served == "hessian" else "diagonal"
    with layers_bar("calibrate") as progress:
        run(source, windows, folder, Collecting(moments, text.device), progress)


def _smoothed(source: Path, destination: Path, options: Options, device: str, dry_run: bool) -> Options:
    """Choose the factors, or take those that were chosen from the same before."""
    if options.statistics is None:
        raise InputError(
            "--smooth needs statistics: --stats DIR (`halfbyte calibrate` makes them), or --calibrate FILE"
        )
    fit, origin_of = calibration.fit_smoothing, calibration.smoothing_origin
    unit = "unit" if options.activations == STATS else options.activations
    method = None if options.served else options.method
    plan = make_plan(source, replace(options, method=method, statistics=None, activations=unit))
    path = _beside(destination, FACTORS)
    found = _read(path)
    if found is None or found.origin != origin_of(plan, options.statistics):
        with layers_bar(f"smooth on {device}", "places") as progress:
            found = fit(plan, options.statistics, progress, device)
        if not dry_run:
            write_smoothing(path, found)
    return replace(options, smoothing=found)


def _read(path: Path) -> Smoothing | None:
    try:
        return read_smoothing(path) if path.exists() else None
    except HalfbyteError:
        return None


def _solved(
    source: Path, destination: Path, options: Options, text: Text, windows: Windows
) -> tuple[Options, dict[str, int]]:
    """Solve the weights, or continue; the options that write them out, and experts with too few tokens."""
    plain = replace(options, method=None)
    method = options.method if isinstance(options.method, Gptq) else Gptq()
    folder = _beside(destination, SOLVED)
    run = calibration.solve_sequentially
    from halfbyte.calibration.sequential import Options as Solving

    with layers_bar("gptq") as progress:
        few = run(make_plan(source, plain), windows, folder, Solving(method, text.device), progress)
    return replace(plain, solved=folder), few
