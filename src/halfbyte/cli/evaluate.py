"""`halfbyte eval`: what a quantized checkpoint loses on a text, beside its source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfbyte import calibration
from halfbyte.calibration.tokens import read_windows
from halfbyte.cli.app import app, check_file, file_option, out, refusals, write_json
from halfbyte.cli.calibrate import (
    DeviceOption,
    LengthOption,
    SkipOption,
    TextOption,
    TokensOption,
    WindowsOption,
    layers_bar,
)


@app.command("eval", short_help="Perplexity, KL and agreement of a checkpoint with its source.")
def evaluate(
    path: Annotated[Path, typer.Argument(metavar="CKPT", help="The checkpoint, in any layout that convert reads.")],
    against: Annotated[Path, typer.Option(metavar="SRC", help="The checkpoint that it was made from.")],
    text: TextOption = None,
    tokens: TokensOption = None,
    windows: WindowsOption = 64,
    length: LengthOption = 1024,
    skip: SkipOption = 0,
    w4a4: Annotated[
        bool, typer.Option("--w4a4", help="Also round the inputs of FP4 layers, as a server does in W4A4.")
    ] = False,
    device: DeviceOption = "cpu",
    json_file: Annotated[
        Path | None,
        file_option("--json", "Also write the figures to this file as JSON"),
    ] = None,
) -> None:
    """Compare a checkpoint with its source on a text. Weights are decoded exactly; all is computed in float32.

    In brackets: 95 % bootstrap intervals over windows. KL is in nats. Exit code 0: done. 2: something cannot be read.
    """
    with refusals("eval"):
        check_file(json_file)
        read = read_windows(against, text, tokens, windows=windows, length=length, skip=skip)
        with layers_bar("eval") as progress:
            found = calibration.evaluate(path, against, read, w4a4=w4a4, device=device, progress=progress)
    if json_file is not None:
        write_json("eval", json_file, found.as_json() | {"text": read.as_json()})
    rows = {
        "perplexity": found.perplexity,
        "perplexity of the source": found.source_perplexity,
        "KL to the source": found.kl,
        "same likeliest token": found.top1,
    }
    for name, one in rows.items():
        between = f"   [{one.low:.5g}, {one.high:.5g}]" if found.windows > 1 else ""
        out().print(f"{name:25s} {one.value:10.5g}{between}", markup=False)
    count = f"{found.windows} windows" if found.windows > 1 else "1 window, which has no interval"
    line = f"{found.tokens} tokens in {count}; activations: {found.activations}"
    out().print(line, markup=False, soft_wrap=True)
