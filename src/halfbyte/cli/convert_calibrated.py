"""`halfbyte convert --method gptq --calibrate FILE`: solve the weights first, then convert as ever."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from halfbyte import calibration
from halfbyte.calibration.tokens import read_windows
from halfbyte.checkpoint import Options, make_plan
from halfbyte.cli.calibrate import layers_bar
from halfbyte.errors import InputError
from halfbyte.methods import Gptq

SUFFIX = ".solved"
"""Behind the name of DST: the folder of solved weights. It stays until the user deletes it."""
TOKENS = (".npy", ".u16", ".u32")


@dataclass(frozen=True)
class Text:
    """What to calibrate on, and where."""

    path: Path
    windows: int
    length: int
    device: str


def solve_first(source: Path, destination: Path, options: Options, text: Text, dry_run: bool) -> Options:
    """Solve the weights into DST.solved, or continue there, and give the options that write them out.

    In a dry run nothing is solved: the plan is that of optimal scales, whose tensors are the same.
    """
    if options.method != "gptq" or options.statistics is not None or options.solved is not None:
        raise InputError("--calibrate belongs to --method gptq without --stats")
    plain = replace(options, method=None)
    if dry_run:
        return plain
    is_tokens = text.path.suffix in TOKENS
    read = read_windows(
        source,
        None if is_tokens else text.path,
        text.path if is_tokens else None,
        windows=text.windows,
        length=text.length,
    )
    folder = destination.with_name(destination.name + SUFFIX)
    run = calibration.solve_sequentially
    from halfbyte.calibration.sequential import Options as Solving

    with layers_bar("gptq") as progress:
        device = "cuda" if text.device.startswith("cuda") else "cpu"
        run(make_plan(source, plain), read, folder, Solving(Gptq(), device), progress)
    return replace(plain, solved=folder)
