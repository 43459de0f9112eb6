"""`halfbyte warm`: compile the usual GPU kernels before they are needed."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from halfbyte.backends.gpu import build_kernels, cache_folder, usual_calls, visible_architectures
from halfbyte.cli.app import app, out, refusals
from halfbyte.errors import HalfbyteError
from halfbyte.formats import FORMATS

DTYPES = ("bf16", "fp16", "fp32")


@app.command(short_help="Compile the usual GPU kernels ahead.")
def warm(
    arch: Annotated[
        list[str] | None,
        typer.Option(
            help="Compute capability to compile for, such as sm_90. Default: those of the cards in this machine."
        ),
    ] = None,
    format: Annotated[list[str] | None, typer.Option(help="A format; may be repeated. Default: all.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp16 or fp32; may be repeated. Default: bf16.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Kernels compiled at the same time.")] = max(1, os.cpu_count() or 1),
) -> None:
    """Compile the kernels of the usual calls on a GPU, and keep them on disk.

    The first call of a kind on a card compiles its kernels, which takes seconds. After `halfbyte warm` it finds them in
    the cache folder: HALFBYTE_CACHE, else halfbyte in XDG_CACHE_HOME, else ~/.cache/halfbyte. What is there already is
    not compiled again. No card is needed if --arch names one. The compiler that would be used later must be installed:
    the files belong to its version.
    """
    with refusals("warm"):
        architectures = arch or visible_architectures()
        if not architectures:
            raise HalfbyteError("there is no CUDA device here; name a compute capability, such as --arch sm_90")
        _check("format", format, tuple(FORMATS))
        _check("dtype", dtype, DTYPES)
        out(markup=False).print(f"cache folder: {cache_folder()}", soft_wrap=True)
        for architecture in architectures:
            calls = list(usual_calls(architecture, format or list(FORMATS), dtype or ["bf16"]))
            total = 0
            for call, compiled, seconds in build_kernels(calls, architecture, jobs):
                total += compiled
                what = f"{compiled} compiled" if compiled else "all there"
                line = f"{architecture}  {call.title}: {len(call.kernels)} kernels, {what} ({seconds:.1f} s)"
                out(markup=False).print(line, soft_wrap=True)
            out(markup=False).print(f"{architecture}: {total} kernels compiled in {seconds:.1f} s", soft_wrap=True)
    sys.stdout.flush()


def _check(what: str, given: list[str] | None, known: tuple[str, ...]) -> None:
    for name in given or ():
        if name not in known:
            raise HalfbyteError(f"unknown {what} {name!r}; known: {', '.join(known)}")
